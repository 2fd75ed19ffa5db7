"""Data-parallel ranks that share experts agree on every step, and sleep when none has work."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_runtime.messages import StepRow
from treeline_runtime.models.shards import Rank
from treeline_runtime.scheduler.peers import EAGER, Agreement, SharedStep
from treeline_runtime.scheduler.ranks.protocol import Launch


class World:
    """Ranks whose rows wait on their ways, one for each pair; work is a number of steps."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.agreements = [Agreement(Rank(index, count)) for index in range(count)]
        self.work = [0] * count
        self.waits = [False] * count
        """Whether a rank has said its row, and waits for the others'."""
        self.ways: dict[tuple[int, int], deque[StepRow]] = {
            (a, b): deque() for a in range(count) for b in range(count) if a != b
        }
        self.taken: list[list[SharedStep | None]] = [[] for _ in range(count)]

    def possible(self) -> list[tuple[str, int, int]]:
        """Return everything that may happen next, besides new work."""
        found = [("arrives", *way) for way, rows in self.ways.items() if rows]
        for index, agreement in enumerate(self.agreements):
            if self.waits[index]:
                found += [("ends", index, 0)] if agreement.is_complete else []
            elif self.work[index] or agreement.is_called:
                found.append(("says", index, 0))
        return found

    def do(self, what: str, a: int, b: int) -> None:
        agreement = self.agreements[a]
        if what == "arrives":
            self.agreements[b].hear(self.ways[a, b].popleft())
        elif what == "says":
            row = agreement.say(self.work[a], EAGER)
            for b in range(self.count):
                if b != a:
                    self.ways[a, b].append(row)
            self.waits[a] = True
        else:
            self.taken[a].append(agreement.end())
            self.waits[a] = False
            self.work[a] = max(self.work[a] - 1, 0)


@settings(max_examples=300)
@given(data=st.data(), count=st.integers(2, 4))
def test_all_take_the_same_steps_until_none_has_work_and_then_sleep(data: st.DataObject, count: int) -> None:
    world, arrivals = World(count), data.draw(st.integers(0, 6))
    while (events := world.possible()) or arrivals:
        if arrivals and (not events or data.draw(st.booleans())):
            arrivals -= 1
            index = data.draw(st.integers(0, count - 1))
            if not world.waits[index]:  # a rank reads no messages while it waits for others
                world.work[index] += data.draw(st.integers(1, 3))
        else:
            world.do(*data.draw(st.sampled_from(events)))
    assert world.work == [0] * count, "none is forgotten"
    assert not any(world.waits), "none waits for one that sleeps"
    assert all(taken == world.taken[0] for taken in world.taken)
    assert all(one is None for one in world.taken[0][-1:]), "the last thing that they agree on is to sleep"


def agreed(*rows: tuple[int, Launch]) -> SharedStep | None:
    """Return what ranks agree on that would compute so many tokens so."""
    ranks = [Agreement(Rank(index, len(rows))) for index in range(len(rows))]
    said = [rank.say(*row) for rank, row in zip(ranks, rows, strict=True)]
    for rank in ranks:
        for row in said:
            rank.hear(row)
    found = [rank.end() for rank in ranks]
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize("mode", ["decode graph", "prompt graph"])
def test_a_graph_is_used_if_all_with_work_would_use_one_of_its_mode(mode: str) -> None:
    small, large = Launch(mode, 8), Launch(mode, 16)  # type: ignore[arg-type]
    assert agreed((7, small), (7, small)) == SharedStep(7, small)
    assert agreed((7, small), (12, large)) == SharedStep(12, large), "the largest"
    assert agreed((7, small), (0, EAGER)) == SharedStep(7, small), "one without work takes part in any"
    assert agreed((7, small), (300, EAGER)) == SharedStep(300, EAGER)


def test_graphs_of_two_modes_are_no_step_of_all() -> None:
    assert agreed((7, Launch("decode graph", 8)), (90, Launch("prompt graph", 96))) == SharedStep(90, EAGER)


def test_without_work_there_is_no_step() -> None:
    assert agreed((0, EAGER), (0, EAGER), (0, EAGER)) is None
