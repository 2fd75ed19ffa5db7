"""Computes the next number of pods of each revision, with a surge or one by one: a pure function of desired and serving
pods.

Every revision is a Deployment; a rollout moves replicas from the old ones to the target. Each call computes the next
numbers from the present ones, so a restart, a lost answer or a reversal half-way (A→B→A) needs no memory. Three rules
make it safe:

1. Old pods are replaced, never just removed: their number may fall to `floor` minus the target's ready pods. `floor` is
   the desired number; minus `maxUnavailable` only if that makes room (no capacity for a surge, or strategy Replace);
   minus one if no node has had room for `RolloutPolicy.patience_s` and the new pods would fit in the place of old ones.
   A scaled-down Deployment loses pods that are not ready first, so a revision of `spec` replicas keeps
   `min(ready, spec)`.
2. Additional replicas stay within the limit (desired + maxSurge).
3. A failing target gets no more pods: the old ones get the room, and shrink only as ready pods of the target replace
   them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["SurgeIfCapacity", "Replace"]


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision: `replicas` requested, and how many of its pods are ready, unscheduled or failing.

    `held` are the unscheduled or failing groups that a LeaderWorkerSet ends only after a ready one.
    `waited_s` is how long one of its pods has had no node; `fits` says that it would fit in the place of an older
    revision's pod. `unpaired` says that its pods need others, and that none of those is ready.
    """

    name: str
    replicas: int
    ready: int = 0
    unschedulable: int = 0
    failing: int = 0
    held: int = 0
    waited_s: float = 0.0
    fits: bool = False
    unpaired: bool = False

    @property
    def serving(self) -> int:
        """The number of ready pods of this revision, at most its `replicas`."""
        return min(self.ready, self.replicas)

    @property
    def useless(self) -> int:
        """Replicas that do not serve, will not by waiting alone, and are the first to end."""
        return max(0, min(self.unschedulable + self.failing, self.replicas - self.serving) - self.held)

    @property
    def worth(self) -> tuple[bool, int]:
        """What is compared where some revisions get fewer pods than others."""
        return not self.unpaired, self.serving


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """The limits within which a change replaces pods."""

    strategy: Strategy = "SurgeIfCapacity"
    max_surge: int = 1
    max_unavailable: int = 0
    paused: bool = False
    patience_s: float = math.inf
    """Seconds that pods may have no node before old ones leave for them."""

    @property
    def surge(self) -> int:
        """Pods above the desired number. 1 if neither surge nor absence is allowed, since nothing could ever move."""
        if self.strategy == "Replace":
            return 0
        return self.max_surge if self.max_surge or self.max_unavailable else 1

    @property
    def absent(self) -> int:
        """Pods below the desired number."""
        return max(1, self.max_unavailable) if self.strategy == "Replace" else self.max_unavailable


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """Replicas by revision name; none where not named.

    `waiting` says why a rollout waits. `limit` bounds all replicas together, None if nothing is added. `recheck_s` is
    when time alone leads to another step.
    """

    replicas: dict[str, int]
    waiting: str = ""
    insufficient_capacity: bool = False
    limit: int | None = None
    recheck_s: float | None = None

    def beside(self, target: Revision, others: int) -> int:
        """The target's replicas, given the other revisions': draining pods still exist."""
        wanted = self.replicas.get(target.name, 0)
        return wanted if self.limit is None else min(wanted, max(self.limit - others, target.replicas))


def next_step(
    desired: int, policy: RolloutPolicy, target: Revision, olds: Sequence[Revision], *, most: int | None = None
) -> RolloutStep:
    """The new replicas of every revision. `most` is how many pods of the target may replace old ones; None for all
    that are ready."""
    olds = [old for old in olds if old.replicas > 0]
    if desired == 0:
        return RolloutStep(_all({}, target, olds))
    if not olds:
        return RolloutStep({target.name: desired})
    if policy.paused:
        return _paused(desired, policy, target, olds)
    limit = desired + policy.surge
    settled = min(target.serving, desired if most is None else most)
    if target.failing:
        return _failing(desired, limit, settled, target, olds)
    return _moving(desired, limit, settled, policy, target, olds)


def _moving(
    desired: int, limit: int, settled: int, policy: RolloutPolicy, target: Revision, olds: Sequence[Revision]
) -> RolloutStep:
    blocked = policy.strategy == "SurgeIfCapacity" and target.unschedulable > 0
    left_s = policy.patience_s - target.waited_s
    one_by_one = blocked and target.fits and left_s <= 0
    absent = max(1, policy.absent) if one_by_one else policy.absent
    gives_room = blocked or policy.surge == 0
    floor = max(0, desired - absent) if gives_room else desired
    there = sum(old.replicas for old in olds)
    useful = there - sum(old.useless for old in olds)
    keep = min(there, max(0, floor - settled), useful)
    replicas = _all(_allot(keep, olds), target, olds)
    # It shrinks only to the desired number.
    replicas[target.name] = min(desired, max(limit - keep, target.replicas))
    stuck = blocked and keep == there and not one_by_one
    again_s = max(0.0, left_s) if stuck and target.fits and left_s < math.inf else None
    return RolloutStep(replicas, _stuck(target, absent, again_s) if stuck else "", stuck, limit, again_s)


def _stuck(target: Revision, absent: int, again_s: float | None) -> str:
    reason = (
        f"no node has room for {target.unschedulable} pod(s) of revision {target.name}; the old ones keep serving, "
        f"since no more than {absent} may be missing"
    )
    if again_s is not None:
        return f"{reason}; they are replaced one by one in {math.ceil(again_s)} s"
    if not target.fits:
        return f"{reason}, and the new ones would not fit in their place"
    return reason


def _failing(desired: int, limit: int, settled: int, target: Revision, olds: Sequence[Revision]) -> RolloutStep:
    there = sum(old.replicas for old in olds)
    hold = desired - settled
    room = max(0, limit - there - target.replicas)
    keep = min(hold, there + room)
    grows = max(olds, key=lambda old: (old.worth, old.name))
    replicas = _all(_allot(min(keep, there), olds), target, olds)
    replicas[grows.name] += max(0, keep - there)
    replicas[target.name] = min(desired, target.replicas)
    return RolloutStep(replicas, f"{target.failing} pod(s) of revision {target.name} fail; the old ones keep serving")


def _paused(desired: int, policy: RolloutPolicy, target: Revision, olds: Sequence[Revision]) -> RolloutStep:
    """The step of a paused rollout: it follows the desired number, and moves no pods between revisions."""
    everybody = [*olds, target] if target.replicas else list(olds)
    there = sum(revision.replicas for revision in everybody)
    allowed = desired + policy.surge if len(everybody) > 1 else desired
    replicas = _all(_allot(min(there, allowed), everybody), target, everybody)
    if there < desired:
        grows = max(everybody, key=lambda revision: (revision.worth, revision.name))
        replicas[grows.name] += desired - there
    return RolloutStep(replicas, "rollout.paused: old and new pods stay as they are")


def _allot(keep: int, revisions: Sequence[Revision]) -> dict[str, int]:
    """Share out `keep` replicas: ready pods first, beginning with the revision that serves most."""
    given = dict.fromkeys((revision.name for revision in revisions), 0)
    ordered = sorted(revisions, key=lambda revision: (revision.unpaired, -revision.serving, revision.name))
    for wanted in ("serving", "replicas"):
        for revision in ordered:
            more = min(keep, getattr(revision, wanted) - given[revision.name])
            given[revision.name] += more
            keep -= more
    return given


def _all(given: dict[str, int], target: Revision, olds: Sequence[Revision]) -> dict[str, int]:
    return {revision.name: given.get(revision.name, 0) for revision in (*olds, target)}
