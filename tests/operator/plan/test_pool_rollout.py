"""Replicas move between revisions: exact steps, and the invariants of every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from treeline_operator.plan.rollout import Revision, RolloutPolicy, RolloutStep, next_step

SURGE = RolloutPolicy()
REPLACE = RolloutPolicy("Replace")
PAUSED = RolloutPolicy(paused=True)
PATIENT = RolloutPolicy(patience_s=120)
NO_SURGE = RolloutPolicy(max_surge=0)
TWO_MISSING = RolloutPolicy(max_surge=0, max_unavailable=2)


def step(desired: int, policy: RolloutPolicy, target: Revision, *olds: Revision) -> dict[str, int]:
    return next_step(desired, policy, target, olds).replicas


def rev(name: str, replicas: int, ready: int | None = None, **more: int) -> Revision:
    return Revision(name, replicas, replicas if ready is None else ready, **more)


FAILS = rev("b", 1, 0, failing=1)
WITHOUT_A_PLACE = rev("b", 2, 0, unschedulable=1, failing=1, waited_s=9999, fits=True)
TWO_OF_C = {"a": 1, "b": 1, "c": 2}
STEPS: list[tuple[str, int, RolloutPolicy, list[Revision], dict[str, int]]] = [
    ("the first revision gets all at once", 3, SURGE, [rev("a", 0)], {"a": 3}),
    ("the first revision, replacing", 3, REPLACE, [rev("a", 0)], {"a": 3}),
    ("a surge adds before it takes", 3, SURGE, [rev("b", 0), rev("a", 3)], {"a": 3, "b": 1}),
    ("and waits for the pod that starts", 3, SURGE, [rev("b", 1, 0), rev("a", 3)], {"a": 3, "b": 1}),
    ("one that serves takes an old one away", 3, SURGE, [rev("b", 1), rev("a", 3)], {"a": 2, "b": 2}),
    ("the last old one", 3, SURGE, [rev("b", 3), rev("a", 1)], {"a": 0, "b": 3}),
    ("replacing takes one before it adds", 3, REPLACE, [rev("b", 0), rev("a", 3)], {"a": 2, "b": 1}),
    ("and waits for the pod that starts in its place", 3, REPLACE, [rev("b", 1, 0), rev("a", 2)], {"a": 2, "b": 1}),
    ("then the next", 3, REPLACE, [rev("b", 1), rev("a", 2)], {"a": 1, "b": 2}),
    ("replacing the only one", 1, REPLACE, [rev("b", 0), rev("a", 1)], {"a": 0, "b": 1}),
    ("room does not help what fails", 3, PATIENT, [WITHOUT_A_PLACE, rev("a", 3)], {"a": 3, "b": 2}),
    ("more go to the old one while the new one fails", 5, SURGE, [FAILS, rev("a", 3)], {"a": 5, "b": 1}),
    ("a revert: b's ready pod serves until a's does", 3, SURGE, [rev("a", 2), rev("b", 2, 1)], {"b": 1, "a": 3}),
    ("a revert ends", 3, SURGE, [rev("a", 3), rev("b", 1)], {"b": 0, "a": 3}),
    ("failing old pods make room", 3, SURGE, [rev("b", 0), rev("a", 3, 1, failing=2)], {"a": 1, "b": 3}),
    ("old pods that are not ready for a moment stay", 3, SURGE, [rev("b", 1, 0), rev("a", 3, 0)], {"a": 3, "b": 1}),
    ("zero is zero at once", 0, SURGE, [rev("b", 2), rev("a", 2)], {"a": 0, "b": 0}),
    ("fewer in a rollout: what serves stays", 1, SURGE, [rev("b", 1, 0), rev("a", 3)], {"a": 1, "b": 1}),
    ("fewer in a rollout: what starts goes", 2, SURGE, [rev("b", 4, 1), rev("a", 1)], {"a": 1, "b": 2}),
    ("of several old ones what does not serve", 3, SURGE, [rev("c", 1), rev("a", 1), rev("b", 2, 1)], TWO_OF_C),
    ("paused before", 3, PAUSED, [rev("b", 0), rev("a", 3)], {"a": 3, "b": 0}),
    ("paused in the middle", 3, PAUSED, [rev("b", 2), rev("a", 2)], {"a": 2, "b": 2}),
    ("paused, and more", 5, PAUSED, [rev("b", 1, 0), rev("a", 3)], {"a": 4, "b": 1}),
    ("paused, and fewer", 1, PAUSED, [rev("b", 0), rev("a", 3)], {"a": 1, "b": 0}),
    ("paused, and none", 0, PAUSED, [rev("b", 1), rev("a", 3)], {"a": 0, "b": 0}),
    ("paused from the beginning", 2, PAUSED, [rev("b", 0)], {"b": 2}),
    ("no surge and nothing missing still moves", 2, NO_SURGE, [rev("b", 0), rev("a", 2)], {"a": 2, "b": 1}),
    ("what has converged stays", 4, SURGE, [rev("a", 4), rev("b", 0)], {"a": 4}),
    ("what has converged stays, replacing", 4, REPLACE, [rev("a", 4), rev("b", 0)], {"a": 4}),
    ("what has converged stays, surging", 4, RolloutPolicy(max_surge=3), [rev("a", 4), rev("b", 0)], {"a": 4}),
    ("what has converged stays, without a surge", 4, TWO_MISSING, [rev("a", 4), rev("b", 0)], {"a": 4}),
]
"""Description, wanted replicas, policy, the target and earlier revisions → the replicas of each."""


@pytest.mark.parametrize(
    ("wanted", "policy", "revisions", "expected"), [row[1:] for row in STEPS], ids=[row[0] for row in STEPS]
)
def test_each_step_moves_the_expected_replicas(
    wanted: int, policy: RolloutPolicy, revisions: list[Revision], expected: dict[str, int]
) -> None:
    assert step(wanted, policy, *revisions) == expected


def test_a_surge_without_a_place_waits_if_nothing_may_be_missing() -> None:
    waits = next_step(2, SURGE, rev("b", 1, 0, unschedulable=1), [rev("a", 2)])
    assert waits.replicas == {"a": 2, "b": 1}
    assert waits.insufficient_capacity
    assert "no node has room for 1 pod(s) of revision b" in waits.waiting


def test_a_surge_without_a_place_waits_for_nodes_and_then_replaces_one_by_one() -> None:
    pending = {"unschedulable": 1, "fits": True}
    waits = next_step(3, PATIENT, rev("b", 1, 0, waited_s=50, **pending), [rev("a", 3)])
    assert (waits.replicas, waits.recheck_s) == ({"a": 3, "b": 1}, 70)
    assert waits.insufficient_capacity
    assert "they are replaced one by one in 70 s" in waits.waiting
    moves = next_step(3, PATIENT, rev("b", 1, 0, waited_s=120, **pending), [rev("a", 3)])
    assert (moves.replicas, moves.recheck_s, moves.waiting) == ({"a": 2, "b": 2}, None, "")
    # One takes the place and starts, the other waits: nothing more goes before the first serves.
    assert step(3, PATIENT, rev("b", 2, 0, waited_s=500, **pending), rev("a", 2)) == {"a": 2, "b": 2}
    assert step(3, PATIENT, rev("b", 2, 1, waited_s=500, **pending), rev("a", 2)) == {"a": 1, "b": 3}
    assert step(3, PATIENT, rev("b", 3, 2, waited_s=500, **pending), rev("a", 1)) == {"a": 0, "b": 3}


def test_the_only_pod_is_replaced_only_by_one_that_fits_in_its_place() -> None:
    fits = rev("b", 1, 0, unschedulable=1, waited_s=120, fits=True)
    assert step(1, PATIENT, fits, rev("a", 1)) == {"a": 0, "b": 1}
    larger = rev("b", 1, 0, unschedulable=1, waited_s=9999, fits=False)
    stays = next_step(1, PATIENT, larger, [rev("a", 1)])
    assert stays.replicas == {"a": 1, "b": 1}
    assert stays.insufficient_capacity
    assert "the new ones would not fit in their place" in stays.waiting
    assert stays.recheck_s is None, "time alone changes nothing"


def test_a_surge_without_a_place_replaces_as_far_as_pods_may_be_missing() -> None:
    policy = RolloutPolicy(max_unavailable=1)
    took = next_step(3, policy, rev("b", 1, 0, unschedulable=1), [rev("a", 3)])
    assert took.replicas == {"a": 2, "b": 2}
    assert not took.insufficient_capacity
    # The freed place is taken by one of the two; nothing more goes.
    assert step(3, policy, rev("b", 2, 0, unschedulable=1), rev("a", 2)) == {"a": 2, "b": 2}
    # With room it would not have taken any.
    assert step(3, policy, rev("b", 1, 0), rev("a", 3)) == {"a": 3, "b": 1}


def test_a_failing_revision_takes_no_ready_pod() -> None:
    for policy in (SURGE, REPLACE, RolloutPolicy(max_unavailable=2)):
        stays = next_step(3, policy, rev("b", 1, 0, failing=1), [rev("a", 3)])
        assert stays.replicas == {"a": 3, "b": 1}
        assert "fail" in stays.waiting


@dataclass
class Pods:
    """Pods of one revision: each is starting, ready, pending (no place) or failing."""

    states: list[str] = field(default_factory=list)
    replicas: int = 0

    def count(self, state: str) -> int:
        return self.states.count(state)


class RolloutStory(RuleBasedStateMachine):
    """A pool whose spec flips between revisions while its pods start, fail, find no place and come back."""

    @initialize(
        desired=st.integers(1, 6),
        strategy=st.sampled_from(["SurgeIfCapacity", "SurgeIfCapacity", "Replace"]),
        surge=st.integers(0, 2),
        missing=st.sampled_from([0, 0, 1, 2]),
        spare=st.integers(0, 3),
    )
    def begin(self, desired: int, strategy: str, surge: int, missing: int, spare: int) -> None:
        self.desired = desired
        self.policy = RolloutPolicy(strategy, surge, missing)  # type: ignore[arg-type]
        self.capacity = desired + spare
        self.bad: set[str] = set()
        self.target = "a"
        self.revisions: dict[str, Pods] = {name: Pods() for name in "abc"}
        self.served_enough = False
        self.end_well()

    # ---- what happens; the planner looks after each ---------------------------------------------------------

    @rule(other=st.sampled_from([1, 2]))
    def flip(self, other: int) -> None:
        self.target = "abc"[("abc".index(self.target) + other) % 3]
        self.move()

    @rule()
    def flip_to_a_bad_one(self) -> None:
        self.flip(1)
        self.bad |= {self.target}
        self.proceed(all_pods=True)
        self.move()

    @rule(desired=st.integers(0, 6))
    def scale(self, desired: int) -> None:
        self.desired = desired
        self.served_enough = self.serving() >= self.floor()
        self.move()

    @rule(name=st.sampled_from("abc"))
    def break_or_mend(self, name: str) -> None:
        self.bad ^= {name}

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        old = self.policy
        self.policy = RolloutPolicy(old.strategy, old.max_surge, old.max_unavailable, paused=paused)
        self.move()

    @rule()
    def one_pod_flaps(self) -> None:
        """A ready pod becomes unready, which is not the planner's doing: too few may serve now."""
        for pods in self.revisions.values():
            if "ready" in pods.states:
                pods.states[pods.states.index("ready")] = "starting"
                break
        self.served_enough = self.serving() >= self.floor()
        self.move()

    @rule(spare=st.integers(0, 3))
    def nodes_come_and_go(self, spare: int) -> None:
        self.capacity = self.desired + spare

    @rule()
    def one_pod_proceeds(self) -> None:
        self.proceed(all_pods=False)
        self.move()

    @rule()
    def all_pods_proceed(self) -> None:
        self.proceed(all_pods=True)
        self.move()

    def teardown(self) -> None:
        """With good pods, and room for one more if none may be missing, the rollout ends with the target alone."""
        if not hasattr(self, "revisions"):
            return
        self.pause(paused=False)
        self.bad = set()
        self.capacity = max(self.capacity, self.desired + (self.policy.absent == 0))
        self.end_well()

    # ---- what always holds ----------------------------------------------------------------------------------

    @invariant()
    def never_under_serves(self) -> None:
        if hasattr(self, "revisions") and self.served_enough:
            assert self.serving() >= self.floor()

    def move(self) -> None:
        before = self.serving()
        bad = self.revisions[self.target].count("failing") > 0 and not self.policy.paused
        self.apply(self.plan())
        assert self.serving() >= min(before, self.floor()), "ready pods were taken away"
        assert not bad or self.serving() >= min(before, self.desired), "ready pods went for failing ones"
        self.served_enough = self.served_enough or self.serving() >= self.floor()

    def end_well(self) -> None:
        for _ in range(40):
            self.move()
            self.proceed(all_pods=True)
        there = {name: pods.replicas for name, pods in self.revisions.items() if pods.replicas}
        assert there == ({self.target: self.desired} if self.desired else {})
        assert self.serving() == self.desired
        self.served_enough = True

    # ---- the simulated cluster ------------------------------------------------------------------------------

    def floor(self) -> int:
        return max(0, self.desired - self.policy.absent)

    def serving(self) -> int:
        return sum(pods.count("ready") for pods in self.revisions.values())

    def plan(self) -> RolloutStep:
        seen = {
            name: Revision(name, pods.replicas, pods.count("ready"), pods.count("pending"), pods.count("failing"))
            for name, pods in self.revisions.items()
        }
        olds = [revision for name, revision in seen.items() if name != self.target]
        return next_step(self.desired, self.policy, seen[self.target], olds)

    def apply(self, plan: RolloutStep) -> None:
        before = sum(pods.replicas for pods in self.revisions.values())
        for name, pods in self.revisions.items():
            pods.replicas = plan.replicas.get(name, 0)
            # A ReplicaSet gives up pods without a place first, then those that are not ready.
            pods.states.sort(key=["ready", "failing", "starting", "pending"].index)
            del pods.states[pods.replicas :]
            pods.states += ["pending"] * (pods.replicas - len(pods.states))
        after = sum(pods.replicas for pods in self.revisions.values())
        assert after <= max(before, self.desired + self.policy.surge), "more pods than the surge allows"
        assert all(count >= 0 for count in plan.replicas.values())

    def proceed(self, *, all_pods: bool) -> None:
        placed = sum(len(pods.states) - pods.count("pending") for pods in self.revisions.values())
        for name, pods in self.revisions.items():
            for index, state in enumerate(pods.states):
                if state == "pending" and placed < self.capacity:
                    placed += 1
                    pods.states[index] = "starting"
                elif state == "starting" or (state == "failing" and name not in self.bad):
                    pods.states[index] = "failing" if name in self.bad else "ready"
                else:
                    continue
                if not all_pods:
                    return


TestRolloutStory = RolloutStory.TestCase
TestRolloutStory.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
