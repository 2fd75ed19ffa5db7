"""Slots of adapters: who gets one, who waits, and that nobody waits for ever."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from treeline_runtime.scheduler.slots import MOST_PASSING, AdapterSlots

NAMES = st.sampled_from("abcdef")


def filled(count: int, adapters: str) -> AdapterSlots:
    slots = AdapterSlots(count)
    for adapter in adapters:
        slots.take(adapter)
    return slots


def waits(slots: AdapterSlots, adapter: str, rid: str = "r", tokens: int = 1) -> bool:
    """Let a request wait. Return whether it has to."""
    slots.wait(adapter, rid, tokens)
    return not slots.admits(adapter)


def test_requests_of_one_adapter_share_a_slot_and_keep_it() -> None:
    slots = filled(1, "aa")
    assert waits(slots, "b")
    slots.release("a")
    assert not slots.admits("b")
    slots.release("a")
    assert slots.admits("b")
    assert slots.take("b") == 0
    assert slots.news == {0: "b"}


def test_what_no_launch_has_put_there_is_told_until_one_has() -> None:
    slots = filled(2, "ab")
    assert slots.news == {0: "a", 1: "b"}
    assert slots.resident == ["a", "b"]
    slots.told()
    slots.take("a")
    assert slots.news == {}
    for adapter in "aab":
        slots.release(adapter)
    slots.take("c")
    slots.release("c")
    slots.take("d")
    assert set(slots.news.values()) == {"c", "d"}
    assert slots.resident == ["c", "d"]


def test_the_idle_adapter_with_the_fewest_waiting_tokens_goes_first_and_then_the_least_recent() -> None:
    slots = filled(4, "abcd")
    for adapter in "abcd":
        slots.release(adapter)
    slots.wait("a", "1", 50)
    slots.wait("b", "2", 100)
    slots.wait("b", "3", 1)
    slots.leave("b", "2")
    gone = []
    for adapter in "wxyz":
        before = set(slots._slots)
        slots.take(adapter)
        gone += before - set(slots._slots)
    assert gone == ["c", "d", "b", "a"]


def test_after_so_many_have_passed_a_slot_is_kept_and_the_adapter_gets_it_once_idle() -> None:
    slots = filled(2, "aab")
    assert waits(slots, "c")
    for _ in range(MOST_PASSING):
        assert slots.admits("b")
        slots.take("b")
        slots.release("a" if slots._used["a"] > 1 else "b")
    assert not slots.admits("a"), "its slot, with the fewest running requests, is kept"
    assert slots.admits("b")
    assert not waits(slots, "d") or not slots.admits("d")
    slots.release("a")
    assert not slots.admits("d"), "the slot is not d's"
    assert slots.admits("c")
    slots.take("c")
    slots.leave("c", "r")
    slots.check_integrity()
    assert waits(slots, "a"), "which has no slot now"


def test_a_kept_slot_is_given_back_if_nobody_waits_for_it_any_more() -> None:
    slots = filled(1, "a")
    assert waits(slots, "c")
    for _ in range(MOST_PASSING):
        slots.take("a")
    assert not slots.admits("a")
    slots.leave("c", "r")
    assert slots.admits("a")


@dataclass
class Job:
    rid: str
    adapter: str
    steps: int


@given(st.integers(1, 4), st.integers(0, 2**32), st.floats(0.0, 0.9))
def test_everyone_is_served_in_the_face_of_endless_requests_for_others(count: int, seed: int, pauses: float) -> None:
    """Popular adapters always have requests ahead in the queue; each of the others has one request."""
    rng, slots, number = random.Random(seed), AdapterSlots(count), 0
    popular, rare = [f"p{i}" for i in range(count)], [f"r{i}" for i in range(rng.randint(1, 5))]
    waiting: deque[Job] = deque()
    running: list[Job] = []

    def arrive(adapter: str, *, first: bool) -> None:
        nonlocal number
        number += 1
        job = Job(str(number), adapter, rng.randint(1, 6))
        slots.wait(adapter, job.rid, rng.randint(1, 100))
        (waiting.appendleft if first else waiting.append)(job)

    def step() -> None:
        for job in list(waiting):
            if slots.admits(job.adapter):
                waiting.remove(job)
                slots.leave(job.adapter, job.rid)
                slots.take(job.adapter)
                running.append(job)
        slots.check_integrity()
        assert len(set(slots.running)) <= count
        for job in list(running):
            job.steps -= 1
            if not job.steps:
                running.remove(job)
                slots.release(job.adapter)

    for _ in range(8):
        for adapter in popular:
            arrive(adapter, first=False)
        step()
    for adapter in rare:
        arrive(adapter, first=False)
    # a round admits a popular request now and then, and a kept slot is idle once its requests have ended
    for _ in range(len(rare) * 20 * (MOST_PASSING + 8)):
        for adapter in popular:
            if sum(job.adapter == adapter for job in waiting) < 2 and rng.random() >= pauses:
                arrive(adapter, first=True)
        step()
    assert not {job.adapter for job in waiting} & set(rare), "a rare one still waits"


class SlotsMachine(RuleBasedStateMachine):
    """Any order of calls that the queue can make, against a list of who holds what."""

    @initialize(count=st.integers(1, 3))
    def begin(self, count: int) -> None:
        self.count, self.slots, self.number = count, AdapterSlots(count), 0
        self.waiting: list[tuple[str, str]] = []
        self.held: list[tuple[str, int]] = []
        self.there: dict[int, str] = {}

    @rule(adapter=NAMES, tokens=st.integers(1, 1000))
    def arrive(self, adapter: str, tokens: int) -> None:
        self.number += 1
        self.waiting.append((adapter, str(self.number)))
        self.slots.wait(adapter, str(self.number), tokens)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(gone)
        self.slots.leave(*gone)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def come_in(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.waiting))
        if not self.slots.admits(one[0]):
            return
        self.waiting.remove(one)
        self.slots.leave(*one)
        self.held.append((one[0], self.slots.take(one[0])))

    @rule()
    def launch(self) -> None:
        self.there |= self.slots.news
        self.slots.told()
        for adapter, slot in self.held:
            assert self.there[slot] == adapter, "it would be computed with another's weights"

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.held))
        self.held.remove(one)
        self.slots.release(one[0])

    @rule(adapter=NAMES)
    def unload(self, adapter: str) -> None:
        used = adapter in {one for one, _ in (*self.waiting, *self.held)}
        assert self.slots.uses(adapter) == used
        if not used:
            self.slots.drop(adapter)

    @precondition(lambda self: not self.held)
    @rule()
    def sleep(self) -> None:
        self.slots.reset()
        self.there = {}

    @invariant()
    def holds(self) -> None:
        self.slots.check_integrity()
        assert set(self.slots.running) == {adapter for adapter, _ in self.held}
        assert len(set(self.slots.running)) <= self.count
        idle = not self.held and self.waiting
        if idle:
            assert any(self.slots.admits(adapter) for adapter, _ in self.waiting), "all wait for each other"


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(stateful_step_count=40, deadline=None)
