"""The order of the queue: by band, then flows by the tokens that they got, first come first served within a flow."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flow_checks import check_queue
from treeline_epp.flow.fair_queue import MOST_IDLE, FairQueue
from treeline_epp.flow.ticket import Target, Ticket
from treeline_epp.picking.request import Request

A, B = "ab"


def ticket(flow: str = A, *, priority: int = 0, model: str = "m", size: int = 1) -> Ticket[Any]:
    made = Ticket[Any](Request("id", model=model, priority=priority), flow, size, int, since=0.0, limit_s=1.0)
    made.uncached_tokens = 3
    return made


def filled(*tickets: Ticket[Any]) -> FairQueue:
    queue = FairQueue()
    for each in tickets:
        queue.push(each)
    return queue


def drained(queue: FairQueue, tokens: float = 1.0) -> list[Ticket[Any]]:
    order = []
    queue.rewind()
    while (head := queue.head(())) is not None:
        queue.serve(head, tokens)
        check_queue(queue)
        order.append(head)
    return order


def test_a_higher_band_goes_first_and_a_flow_keeps_its_order() -> None:
    low, first, second, high = ticket(), ticket(priority=1), ticket(priority=1), ticket(priority=7)
    assert drained(filled(low, first, second, high)) == [high, first, second, low]


def test_flows_take_turns_by_what_they_were_served() -> None:
    queue = filled(*(ticket(flow) for flow in (A, A, A, A, B, B)))
    order = []
    while (head := queue.head(())) is not None:
        order.append(head.flow)
        queue.serve(head, 100.0 if head.flow == A else 250.0)
    assert order == [A, B, A, A, B, A]


def test_a_returning_flow_is_not_compensated_for_its_idle_time() -> None:
    queue = filled(*(ticket(A) for _ in range(10)))
    for _ in range(5):
        head = queue.head(())
        assert head is not None
        queue.serve(head, 100.0)
    for _ in range(5):
        queue.push(ticket(B))
    assert [one.flow for one in drained(queue, 100.0)][:6] in ([A, B, A, B, A, B], [B, A, B, A, B, A])


def test_the_actual_tokens_of_a_request_count() -> None:
    queue = filled(ticket(A), ticket(A), ticket(B), ticket(B), ticket(B))
    first = queue.head(())
    assert first is not None
    queue.serve(first, 10.0)
    assert first.served is not None
    first.served(25.0)
    assert [one.flow for one in drained(queue, 10.0)] == [B, B, B, A]


def test_a_target_without_room_delays_no_other_target() -> None:
    queue = filled(ticket(A, model="full"), ticket(A, model="free"), ticket(B, model="full"), ticket(B, model="free"))
    blocked = {Target(None, "full", None)}
    order = []
    while (head := queue.head(blocked)) is not None:
        queue.serve(head, 1.0)
        check_queue(queue)
        order.append((head.flow, head.asked.model))
    assert order == [(A, "free"), (B, "free")]
    assert len(queue) == 2
    assert queue.head({*blocked, Target(None, "free", None)}) is None


def test_a_flow_that_used_less_than_estimated_is_next_at_once() -> None:
    queue = filled(ticket(A, model="m"), ticket(A, model="m"), ticket(B, model="n"), ticket(B, model="n"))
    first = queue.head(())
    assert first is not None
    queue.serve(first, 100.0)
    second = queue.head(())
    assert second is not None
    assert (first.flow, second.flow) == (A, B)
    queue.serve(second, 50.0)
    assert (head := queue.head(())) is not None
    assert head.flow == B
    assert first.served is not None
    first.served(10.0)
    assert (head := queue.head(())) is not None
    assert head.flow == A, "without a look at the whole queue"


def test_corrections_between_two_looks_leave_an_entry_for_each_target() -> None:
    models = [f"m{i}" for i in range(300)]
    queue = filled(*(ticket(flow, model=model) for model in models for flow in (A, A, B)))
    served = []
    for model in models:
        head = queue.head({Target(None, other, None) for other in models if other != model})
        assert head is not None
        queue.serve(head, 1000.0)
        queue.rewind()
        served.append(head)
    assert queue.head(()) is not None
    for tokens in range(999, 989, -1):
        for one in served:
            assert one.served is not None
            one.served(float(tokens))
    assert queue._heads is not None
    assert len(queue._heads) <= 2 * len(models)
    check_queue(queue)


@pytest.mark.parametrize("seed", range(20))
def test_targets_that_cannot_be_compared_wait_beside_each_other(seed: int) -> None:
    subsets = (None, frozenset({"a"}), frozenset({"b", "c"}))
    asked = [
        Request("id", model=model, pool=pool, subset=each)
        for model in (None, "m", "n")
        for pool in (None, "")
        for each in subsets
    ]
    waiting = [Ticket[Any](each, f"f{at % 3}", 1, int, since=0.0, limit_s=1.0) for at, each in enumerate(asked)]
    random.Random(seed).shuffle(waiting)
    queue = filled(*waiting[:9])
    queue.rewind()
    assert queue.head(()) is not None
    for one in waiting[9:]:  # beside a heap that is there
        queue.push(one)
    assert set(drained(queue)) == set(waiting)


class Blocked:
    """A set of targets without room, which counts the lookups."""

    def __init__(self) -> None:
        self.targets: set[Target] = set()
        self.asked = 0

    def __contains__(self, target: object) -> bool:
        self.asked += 1
        return target in self.targets


@pytest.mark.parametrize("flows", [1, 400], ids=["of one flow", "each of a flow of its own"])
@pytest.mark.parametrize("bands", [1, 2])
def test_skipped_requests_are_not_examined_again(flows: int, bands: int) -> None:
    waiting = [ticket(f"f{n % flows}", model=f"m{n}", priority=-(n % bands)) for n in range(400)]
    queue, blocked = filled(*waiting), Blocked()
    for _ in range(2):
        seen = []
        while (head := queue.head(blocked)) is not None:
            blocked.targets.add(head.target)
            seen.append(head)
        assert set(seen) == set(waiting)
        assert len(seen) == len(waiting)
        assert blocked.asked <= 8 * len(waiting), "each a few times, however many there are"
        queue.rewind()
        check_queue(queue)
        blocked = Blocked()
    assert set(drained(queue)) == set(waiting)


def test_idle_flows_are_forgotten_when_there_are_many() -> None:
    queue = filled(ticket("stays"))
    for number in range(5 * MOST_IDLE):
        one = ticket(f"flow {number}")
        queue.push(one)
        queue.serve(one, float(number + 1))
    (band,) = queue.bands.values()
    assert len(band.flows) <= 2 * MOST_IDLE + 1, "and the one that waits"
    assert f"flow {5 * MOST_IDLE - 1}" in band.flows, "those that were served most are remembered"
    assert len(band._largest[0]) <= 65 + 4 * len(band.flows), (
        "nor is what nobody has asked for kept for a queue that never fills"
    )
    check_queue(queue)


ops = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"), st.sampled_from("abcd"), st.integers(-1, 2), st.sampled_from("mn"), st.integers(0, 9)
        ),
        st.tuples(st.just("serve"), st.integers(0, 500), st.booleans()),
        st.tuples(st.just("remove"), st.integers(0, 50)),
        st.tuples(st.just("correct"), st.integers(0, 50), st.integers(0, 900)),
        st.tuples(st.just("displace"), st.sampled_from("abcde"), st.integers(0, 12), st.booleans()),
    ),
    max_size=60,
)


def assert_it_gives_way(
    one: Ticket[Any] | None, flow: str, size: int, waiting: list[Ticket[Any]], by_bytes: bool
) -> None:
    """Check that `one` is the last request of the largest flow, or that no flow is larger than `flow` with one more."""
    amounts = Counter[str]()
    for each in waiting:
        amounts[each.flow] += each.size if by_bytes else 1
    most, mine = max(amounts.values()), amounts[flow] + (size if by_bytes else 1)
    if one is None:
        assert most <= mine
        return
    assert amounts[one.flow] == most > mine
    assert one is [each for each in waiting if each.flow == one.flow][-1]


def calls_in(act: Callable[[], object]) -> int:
    """Count the function calls during `act`, Python's own included."""
    calls = 0

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("by_bytes", [False, True], ids=["by requests", "by bytes"])
def test_a_full_queue_refuses_at_the_same_cost_however_many_flows_wait(by_bytes: bool) -> None:
    costs = []
    for flows in (10, 5000):
        (band,) = filled(*(ticket(f"flow {number}", size=7) for number in range(flows))).bands.values()
        refuse = partial(band.to_displace, "new", 7, by_bytes=by_bytes)
        assert refuse() is None
        costs.append(calls_in(refuse))
    assert costs[0] == costs[1] < 20


def test_the_evicted_request_is_found_in_few_steps_however_the_queue_changes() -> None:
    """A loud flow loses its requests to others one by one: each step costs at most the logarithm of the flows."""
    queue = filled(*(ticket(f"flow {number}") for number in range(4000)), *(ticket("loud") for _ in range(1000)))
    (band,) = queue.bands.values()

    def replace_one(number: int) -> None:
        one = band.to_displace(f"quiet {number}", 1, by_bytes=False)
        assert one is not None
        assert one.flow == "loud"
        queue.remove(one)
        queue.push(ticket(f"quiet {number}"))

    assert calls_in(lambda: [replace_one(number) for number in range(900)]) < 900 * 100
    check_queue(queue)


@given(ops)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_the_next_request_is_of_the_highest_band_and_its_least_served_flow(steps: list[Any]) -> None:
    queue, waiting, served = FairQueue(), list[Ticket[Any]](), list[Ticket[Any]]()
    for step in steps:
        match step:
            case ("push", flow, priority, model, size):
                waiting.append(ticket(flow, priority=priority, model=model, size=size))
                queue.push(waiting[-1])
            case ("serve", tokens, narrow):
                blocked = {Target(None, "m", None)} if narrow else set[Target]()
                queue.rewind()
                head = queue.head(blocked)
                free = [one for one in waiting if one.target not in blocked]
                assert (head is None) == (not free)
                if head is None:
                    continue
                assert head.asked.priority == max(one.asked.priority for one in free)
                band = queue.bands[head.asked.priority]
                rivals = {one.flow for one in free if one.asked.priority == head.asked.priority}
                assert band.flows[head.flow].served == min(band.flows[flow].served for flow in rivals)
                mine = [one for one in free if (one.asked.priority, one.flow) == (head.asked.priority, head.flow)]
                assert head is mine[0], "first come, first served"
                queue.serve(head, float(tokens))
                waiting.remove(head)
                served.append(head)
            case ("remove", at) if waiting:
                queue.remove(waiting.pop(at % len(waiting)))
            case ("correct", at, tokens) if served:
                estimate = served[at % len(served)].served
                assert estimate is not None
                estimate(float(tokens))
            case ("displace", flow, size, by_bytes) if 0 in queue.bands:
                one = queue.bands[0].to_displace(flow, size, by_bytes=by_bytes)
                assert_it_gives_way(one, flow, size, [each for each in waiting if not each.asked.priority], by_bytes)
                if one is not None:
                    queue.remove(one)
                    waiting.remove(one)
        check_queue(queue)
        assert len(queue) == len(waiting)
    assert set(drained(queue)) == set(waiting), "each comes once"


@pytest.mark.parametrize("seed", range(4))
def test_no_flow_starves(seed: int) -> None:
    """While the head of a flow waits, another flow gets at most the tokens that it was behind, and one request."""
    queue = filled(ticket("keeps the band"), ticket("keeps the band"))
    (band,) = queue.bands.values()
    since: dict[str, tuple[float, dict[str, float], dict[str, float]]] = {}
    """Flows whose head waits: their count and the others' when the wait began, and the others' tokens since."""
    rng = random.Random(seed)
    for step in range(1500):
        tokens = rng.randint(1, 50)
        if rng.random() < 0.5:
            queue.push(ticket(f"flow {rng.randrange(3 + step // 50)}"))
        elif len(queue) > 1 and (head := queue.head(())) is not None:
            floor = band._floor
            queue.serve(head, float(tokens))
            since.pop(head.flow, None)
            for mine, others, got in since.values():
                got[head.flow] = got.get(head.flow, 0.0) + tokens
                assert got[head.flow] <= max(0.0, mine - others.setdefault(head.flow, floor)) + 50
        for name, one in band.flows.items():
            if one.lines and name not in since:
                counts = {each: max(band._floor, other.served) for each, other in band.flows.items()}
                since[name] = (one.served, counts, {})
