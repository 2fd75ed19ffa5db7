"""The order of waiting requests, maintained as they come and leave, so that a step pays only for the requests that it
looks at.

Clients take turns. A policy orders each client's requests; those that waited longer than a bound come first. Also time
limits of waiting and running.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from treeline_runtime.core import Req
from treeline_runtime.messages import FinishReason

MATCH_LIMIT = 128
"""Matching every waiting request is linear in the queue: beyond this many, first come first served."""
SPARE = 256
"""Stale places that are kept even in a nearly empty queue."""

Rank = tuple[float, ...]
"""The smallest is first."""


class Ranked:
    """Requests by the rank they were added with; first come first of equals.

    A binary heap in which stale places stay until they come up or become the majority (`heapq`'s notes on priority
    queues).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int]] = []
        self._reqs: dict[int, Req] = {}
        self._numbers: dict[Req, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._reqs)

    def put(self, req: Req, rank: Rank) -> None:
        """O(log n) amortized. `req` must not be in it."""
        assert req not in self._numbers
        if len(self._heap) > 2 * len(self._reqs) + SPARE:
            self._heap = [place for place in self._heap if place[1] in self._reqs]
            heapify(self._heap)
        self._count += 1
        self._reqs[self._count] = req
        self._numbers[req] = self._count
        heappush(self._heap, (rank, self._count))

    def leave(self, req: Req) -> None:
        """Removes it if present. O(1)."""
        number = self._numbers.pop(req, None)
        if number is not None:
            del self._reqs[number]

    def first(self) -> tuple[Rank, Req] | None:
        """The first request and its rank. O(log n) for each request that has left since the last call."""
        heap = self._heap
        while heap and heap[0][1] not in self._reqs:
            heappop(heap)
        return (heap[0][0], self._reqs[heap[0][1]]) if heap else None

    def __iter__(self) -> Iterator[Req]:
        """Yields requests in order. The first k take O(k log k), not counting requests that left. During iteration
        requests may leave, but none may be added."""
        self.first()
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []  # the next in order is among these
        while frontier:
            (_, number), at = heappop(frontier)
            for below in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heappush(frontier, (heap[below], below))
            if (req := self._reqs.get(number)) is not None:
                yield req


class WaitingOrder:
    """Clients take turns, the least recently served first: a thousand requests of one client delay another's first by
    one. `_ClientOrder` orders a client's own requests."""

    def __init__(self, starvation_bound: float, *, by_priority: bool, cached: Callable[[Req], int] | None) -> None:
        """by_priority: the highest first. cached: a request's cached pages, the most first; None: irrelevant."""
        self._new = lambda: _ClientOrder(starvation_bound, by_priority, cached)
        self._clients: dict[str | None, _ClientOrder] = {}
        """Clients with waiting requests, in the order of their turns."""

    def put(self, req: Req, *, front: bool = False) -> None:
        """Adds it behind or before its client's others, where the policy is indifferent."""
        if req.client not in self._clients:
            self._clients[req.client] = self._new()
        self._clients[req.client].put(req, front=front)

    def leave(self, req: Req) -> None:
        """Removes a request. Its client's next one comes after those of other clients."""
        order = self._clients.pop(req.client)
        order.leave(req)
        if len(order):
            self._clients[req.client] = order

    def in_order(self, now: float, may_come: Callable[[str | None], bool] = lambda _: True) -> Iterator[Req]:
        """Yields requests, clients in turns. Meanwhile yielded requests may leave, but none may be added. A client is
        passed over once `may_come` has refused it."""
        turns = deque((client, order.in_order(now)) for client, order in self._clients.items())
        while turns:
            client, order = turns.popleft()
            if may_come(client) and (req := next(order, None)) is not None:
                yield req
                turns.append((client, order))


class _ClientOrder:
    """A client's requests: those that waited for the bound, oldest first; then by policy, retracted ones first."""

    def __init__(self, bound: float, by_priority: bool, cached: Callable[[Req], int] | None) -> None:
        self._bound = bound
        self._by_priority = by_priority
        self._cached = cached
        self._others = Ranked()
        self._overdue = Ranked()
        self._since = Ranked()
        """`_others` by the time at which they would have begun to wait, had they waited only once."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._others) + len(self._overdue)

    def put(self, req: Req, *, front: bool = False) -> None:
        self._count += 1
        place = -self._count if front else self._count
        self._others.put(req, (-req.priority if self._by_priority else 0, place))
        self._since.put(req, (req.waiting_since - req.waited_s,))

    def leave(self, req: Req) -> None:
        for queue in (self._others, self._overdue, self._since):
            queue.leave(req)

    def in_order(self, now: float) -> Iterator[Req]:
        while (longest := self._since.first()) is not None and now - longest[0][0] >= self._bound:
            req = longest[1]
            self.leave(req)
            self._overdue.put(req, (req.arrival,))
        yield from self._overdue
        if (cached := self._cached) is None or len(self._others) > MATCH_LIMIT:
            yield from self._others
        else:
            yield from sorted(self._others, key=lambda req: -cached(req))


class TimeLimits:
    """Two limits in seconds; None means no limit. They are the same for all requests, so the oldest exceeds them first,
    and a check stops at the first request within them."""

    def __init__(self, waiting_s: float | None, total_s: float | None) -> None:
        self._waiting_s = waiting_s
        self._total_s = total_s
        self._came: OrderedDict[Req, float] = OrderedDict()
        self._waiting: OrderedDict[Req, float] = OrderedDict()
        """Requests that have not begun, and some that have, which are removed when they would have waited too long."""

    def begin(self, req: Req, now: float) -> None:
        """Starts both clocks of a request that has arrived."""
        if self._total_s is not None:
            self._came[req] = now
        if self._waiting_s is not None:
            self._waiting[req] = now

    def end(self, req: Req) -> None:
        """Idempotent."""
        self._came.pop(req, None)
        self._waiting.pop(req, None)

    def exceeded(self, now: float) -> list[tuple[Req, FinishReason]]:
        """Returns the requests that exceeded a limit, each once."""
        found = dict(self._took_too_long(now))
        for req, finish in self._waited_too_long(now):
            found.setdefault(req, finish)
        return list(found.items())

    def _took_too_long(self, now: float) -> Iterator[tuple[Req, FinishReason]]:
        if self._total_s is None:
            return
        message = f"the request took longer than {self._total_s:g} s, the limit of this server (--request-timeout)"
        for req, came in self._came.items():
            if now - came < self._total_s:
                break
            yield req, FinishReason("error", message=message, status=504)

    def _waited_too_long(self, now: float) -> Iterator[tuple[Req, FinishReason]]:
        if self._waiting_s is None:
            return
        message = f"the request has waited for {self._waiting_s:g} s, and the server is too busy to start it"
        begun = list[Req]()
        for req, came in self._waiting.items():
            if now - came < self._waiting_s:
                break
            if req.begun:
                begun.append(req)
            else:
                yield req, FinishReason("error", message=message, status=503)
        for req in begun:
            del self._waiting[req]
