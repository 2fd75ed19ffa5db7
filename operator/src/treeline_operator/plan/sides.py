"""Rolls out both sides of a pool with `spec.prefill` together: the pods that answer, and those that compute prompts.

Pods of different revisions may not fit together (another release, model or block size), so that a prompt computed by
one cannot be answered by the other. A revision has a Deployment on each side, and three rules are added to `rollout`'s:

1. Of the target, each side counts as many ready pods as its share that is ready on the other side, too. So old pods
   leave both sides in step, the last ones when the target's are complete on both.
2. An old revision without ready pods on the other side leaves first.
3. Where prompts need no pods of their own any more, those that compute them stay as long as those that answer by them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from treeline_operator import names
from treeline_operator.plan.rollout import Revision, RolloutPolicy, RolloutStep, next_step


@dataclass(frozen=True, slots=True)
class SideNumbers:
    """The numbers of one side; `target` is None where no pods are wanted on it any more."""

    desired: int
    policy: RolloutPolicy
    target: Revision | None
    olds: Sequence[Revision]


def next_steps(answers: SideNumbers, prompts: SideNumbers | None = None) -> tuple[RolloutStep, ...]:
    """The new replicas of every revision, for each side. Revisions that compute prompts have the name of those that
    answer by them, with `names.PREFILL`."""
    assert answers.target is not None, "a pool always answers"
    if prompts is None:
        return (next_step(answers.desired, answers.policy, answers.target, answers.olds),)
    serving = {one.name: one.serving for one in (prompts.target, *prompts.olds) if one is not None}
    first = _step(answers, prompts, lambda one: serving.get(one.name + names.PREFILL, not one.unpaired))
    kept = {one.name: first.replicas.get(one.name, 0) for one in (answers.target, *answers.olds)}
    if prompts.target is None:
        return first, RolloutStep({one.name: one.replicas * bool(kept.get(_by(one))) for one in prompts.olds})
    left = {one.name: min(one.serving, kept[one.name]) for one in (answers.target, *answers.olds)}
    return first, _step(prompts, answers, lambda one: left.get(_by(one), 0))


def _by(prompts: Revision) -> str:
    """The name of the revision that answers."""
    return prompts.name.removesuffix(names.PREFILL)


def _step(side: SideNumbers, other: SideNumbers, partners: Callable[[Revision], int]) -> RolloutStep:
    """The step of one side; `partners` are a revision's ready pods on the other one."""
    assert side.target is not None, "its pods are wanted"
    target, *olds = (replace(one, unpaired=not partners(one)) for one in (side.target, *side.olds))
    most = side.desired
    if other.target is not None and other.desired:
        most = min(other.target.serving, other.desired) * side.desired // other.desired
    return next_step(side.desired, side.policy, target, olds, most=most)
