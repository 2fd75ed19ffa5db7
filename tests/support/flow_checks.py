"""Invariants of the queue of waiting requests."""

from __future__ import annotations

from typing import Any

from treeline_epp.flow.control import FlowControl
from treeline_epp.flow.fair_queue import Band, FairQueue


def check_control(control: FlowControl[Any]) -> None:
    """Check that every waiting request is in one queue, within the bounds."""
    held = {ticket for tickets in control._by_limit.values() for ticket in tickets}
    assert len(held) == sum(map(len, control._queues.values()))
    for queue in control._queues.values():
        assert len(queue), "a queue goes with its last request"
        check_queue(queue)
        for band in queue.bands.values():
            assert band.requests <= control.settings.max_requests
            assert band.bytes <= control.settings.max_bytes


def check_queue(queue: FairQueue) -> None:
    """Check that sums match the waiting requests, and that each waiting flow can be found."""
    assert list(queue.bands) == sorted(queue.bands, reverse=True)
    for band in queue.bands.values():
        assert band.requests
        _check_band(band)


def _check_band(band: Band) -> None:
    waiting = [ticket for flow in band.flows.values() for line in flow.lines.values() for ticket in line]
    assert band.requests == len(waiting)
    assert band.bytes == sum(ticket.size for ticket in waiting)
    assert band.uncached_tokens == sum(ticket.uncached_tokens for ticket in waiting)
    assert not any(ticket.done for ticket in waiting)
    for flow in band.flows.values():
        assert all(flow.lines.values())
        mine = [ticket for line in flow.lines.values() for ticket in line]
        assert list(flow.tickets) == sorted(mine, key=lambda ticket: ticket.number)
        assert flow.bytes == sum(ticket.size for ticket in mine)
        for target in flow.lines:
            assert any(served <= flow.served for served, _, one in band.orders[target] if one is flow)
        for at, size in enumerate((len(flow.tickets), flow.bytes)):
            entries = [-entry[0] for entry in band._largest[at] if entry[2] is flow]
            assert not flow.tickets or (flow.tops[at] in entries and flow.tops[at] >= size)
    for heap in (*band.orders.values(), *band._largest):
        assert len(heap) <= 65 + 4 * max(len(band.flows), 1)
