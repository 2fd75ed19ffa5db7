"""Slots of adapters: who gets one, who waits, and that nobody waits for ever."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from itertools import zip_longest

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from treeline_runtime.scheduler.slots import MOST_PASSING, AdapterSlots

NAMES = st.sampled_from("abcdef")


class Slots(AdapterSlots):
    """All requests are of one client unless a test says otherwise."""

    def admits(self, adapter: str, client: str | None = None) -> bool:
        return super().admits(adapter, client)

    def take(self, adapter: str, client: str | None = None) -> int:
        return super().take(adapter, client)

    def release(self, adapter: str, client: str | None = None) -> None:
        super().release(adapter, client)


def filled(count: int, adapters: str, client: str | None = None) -> Slots:
    slots = Slots(count)
    for adapter in adapters:
        slots.take(adapter, client)
    return slots


def waits(slots: Slots, adapter: str, rid: str = "r", tokens: int = 1, client: str | None = None) -> bool:
    """Let a request wait. Return whether it has to."""
    slots.wait(adapter, rid, tokens)
    return not slots.admits(adapter, client)


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
        slots.release("a" if slots._used["a"].total() > 1 else "b")
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
    rng, slots, number = random.Random(seed), Slots(count), 0
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


def test_a_clients_only_adapter_gets_the_next_idle_slot_of_a_client_with_two() -> None:
    slots = filled(2, "abb", "many")
    assert waits(slots, "c", client="many")
    assert waits(slots, "d", client="one")
    assert not slots.admits("a", "many"), "its slot, with the fewest requests, is kept"
    assert slots.admits("b", "many")
    slots.release("a", "many")
    assert not slots.admits("c", "many")
    assert slots.admits("d", "one")


def test_a_slot_that_is_kept_for_a_client_with_another_goes_to_one_with_none() -> None:
    slots = filled(2, "ab", "many")
    assert waits(slots, "c", client="many")
    for _ in range(MOST_PASSING):
        slots.take("b", "many")
    assert slots._kept == {"a": "c"}
    assert waits(slots, "d", client="one")
    assert slots._kept == {"a": "d"}
    assert waits(slots, "e", client="another")
    assert slots._kept == {"a": "d"}, "each of the two has one"


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32))
def test_a_client_with_many_adapters_delays_others_by_one_slot_that_becomes_idle(
    count: int, others: int, seed: int
) -> None:
    """Its requests for ever more adapters fill all slots and the queue, in which clients take turns."""
    rng, slots, number, longest = random.Random(seed), Slots(count), 0, 6
    waiting: dict[str, deque[Job]] = {"many": deque()}
    running: list[tuple[str, Job]] = []
    since: dict[str, int] = {}

    def arrive(client: str, adapter: str) -> None:
        nonlocal number
        number += 1
        job = Job(str(number), adapter, rng.randint(1, longest))
        slots.wait(adapter, job.rid, rng.randint(1, 100))
        waiting.setdefault(client, deque()).append(job)

    def step() -> None:
        queue = [
            job for turn in zip_longest(*([(who, one) for one in waiting[who]] for who in waiting)) for job in turn
        ]
        for client, job in filter(None, queue):
            if slots.admits(job.adapter, client):
                waiting[client].remove(job)
                slots.leave(job.adapter, job.rid)
                slots.take(job.adapter, client)
                running.append((client, job))
                waiting[client] = waiting.pop(client)
        slots.check_integrity()
        for client, job in list(running):
            job.steps -= 1
            if not job.steps:
                running.remove((client, job))
                slots.release(job.adapter, client)

    for now in range(150):
        while len(waiting["many"]) < 30:
            arrive("many", f"m{rng.randint(0, 60)}")
        if now >= 60:
            for client in (f"other {i}" for i in range(min(others, count))):
                if not waiting.get(client) and rng.random() < 0.3 and not any(who == client for who, _ in running):
                    arrive(client, client)
                    since[client] = now
        step()
        for client, began in list(since.items()):
            if not waiting[client]:
                del since[client]
            # its first refusal keeps it a slot, or another's turn comes first
            assert now - began <= (others + 1) * (longest + 1), f"{client} waits"


class SlotsMachine(RuleBasedStateMachine):
    """Any order of calls that the queue can make, against a list of who holds what."""

    @initialize(count=st.integers(1, 3))
    def begin(self, count: int) -> None:
        self.count, self.slots, self.number = count, Slots(count), 0
        self.waiting: list[tuple[str, str]] = []
        self.held: list[tuple[str, int, str]] = []
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
    @rule(data=st.data(), client=st.sampled_from("xyz"))
    def come_in(self, data: st.DataObject, client: str) -> None:
        one = data.draw(st.sampled_from(self.waiting))
        if not self.slots.admits(one[0], client):
            return
        self.waiting.remove(one)
        self.slots.leave(*one)
        self.held.append((one[0], self.slots.take(one[0], client), client))

    @rule()
    def launch(self) -> None:
        self.there |= self.slots.news
        self.slots.told()
        for adapter, slot, _ in self.held:
            assert self.there[slot] == adapter, "it would be computed with another's weights"

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.held))
        self.held.remove(one)
        self.slots.release(one[0], one[2])

    @rule(adapter=NAMES)
    def unload(self, adapter: str) -> None:
        used = adapter in {one for one, *_ in (*self.waiting, *self.held)}
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
        assert set(self.slots.running) == {adapter for adapter, *_ in self.held}
        assert len(set(self.slots.running)) <= self.count
        idle = not self.held and self.waiting
        if idle:
            assert any(self.slots.admits(adapter) for adapter, _ in self.waiting), "all wait for each other"


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(stateful_step_count=40, deadline=None)
