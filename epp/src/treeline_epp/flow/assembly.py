"""Flow control in the picker's process: made from the flags, pumped by the event loop, shown on the metrics page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import Histogram

from treeline_epp.flow.control import OUTCOMES, FlowControl
from treeline_epp.flow.quotas import QuotaFile
from treeline_epp.flow.settings import FlowSettings
from treeline_epp.flow.ticket import R
from treeline_epp.metrics import Metrics, Sample
from treeline_epp.picking.picker import Picker

PUMP_S = 0.005
"""Longest delay of a request that has room."""
_SHARE = 10
"""At most one part in this many of the time is spent on looking for room, however many requests wait."""
_WAIT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 3600.0)


def flow_control(
    settings: FlowSettings, picker: Picker, metrics: Metrics, clock: Callable[[], float], cost: Callable[[R], float]
) -> FlowControl[R] | None:
    """Make the flow control that the flags describe, pumped by the running loop; None if no request may wait."""
    if not settings.may_hold:
        return None
    waited = Histogram(
        "treeline_epp_flow_wait_seconds",
        "Seconds that dispatched requests waited in the picker.",
        buckets=_WAIT_BUCKETS,
        registry=metrics.registry,
    )
    control = FlowControl(settings, picker, clock, cost, waited.observe)
    Pump(control)
    metrics.observe(lambda: samples(control))
    return control


class Pump:
    """Pumps a flow control while requests wait in it; costs nothing otherwise. Make it inside the event loop."""

    def __init__(self, control: FlowControl[Any]) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        control.woken = self._wake

    def _wake(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(PUMP_S, self._pump)

    def _pump(self) -> None:
        began = self._loop.time()
        self._timer = None
        more = False
        try:
            more = self._control.pump()
        finally:  # after any failure, other requests still wait
            if self._control.waiting and self._timer is None:
                took = self._loop.time() - began
                self._timer = self._loop.call_later(0.0 if more else max(PUMP_S, _SHARE * took), self._pump)


def samples(control: FlowControl[Any]) -> Iterator[Sample]:
    """Yield gauges and counters for the metrics page."""
    for pool, held in control.held().items():
        labels = {"pool": pool}
        yield "gauge", "flow_held_requests", "Requests that wait in the picker, by pool.", labels, held.requests
        text = "Bytes in the bodies of requests that wait in the picker, by pool."
        yield "gauge", "flow_held_bytes", text, labels, held.bytes
        text = "Prompt tokens of waiting requests that no endpoint has in its cache."
        yield "gauge", "flow_held_uncached_tokens", text, labels, held.uncached_tokens
        text = "Seconds that the oldest waiting request has waited, by pool."
        yield "gauge", "flow_oldest_seconds", text, labels, held.oldest_s
    for pool, priority, requests, flows in control.bands():
        labels = {"pool": pool, "priority": str(priority)}
        yield "gauge", "flow_band_requests", "Requests that wait in the picker, by pool and priority.", labels, requests
        text = "Flows (API keys or fairness IDs) with a waiting request, by pool and priority."
        yield "gauge", "flow_band_flows", text, labels, flows
    text = "Requests that the flow control held or refused, by how that ended."
    for outcome in OUTCOMES:
        yield "counter", "flow_outcomes", text, {"outcome": outcome}, control.outcomes[outcome]


def quota_samples(file: QuotaFile) -> Iterator[Sample]:
    """Yield gauges and counters of quotas for the metrics page."""
    text = "Requests refused because their client had used up its quota."
    yield "counter", "flow_quota_exceeded", text, {}, file.quotas.exceeded
    yield "gauge", "flow_quota_clients", "Clients that have used some of their quota.", {}, len(file.quotas)
    text = "1 while the quota file is in force; 0 while it has an error and the quotas read before are in force."
    yield "gauge", "flow_quota_file_usable", text, {}, int(not file.error)
