"""A queue by rank that anybody may leave."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from treeline_runtime.core import Req

Rank = tuple[float, ...]
"""The smallest is first."""

SPARE = 256
"""Places of those who have left that are kept even if hardly anybody is in the queue."""


class Ranked:
    """Requests by the rank that each was put in with; of equal ranks the first to come is first.

    A binary heap in which the places of those who leave stay until they come up, or until they are the most (`heapq`'s
    notes on priority queues).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int]] = []
        self._reqs: dict[int, Req] = {}
        self._numbers: dict[Req, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._reqs)

    def put(self, req: Req, rank: Rank) -> None:
        """O(log n), as it is spread over all. `req` must not be in."""
        assert req not in self._numbers
        if len(self._heap) > 2 * len(self._reqs) + SPARE:
            self._heap = [place for place in self._heap if place[1] in self._reqs]
            heapify(self._heap)
        self._count += 1
        self._reqs[self._count] = req
        self._numbers[req] = self._count
        heappush(self._heap, (rank, self._count))

    def leave(self, req: Req) -> None:
        """If it is in. O(1)."""
        number = self._numbers.pop(req, None)
        if number is not None:
            del self._reqs[number]

    def first(self) -> tuple[Rank, Req] | None:
        """O(log n) for each that has left since."""
        heap = self._heap
        while heap and heap[0][1] not in self._reqs:
            heappop(heap)
        return (heap[0][0], self._reqs[heap[0][1]]) if heap else None

    def __iter__(self) -> Iterator[Req]:
        """In order. The first k take O(k log k), not counting those who have left. Any may leave meanwhile; none may be
        put in."""
        self.first()
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []  # the first of those that were not given is among these
        while frontier:
            (_, number), at = heappop(frontier)
            for below in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heappush(frontier, (heap[below], below))
            if (req := self._reqs.get(number)) is not None:
                yield req
