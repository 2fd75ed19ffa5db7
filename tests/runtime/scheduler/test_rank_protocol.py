"""What rank 0 tells the other ranks, as bytes, and how a rank sees that it would compute something else."""

from __future__ import annotations

import msgspec
import pytest
from treeline_runtime.config import ConfigError
from treeline_runtime.scheduler.plan import StepPlan
from treeline_runtime.scheduler.ranks.protocol import (
    Agreed,
    Call,
    Clear,
    Command,
    Delayed,
    Digests,
    GroupFailed,
    Launch,
    Settle,
    Step,
    as_one,
    decode,
    decode_plan,
    drift,
    encode,
    together,
)

EAGER = Launch("eager", 0)
GRAPH = Launch("decode graph", 8)


def step(rows: list[int], launch: Launch = EAGER, history: Digests | None = None) -> Step:
    plan = msgspec.Raw(encode(StepPlan(rows, [3] * len(rows), [4] * len(rows))))
    command = decode(encode(Step(plan, launch, (history or Digests()).after(plan, launch))))
    assert isinstance(command, Step)
    return command


@pytest.mark.parametrize("command", [Delayed(), Clear([1, 2]), Call("sleep", 2), Call("update", "/m"), Settle(None, 7)])
def test_commands_survive_the_socket(command: Command) -> None:
    assert decode(encode(command)) == command


def test_a_step_survives_the_socket() -> None:
    told = step([5, 6], GRAPH)
    assert told.launch == GRAPH
    assert decode_plan(told.plan).rows == [5, 6]


def test_equal_histories_have_equal_digests_of_eight_bytes() -> None:
    ours, theirs = Digests(), Digests()
    for rows in ([1], [1, 2], [2]):
        told = step(rows, GRAPH, ours)
        assert theirs.after(told.plan, GRAPH) == told.digest
        assert len(told.digest) == 8


@pytest.mark.parametrize("own", [Launch("decode graph", 16), Launch("prompt graph", 8), EAGER])
def test_another_graph_is_named(own: Launch) -> None:
    told = step([5, 6], GRAPH)
    assert Digests().after(told.plan, own) != told.digest
    assert drift(told, own).startswith("its step of 2 sequences uses ")
    assert drift(told, own).endswith(", rank 0's decode graph of 8")


def test_another_history_is_named() -> None:
    ours, theirs = Digests(), Digests()
    ours.after(step([1]).plan, EAGER)
    told = step([2], EAGER, ours)
    assert theirs.after(told.plan, EAGER) != told.digest
    assert drift(told, EAGER) == "its steps up to this one, of 1 sequences, were not rank 0's"


class One:
    """A group whose vote is known."""

    def __init__(self, problem: str | None = None) -> None:
        self.problem = problem
        self.votes: list[str | None] = []

    def settle(self, problem: str | None = None, number: int = 0) -> tuple[str | None, int]:
        self.votes.append(problem)
        return problem or self.problem, min(number, 3)

    def failed(self, error: Exception) -> GroupFailed:
        return GroupFailed(str(error))


def test_what_all_could_do_is_done_with_the_smallest_number() -> None:
    group = One()
    assert together(group, lambda: "made", lambda _: 5) == ("made", 3)  # type: ignore[arg-type]
    assert group.votes == [None]


def test_what_another_rank_could_not_do_is_undone() -> None:
    with pytest.raises(Agreed, match="rank 1: no room"):
        together(One("rank 1: no room"), lambda: "made")  # type: ignore[arg-type]


def test_what_this_rank_cannot_do_is_voted_on() -> None:
    def fail() -> None:
        raise ConfigError("no room")

    group = One()
    with pytest.raises(Agreed, match=r"^no room$"):
        together(group, fail)  # type: ignore[arg-type]
    assert group.votes == ["no room"]


def test_alone_errors_stay_what_they_are() -> None:
    def fail() -> None:
        raise ConfigError("no room")

    with pytest.raises(ConfigError):
        together(None, fail)
    with pytest.raises(ConfigError), as_one(None):
        fail()


def test_a_failure_among_collectives_ends_the_group_but_an_agreed_one_does_not() -> None:
    group = One()
    with pytest.raises(GroupFailed, match="broken"), as_one(group):  # type: ignore[arg-type]
        raise ValueError("broken")
    with pytest.raises(Agreed), as_one(group):  # type: ignore[arg-type]
        raise Agreed("rank 1: no room")
