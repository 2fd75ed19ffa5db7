"""Who is next: strict priority between bands, fairness between the flows of a band, first come first served in a flow.

Fairness is that of virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each
flow counts the tokens that it was served, the one with the fewest is next, and one that had nothing to ask for
meanwhile begins where the least served of the others is, so that idleness saves nothing up. What a request takes is an
estimate when its turn comes; what it really took is put right later (`correct`). When a band is empty, all are equal
again.

Requests that different endpoints serve (`Target`) do not wait for each other: `head` is asked with the targets that
have no room. From one `rewind` to the next these only become more, and what was passed over is not looked at again.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Container, Iterator
from itertools import count
from typing import Any

from treeline_epp.flow.ticket import Target, Ticket

MOST_IDLE = 1024
"""Flows of a band that wait for nothing and are remembered for what they were served."""


class Flow:
    """The requests of one flow in one band, and the tokens that it was served. Written by its band."""

    __slots__ = ("_heads", "bytes", "entry", "lines", "served", "tickets")

    def __init__(self, served: float) -> None:
        self.served = served
        self.tickets: OrderedDict[Ticket[Any], None] = OrderedDict()
        """All that wait, of all lines, in the order in which they came."""
        self.bytes = 0
        self.lines: dict[Target, OrderedDict[Ticket[Any], None]] = {}
        self.entry: tuple[float, int, Flow] | None = None
        """Its place in the band's order, while something waits."""
        self._heads: list[tuple[int, Target]] | None = None
        """A heap of the first in each line that may not be blocked; a number may be of one that has gone."""

    def head(self, blocked: Container[Target]) -> Ticket[Any] | None:
        """What has waited longest of that which is not blocked. O(log targets), and O(targets) once after a rewind."""
        if self._heads is None:
            self._heads = [(next(iter(line)).number, target) for target, line in self.lines.items()]
            heapq.heapify(self._heads)
        while self._heads:
            number, target = self._heads[0]
            line = self.lines.get(target)
            if line is None or target in blocked:
                heapq.heappop(self._heads)
                continue
            first = next(iter(line))
            if first.number == number:
                return first
            heapq.heapreplace(self._heads, (first.number, target))
        return None

    def rewind(self) -> None:
        """See the module."""
        self._heads = None

    @property
    def requests(self) -> int:
        """How many wait."""
        return len(self.tickets)

    def tail(self) -> Ticket[Any]:
        """What has waited the shortest of all. O(1)."""
        return next(reversed(self.tickets))


class Largest:
    """Which flow has most waiting, by a measure of it.

    A heap with an entry for each time that a flow grew; only its last one counts. Where a flow has shrunk since, its
    entry says too much, and is put right when it comes up: each is moved down once for what has left meanwhile.
    """

    def __init__(self, measure: Callable[[Flow], int]) -> None:
        self._measure = measure
        self._heap: list[tuple[int, int, Flow]] = []
        self._entries: dict[Flow, tuple[int, int, Flow]] = {}
        """The entry that counts, of each flow of which something waits."""
        self._numbers = count()

    def grew(self, flow: Flow) -> None:
        """More of it waits. O(log flows)."""
        entry = self._entries[flow] = (-self._measure(flow), next(self._numbers), flow)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 4 * len(self._entries):  # mostly of the past
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def left(self, flow: Flow) -> None:
        """Nothing of it waits any more. O(1)."""
        del self._entries[flow]

    def first(self) -> Flow | None:
        """O(log flows) on average, for each time that something was added or removed."""
        while self._heap:
            entry = self._heap[0]
            size, number, flow = entry
            if self._entries.get(flow) is not entry:
                heapq.heappop(self._heap)
            elif -size == (now := self._measure(flow)):
                return flow
            else:
                self._entries[flow] = fresh = (-now, number, flow)
                heapq.heapreplace(self._heap, fresh)
        return None

    def check(self, flows: Collection[Flow]) -> None:
        """Assert what always holds; `flows` are those of which something waits."""
        assert self._entries.keys() == set(flows)
        assert all(-size >= self._measure(flow) for size, _, flow in self._entries.values())
        assert {id(entry) for entry in self._heap} >= {id(entry) for entry in self._entries.values()}


class Band:
    """The flows of one priority."""

    def __init__(self) -> None:
        self.flows: dict[str, Flow] = {}
        self.requests = 0
        self.bytes = 0
        self.uncached_tokens = 0
        self.targets: Counter[Target] = Counter()
        """How many wait for each."""
        self.active = 0
        """Flows of which something waits."""
        self._floor = 0.0
        """A flow that comes now counts as served no less than this: the count of the flow that was served last."""
        self._order: list[tuple[float, int, Flow]] = []
        """A heap. An entry that is not its flow's is of the past."""
        self._entries = count()
        self._passed: list[tuple[float, int, Flow]] = []
        """Entries of flows that were passed over since the last rewind."""
        self._looked: dict[Flow, None] = {}
        self._unblocked: list[Target] | None = None
        """Targets that may not be blocked."""
        self._most_requests = Largest(lambda flow: flow.requests)
        self._most_bytes = Largest(lambda flow: flow.bytes)

    def push(self, ticket: Ticket[Any]) -> None:
        """It waits behind the others of its flow. O(log flows)."""
        flow = self.flows.get(ticket.flow)
        if flow is None:
            self._forget_some()
            flow = self.flows[ticket.flow] = Flow(self._floor)
        if not flow.lines:
            self.active += 1
            flow.served = max(flow.served, self._floor)
        if ticket.target not in flow.lines:
            flow.lines[ticket.target] = OrderedDict()
            flow.rewind()
        flow.lines[ticket.target][ticket] = None
        flow.tickets[ticket] = None
        flow.bytes += ticket.size
        self._most_requests.grew(flow)
        self._most_bytes.grew(flow)
        if ticket.target not in self.targets:
            self._unblocked = None
        self.targets[ticket.target] += 1
        self.requests += 1
        self.bytes += ticket.size
        self.uncached_tokens += ticket.uncached_tokens
        if flow.entry is None:
            self._place(flow)

    def head(self, blocked: Container[Target]) -> Ticket[Any] | None:
        """Who is next of those that are not blocked. O(log flows), and that once for each flow that is passed over."""
        if self._all_are(blocked):
            return None
        while self._order:
            entry = self._order[0]
            flow = entry[2]
            if flow.entry is entry:
                self._looked[flow] = None
                found = flow.head(blocked)
                if found is not None:
                    return found
                self._passed.append(entry)
            heapq.heappop(self._order)
        return None

    def _all_are(self, blocked: Container[Target]) -> bool:
        """O(1), and O(targets) once after a rewind."""
        if self._unblocked is None:
            self._unblocked = list(self.targets)
        while self._unblocked and (self._unblocked[-1] in blocked or self._unblocked[-1] not in self.targets):
            self._unblocked.pop()
        return not self._unblocked

    def rewind(self) -> None:
        """See the module. O(log flows) for each that was looked at."""
        for entry in self._passed:
            if entry[2].entry is entry:
                self._put(entry)
        for flow in self._looked:
            flow.rewind()
        self._passed, self._looked, self._unblocked = [], {}, None

    def remove(self, ticket: Ticket[Any]) -> None:
        """It waits no more. O(1)."""
        flow = self.flows[ticket.flow]
        line = flow.lines[ticket.target]
        del line[ticket], flow.tickets[ticket]
        flow.bytes -= ticket.size
        if not line:
            del flow.lines[ticket.target]
        if not flow.lines:
            self.active -= 1
            flow.entry = None
            self._most_requests.left(flow)
            self._most_bytes.left(flow)
        self.targets[ticket.target] -= 1
        if not self.targets[ticket.target]:
            del self.targets[ticket.target]
        self.requests -= 1
        self.bytes -= ticket.size
        self.uncached_tokens -= ticket.uncached_tokens

    def to_displace(self, name: str, size: int, *, by_bytes: bool) -> Ticket[Any] | None:
        """Who gives way to one more request of this flow: the last of the flow that has most, if it still has as much
        afterwards as this one. None: no ticket does. Without this a full queue would be shared in proportion to what is
        asked for. As `Largest.first`.
        """
        most = (self._most_bytes if by_bytes else self._most_requests).first()
        mine = self.flows.get(name) or Flow(0.0)
        if most is None or most is mine:
            return None
        more = most.bytes > mine.bytes + size if by_bytes else most.requests > mine.requests + 1
        return most.tail() if more else None

    def serve(self, ticket: Ticket[Any], tokens: float) -> None:
        """Its turn has come, and it takes so many tokens, as is believed. O(log flows)."""
        flow = self.flows[ticket.flow]
        self._floor = max(self._floor, flow.served)
        self.remove(ticket)
        self.correct(flow, tokens)

    def correct(self, flow: Flow, tokens: float) -> None:
        """A flow was served so many tokens more than was counted, or fewer. O(log flows)."""
        flow.served = max(0.0, flow.served + tokens)
        if flow.entry is not None:
            self._place(flow)

    def _place(self, flow: Flow) -> None:
        flow.entry = (flow.served, next(self._entries), flow)
        self._put(flow.entry)

    def _put(self, entry: tuple[float, int, Flow]) -> None:
        if len(self._order) > 64 + 4 * len(self.flows):  # mostly of the past
            self._order = [entry for entry in self._order if entry[2].entry is entry]
            heapq.heapify(self._order)
        heapq.heappush(self._order, entry)

    def _forget_some(self) -> None:
        """Of the flows that wait for nothing those that were served least: what is forgotten of them counts least."""
        if len(self.flows) - self.active < 2 * MOST_IDLE:
            return
        idle = sorted((flow.served, name) for name, flow in self.flows.items() if not flow.lines)
        for _, name in idle[:-MOST_IDLE]:
            del self.flows[name]

    def check(self) -> None:
        """Assert what always holds."""
        waiting = [t for flow in self.flows.values() for line in flow.lines.values() for t in line]
        assert self.requests == len(waiting)
        assert self.bytes == sum(ticket.size for ticket in waiting)
        assert self.uncached_tokens == sum(ticket.uncached_tokens for ticket in waiting)
        assert self.active == sum(bool(flow.lines) for flow in self.flows.values())
        assert self.targets == Counter(ticket.target for ticket in waiting)
        assert not any(ticket.done for ticket in waiting)
        entries = {id(entry) for entry in [*self._order, *self._passed]}
        for flow in self.flows.values():
            assert all(flow.lines.values())
            mine = [ticket for line in flow.lines.values() for ticket in line]
            assert list(flow.tickets) == sorted(mine, key=lambda ticket: ticket.number)
            assert flow.bytes == sum(ticket.size for ticket in mine)
            assert (flow.entry is not None) == bool(flow.lines)
            assert flow.entry is None or (id(flow.entry) in entries and flow.entry[0] == flow.served)
        assert len(self._order) <= 65 + 4 * max(len(self.flows), 1) or not self.flows
        waiting_flows = [flow for flow in self.flows.values() if flow.lines]
        self._most_requests.check(waiting_flows)
        self._most_bytes.check(waiting_flows)


class FairQueue:
    """The requests that wait for one pool: its bands, the most urgent first."""

    def __init__(self) -> None:
        self.bands: dict[int, Band] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return sum(band.requests for band in self.bands.values())

    def push(self, ticket: Ticket[Any]) -> None:
        """It waits."""
        ticket.number = next(self._numbers)
        band = self.bands.get(ticket.priority)
        if band is None:
            band = self.bands[ticket.priority] = Band()
            self.bands = dict(sorted(self.bands.items(), reverse=True))
        band.push(ticket)

    def head(self, blocked: Container[Target]) -> Ticket[Any] | None:
        """Who is next of those whose target is not blocked."""
        return next(filter(None, (band.head(blocked) for band in self.bands.values())), None)

    def rewind(self) -> None:
        """Any target may have room again."""
        for band in self.bands.values():
            band.rewind()

    def remove(self, ticket: Ticket[Any]) -> None:
        """It waits no more, and was served nothing."""
        self.bands[ticket.priority].remove(ticket)
        self._close(ticket.priority)

    def serve(self, ticket: Ticket[Any], tokens: float) -> None:
        """Its turn has come, and it takes so many tokens, as is believed; `ticket.served` corrects it."""
        band = self.bands[ticket.priority]
        ticket.served = _Estimate(band, band.flows[ticket.flow], tokens)
        band.serve(ticket, tokens)
        self._close(ticket.priority)

    def waits(self, least: int) -> bool:
        """Does anybody wait whose priority is at least this?"""
        return any(priority >= least for priority in self.bands)

    def targets(self) -> Iterator[Target]:
        """Those for which somebody waits, some of them more than once."""
        for band in self.bands.values():
            yield from band.targets

    def _close(self, priority: int) -> None:
        if not self.bands[priority].requests:
            del self.bands[priority]

    def check(self) -> None:
        """Assert what always holds."""
        assert list(self.bands) == sorted(self.bands, reverse=True)
        for band in self.bands.values():
            assert band.requests
            band.check()


class _Estimate:
    """See `ticket.Served`."""

    __slots__ = ("_band", "_flow", "_tokens")

    def __init__(self, band: Band, flow: Flow, tokens: float) -> None:
        self._band = band
        self._flow = flow
        self._tokens = tokens

    def took(self, tokens: float) -> None:
        """See `ticket.Served`."""
        self._band.correct(self._flow, tokens - self._tokens)
        self._tokens = tokens
