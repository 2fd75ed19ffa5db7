"""The queue by rank: its order, removals, and its cost."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

from treeline_runtime.core import Req
from treeline_runtime.messages import GenerateReq, SamplingParams
from treeline_runtime.scheduler.waiting import SPARE, Ranked


class Counted(float):
    """A rank that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: Any) -> bool:
        Counted.compared += 1
        return super().__lt__(other)

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return super().__eq__(other)

    __hash__ = float.__hash__


def request(number: int) -> Req:
    message = GenerateReq(str(number), [1], SamplingParams())
    return Req.of(message, seed=0, eos_ids=(), max_new_tokens=8, arrival=number)


def filled(count: int) -> tuple[Ranked, list[Req]]:
    """Return the queue, and its requests in order."""
    queue, reqs = Ranked(), [request(i) for i in range(count)]
    ranks = random.Random(1).sample(range(count), count)
    for req, rank in zip(reqs, ranks, strict=True):
        queue.put(req, (Counted(rank), 0))
    return queue, sorted(reqs, key=lambda req: ranks[req.arrival])


def test_taking_the_first_of_many_costs_no_more_than_of_a_few() -> None:
    queue, order = filled(20_000)
    Counted.compared = 0
    for _ in range(10):
        assert list(islice(queue, 20)) == order[:20]
    assert Counted.compared < 10 * 20 * 50, "not all of 20 000"
    Counted.compared = 0
    for req in order[:100]:
        assert queue.first() == ((float(order.index(req)), 0), req)
        queue.leave(req)
    assert Counted.compared < 100 * 80


def test_removed_requests_are_forgotten() -> None:
    queue, order = filled(10)
    for i in range(3000):
        req = request(i)
        queue.put(req, (50.0 + i, 0))
        queue.leave(req)
    assert len(queue._heap) <= 2 * 10 + SPARE + 1
    assert list(queue) == order
