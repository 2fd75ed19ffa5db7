"""A step and an arrival look at few of thousands of waiting requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runtime_engine import Harness, prompt
from treeline_runtime.core import Req
from treeline_runtime.messages import AbortReq, GenerateReq, SamplingParams
from treeline_runtime.scheduler.prefill import ESTIMATED_WAITING
from treeline_runtime.scheduler.scheduler import Scheduler
from treeline_runtime.scheduler.waiting import Ranked


class Counted(OrderedDict[str, Req]):
    """A queue that counts how many of its requests were looked at."""

    looks = 0

    def values(self) -> Any:
        return self._count()

    def _count(self) -> Iterator[Req]:
        for req in super().values():
            Counted.looks += 1
            yield req


class CountedList(list[Req]):
    looks = 0

    def __iter__(self) -> Iterator[Req]:
        CountedList.looks += len(self)
        return super().__iter__()


def crowded(tiny: Path, waiting: int, rows: int = 1, **settings: Any) -> Harness:
    """One request runs, the others wait."""
    engine = Harness(tiny, max_running_requests=rows, overlap_depth=1, **settings)
    for i in range(waiting + rows):
        engine.submit(str(i), prompt(1, 8), max_new_tokens=2 if i < rows - 1 else 40)
    Scheduler.step(engine)
    return engine


@pytest.mark.parametrize("waiting", [1000, 2000])
def test_a_step_does_not_examine_the_whole_queue(tiny: Path, waiting: int) -> None:
    engine = crowded(tiny, waiting)
    engine.prefill.waiting = Counted(engine.prefill.waiting)
    Counted.looks = 0
    for _ in range(4):
        Scheduler.step(engine)
    assert Counted.looks <= 4 * ESTIMATED_WAITING, "none can be admitted"
    engine.inbox.append(AbortReq("0"))
    Counted.looks, before = 0, len(engine.prefill.waiting)
    for _ in range(4):
        Scheduler.step(engine)
    assert len(engine.prefill.waiting) == before - 1
    assert Counted.looks <= 4 * ESTIMATED_WAITING, "one is admitted"
    engine.check_integrity()


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_step_orders_no_more_of_the_queue_than_it_admits(
    tiny: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = crowded(tiny, 1000, schedule_policy=policy, starvation_bound=1e9)
    given: list[Req] = []
    whole = Ranked.__iter__

    def counted(self: Ranked) -> Iterator[Req]:
        for req in whole(self):
            given.append(req)
            yield req

    monkeypatch.setattr(Ranked, "__iter__", counted)
    Scheduler.step(engine)
    assert not given, "none can be admitted"
    engine.inbox.append(AbortReq(next(iter(engine.decode.running))))
    before = len(engine.prefill.waiting)
    for _ in range(4):
        Scheduler.step(engine)
    assert len(engine.prefill.waiting) == before - 1
    assert 1 <= len(given) <= 4, "one is admitted"


def test_a_full_queue_is_not_searched_for_the_least_urgent_at_each_arrival(tiny: Path) -> None:
    engine = Harness(tiny, max_running_requests=1, max_queued_requests=300, schedule_policy="priority")
    for i in range(301):
        engine.submit(str(i), prompt(1, 8), max_new_tokens=40, priority=i % 3)
    Scheduler.step(engine)
    engine.prefill.waiting = Counted(engine.prefill.waiting)
    Counted.looks = 0
    for i in range(100):
        engine._handle(GenerateReq(f"urgent {i}", prompt(2, 8), SamplingParams(max_new_tokens=1), priority=5))
    assert Counted.looks == 0
    refused = [rid for rid, req in engine.outs.items() if req[-1].finish]
    assert not refused, "no refusal is sent before the step ends"
    Scheduler.step(engine)
    least = [rid for rid, outs in engine.outs.items() if outs[-1].finish]
    assert least == [str(i) for i in range(300, -1, -1) if i % 3 == 0][: len(least)]
    assert len(least) == 100
    for i in range(2000):  # those that left are not kept
        engine._handle(GenerateReq(f"{i} goes", prompt(2, 8), SamplingParams(max_new_tokens=1), priority=9 + i))
        engine._handle(AbortReq(f"{i} goes"))
    assert sum(map(len, engine.prefill._replaceable.values())) == len(engine.prefill.waiting)
    engine.abort()
    engine.run()


def test_an_arrival_does_not_search_launched_batches(tiny: Path) -> None:
    engine = crowded(tiny, 0, rows=32)
    assert engine._pending
    for batch, _, _ in engine._pending:
        batch.reqs = CountedList(batch.reqs)
    CountedList.looks = 0
    for i in range(100):
        engine._handle(GenerateReq(f"more {i}", prompt(2, 8), SamplingParams(max_new_tokens=1)))
    assert CountedList.looks == 0
    engine.abort()
    engine.run()


def test_a_prompt_with_nothing_to_produce_is_found_while_it_is_computed(tiny: Path) -> None:
    engine = Harness(tiny, overlap_depth=1)
    for name in ("one", "two"):
        engine.submit(name, prompt(3, 8), max_new_tokens=0)
    engine.step()
    assert not engine.prefill.waiting
    assert list(engine.decode.running) == ["one", "two"]
    engine.submit("two", prompt(4, 8))  # the name is in use
    engine.abort("one")
    engine.run()
    finishes = [engine.last(name).finish for name in ("one", "two")]
    assert [finish and finish.type for finish in finishes] == ["abort", "length"]
    assert engine.tokens("two") == []
