"""The order of waiting requests: strict priority between bands, fairness between the flows of a band, first come first
served in a flow.

Fairness is that of virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each
flow counts the tokens that it was served, and the flow with the fewest is next. A flow that was idle begins at the
lowest count of the others, so that idleness saves nothing up. A request's tokens are an estimate at its turn;
`Ticket.served` corrects it later. When a band is empty, all flows are equal again.

Requests that different endpoints serve (`Target`) do not wait for each other: `head` takes the targets that have no
room. From one `rewind` to the next these only become more, and targets that were skipped are not tried again.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from functools import partial
from itertools import count
from typing import Any

from treeline_epp.flow.ticket import Target, Ticket

MOST_IDLE = 1024
"""Most idle flows of a band whose served tokens are remembered."""


class Flow:
    """The requests of one flow in one band, and the tokens that it was served. Only its band changes it."""

    __slots__ = ("bytes", "lines", "served", "tickets", "tops")

    def __init__(self, served: float) -> None:
        self.served = served
        self.tickets: OrderedDict[Ticket[Any], None] = OrderedDict()
        """All waiting tickets, of all lines, in the order in which they came."""
        self.lines: dict[Target, OrderedDict[Ticket[Any], None]] = {}
        self.bytes = 0
        self.tops = [0, 0]
        """The requests and bytes in its present entries of the band's heaps of largest flows."""


class Band:
    """The flows of one priority."""

    def __init__(self, sooner: Callable[[Target], object]) -> None:
        """Make an empty band. `sooner` gets each target whose next request may be earlier than was known."""
        self._sooner = sooner
        self.flows: dict[str, Flow] = {}
        self.requests = 0
        self.bytes = 0
        self.uncached_tokens = 0
        self.orders: dict[Target, list[tuple[float, int, Flow]]] = {}
        """For each target a heap of the flows that wait for it, by what they were served. An entry that says too little
        is put right when it comes up; for one that says too much there is another."""
        self._floor = 0.0
        """Least served tokens of a flow that comes now: the count of the flow that was served last."""
        self._entries = count()
        self._largest: tuple[list[tuple[int, int, Flow]], ...] = ([], [])
        """Heaps of the flows with most requests, and with most bytes. An entry is valid if it equals its flow's
        `tops`; one that is too high is corrected when it comes up."""
        self._forget_at = 2 * MOST_IDLE

    def push(self, ticket: Ticket[Any]) -> None:
        """Add a ticket behind the others of its flow. O(log flows)."""
        flow = self.flows.get(ticket.flow)
        if flow is None:
            self._forget_some()
            flow = self.flows[ticket.flow] = Flow(self._floor)
        if not flow.tickets:
            flow.served = max(flow.served, self._floor)
        line = flow.lines.get(ticket.target)
        if line is None:
            line = flow.lines[ticket.target] = OrderedDict()
            self._place(flow, ticket.target)
        line[ticket] = flow.tickets[ticket] = None
        flow.bytes += ticket.size
        self._count(ticket, 1)
        for at, heap in enumerate(self._largest):
            flow.tops[at] = _much(flow, at)
            if len(heap) > 64 + 4 * len(self.flows):  # mostly outdated
                heap[:] = {id(entry[2]): entry for entry in heap if -entry[0] == entry[2].tops[at]}.values()
                heapq.heapify(heap)
            heapq.heappush(heap, (-flow.tops[at], next(self._entries), flow))

    def head(self, target: Target) -> tuple[float, Ticket[Any]] | None:
        """Return the next ticket for this target, with its flow's served tokens. O(log flows), amortized."""
        order = self.orders.get(target, [])
        while order:
            served, _, flow = order[0]
            line = flow.lines.get(target)
            if line is None:
                heapq.heappop(order)
            elif served != flow.served:
                heapq.heapreplace(order, (flow.served, next(self._entries), flow))
            else:
                return served, next(iter(line))
        self.orders.pop(target, None)
        return None

    def remove(self, ticket: Ticket[Any]) -> None:
        """Remove a ticket. O(1)."""
        flow = self.flows[ticket.flow]
        line = flow.lines[ticket.target]
        del line[ticket], flow.tickets[ticket]
        flow.bytes -= ticket.size
        if not line:
            del flow.lines[ticket.target]
        if not flow.tickets:
            flow.tops = [0, 0]
        self._count(ticket, -1)

    def to_displace(self, name: str, bytes: int, *, by_bytes: bool) -> Ticket[Any] | None:
        """Return the ticket that gives way to one more request of this flow: the last of the largest flow, if that
        still has as much afterwards as this one. None: no ticket does. Without this a full queue would be shared in
        proportion to demand. O(log flows), amortized.
        """
        at, heap = int(by_bytes), self._largest[by_bytes]
        mine = self.flows.get(name) or Flow(0.0)
        while heap:
            size, _, flow = heap[0]
            now = _much(flow, at)
            if -size != flow.tops[at] or not now:
                heapq.heappop(heap)
            elif -size != now:
                flow.tops[at] = now
                heapq.heapreplace(heap, (-now, next(self._entries), flow))
            elif flow is mine or now <= _much(mine, at) + (bytes if by_bytes else 1):
                return None
            else:
                return next(reversed(flow.tickets))
        return None

    def serve(self, ticket: Ticket[Any], tokens: float) -> None:
        """Remove a ticket whose turn has come, and charge its flow; `ticket.served` corrects that. O(log flows)."""
        flow, counted = self.flows[ticket.flow], tokens
        self._floor = max(self._floor, flow.served)
        self.remove(ticket)
        self._correct(flow, tokens)

        def served(took: float) -> None:
            nonlocal counted
            self._correct(flow, took - counted)
            counted = took

        ticket.served = served

    def _correct(self, flow: Flow, tokens: float) -> None:
        flow.served = max(0.0, flow.served + tokens)
        if tokens < 0:
            for target in flow.lines:
                self._place(flow, target)

    def _place(self, flow: Flow, target: Target) -> None:
        order = self.orders.setdefault(target, [])
        if len(order) > 64 + 4 * len(self.flows):  # mostly outdated
            known = {id(entry[2]): entry[2] for entry in order if target in entry[2].lines}
            order[:] = [(one.served, next(self._entries), one) for one in known.values()]
            heapq.heapify(order)
        heapq.heappush(order, (flow.served, next(self._entries), flow))
        self._sooner(target)

    def _count(self, ticket: Ticket[Any], sign: int) -> None:
        self.requests += sign
        self.bytes += sign * ticket.size
        self.uncached_tokens += sign * ticket.uncached_tokens

    def _forget_some(self) -> None:
        """Forget the idle flows that were served least: their counts matter least."""
        if len(self.flows) < self._forget_at:
            return
        idle = sorted((flow.served, name) for name, flow in self.flows.items() if not flow.tickets)
        for _, name in idle[:-MOST_IDLE]:
            del self.flows[name]
        self._forget_at = len(self.flows) + MOST_IDLE


def _much(flow: Flow, at: int) -> int:
    return flow.bytes if at else len(flow.tickets)


_Head = tuple[int, float, int, int, Target]
"""Negative priority, served tokens, the ticket's number (0 = not looked up yet), and a number of the entry before the
target, since not all targets can be compared."""


class FairQueue:
    """The waiting requests of one pool: its bands, the most urgent first."""

    def __init__(self) -> None:
        self.bands: dict[int, Band] = {}
        self._numbers = count(1)
        self._entries = count()
        self._heads: list[_Head] | None = None
        """A heap of the next ticket of each band and target; an entry that is too low is corrected when it comes up."""
        self._newest: dict[tuple[int, Target], _Head] = {}
        """The valid entry of each band and target; their other entries in the heap are outdated."""

    def __len__(self) -> int:
        return sum(band.requests for band in self.bands.values())

    def push(self, ticket: Ticket[Any]) -> None:
        """Add a ticket."""
        ticket.number = next(self._numbers)
        priority = ticket.asked.priority
        band = self.bands.get(priority)
        if band is None:
            band = self.bands[priority] = Band(partial(self._sooner, priority))
            self.bands = dict(sorted(self.bands.items(), reverse=True))
        band.push(ticket)

    def head(self, blocked: Container[Target]) -> Ticket[Any] | None:
        """Return the next ticket among targets that are not blocked. O(log targets); O(targets) after a rewind."""
        if self._heads is None:
            self._heads = []
            for priority, target in self.targets():
                self._sooner(priority, target)
        heads = self._heads
        while heads:
            entry = heads[0]
            key = -entry[0], entry[4]
            if self._newest.get(key) is not entry:
                heapq.heappop(heads)
                continue
            band = self.bands.get(key[0])
            found = None if band is None or key[1] in blocked else band.head(key[1])
            if found is None:
                heapq.heappop(heads)
                del self._newest[key]
            elif (found[0], found[1].number) == entry[1:3]:
                return found[1]
            else:
                self._newest[key] = entry = (entry[0], found[0], found[1].number, next(self._entries), key[1])
                heapq.heapreplace(heads, entry)
        return None

    def rewind(self) -> None:
        """Begin a new round: any target may have room again."""
        self._heads = None
        self._newest = {}

    def remove(self, ticket: Ticket[Any]) -> None:
        """Remove a ticket that was not served."""
        self.bands[ticket.asked.priority].remove(ticket)
        self._close(ticket.asked.priority)

    def serve(self, ticket: Ticket[Any], tokens: float) -> None:
        """Remove a ticket whose turn has come, and charge its flow the estimate; `ticket.served` corrects it."""
        self.bands[ticket.asked.priority].serve(ticket, tokens)
        self._close(ticket.asked.priority)

    def waits(self, least: int) -> bool:
        """Return whether a request of at least this priority waits."""
        return any(priority >= least for priority in self.bands)

    def targets(self) -> Iterator[tuple[int, Target]]:
        """Yield each priority with the targets for which requests wait there, or waited lately."""
        for priority, band in self.bands.items():
            yield from ((priority, target) for target in band.orders)

    def _sooner(self, priority: int, target: Target) -> None:
        known = self._newest.get((priority, target))
        if self._heads is not None and (known is None or known[2]):
            self._newest[priority, target] = entry = (-priority, 0.0, 0, next(self._entries), target)
            heapq.heappush(self._heads, entry)

    def _close(self, priority: int) -> None:
        if not self.bands[priority].requests:
            del self.bands[priority]
