"""Chooses the pods of a revision that leave, when each may leave, and how many replicas remain meanwhile.

A pod leaves in three steps, which only its labels and annotations record:

1. *draining*: label `treeline.dev/serving: "false"` and the time; the picker sends it no new requests;
2. *released*: it has no requests left, or its time is up; it gets the lowest deletion cost;
3. the Deployment has one replica less, and its ReplicaSet deletes a pod of the lowest cost.

Of a LeaderWorkerSet, the groups with the highest numbers end, whatever their state: their leaders leave in this order.

If a pod should stay after all (a revert, a scale-up), it gets its labels back before any new pod is made. A ReplicaSet
deletes pods without a node first, then pending, then not ready ones, at any cost; so pods are chosen in this order, and
none is released while an earlier one is still draining.

If a pod's requests are unknown, the wait is short: a pod finishes its streams by itself when it is asked to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from treeline_wire import labels

from treeline_operator import names
from treeline_operator.actions import Mark
from treeline_operator.plan import facts
from treeline_operator.plan.facts import annotation, created, label
from treeline_operator.world import PickerEndpoint, PoolWorld, Ref

Pod = dict[str, Any]

SETTLE_S: Final = 1.0
"""After this time, requests picked just before the drain have reached the pod, and its report includes them."""
BLIND_S: Final = 10.0
"""Seconds to wait for a pod whose requests are unknown."""
FRESH_S: Final = 1.0
"""The oldest answer that shows which pod is least busy; the picker is asked again if it is older."""
GIVEN_UP_S: Final = 30.0
"""A newer answer than one of this age will not come soon."""
_LOOK_AGAIN_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class DrainPolicy:
    """The facts that decide when a pod may leave. `waits` is False if pods are replaced without waiting."""

    now: datetime
    timeout: timedelta
    waits: bool = True
    endpoints: Mapping[str, PickerEndpoint] | None = None
    """The picker's endpoints, by name; None without an answer."""
    seen_at: datetime | None = None
    silent_since: datetime | None = None
    """The time since which the picker has not answered; None if it was not asked yet."""

    @classmethod
    def of(cls, world: PoolWorld) -> DrainPolicy:
        """The policy of a pool, from its spec and the picker's report."""
        spec, picker, now = world.pool.spec, world.picker, world.now
        listed = None
        if picker is not None and picker.synced:
            listed = {endpoint.name: endpoint for endpoint in picker.pools.get(world.pool.name, ())}
        silent = world.picker_silent_since
        if picker is not None:
            # A picker that answers but knows nothing yet starts no new waiting period.
            silent = datetime.min.replace(tzinfo=UTC)
        return cls(
            now=now,
            timeout=timedelta(seconds=spec.drain.timeout_seconds),
            waits=spec.rollout.strategy != "Replace",
            endpoints=listed,
            seen_at=picker.at if picker is not None else None,
            silent_since=silent,
        )

    @property
    def fresh(self) -> bool:
        """Whether no newer information about the pods will arrive soon."""
        if self.seen_at is None:
            return True
        return not FRESH_S < (self.now - self.seen_at).total_seconds() <= GIVEN_UP_S

    def endpoint(self, pod: Pod) -> PickerEndpoint | None:
        """The pod as the picker lists it."""
        return (self.endpoints or {}).get(pod["metadata"]["name"])

    def in_flight(self, pod: Pod) -> int | None:
        """The pod's requests, where they are known."""
        endpoint = self.endpoint(pod)
        return None if endpoint is None else endpoint.in_flight


@dataclass(frozen=True, slots=True)
class DrainStep:
    """The steps for the pods of one revision; `replicas` is the new number of its Deployment."""

    replicas: int
    marks: tuple[Mark, ...] = ()
    recheck_s: float | None = None
    notes: tuple[str, ...] = ()


class _ReleaseDecision(NamedTuple):
    """Whether a pod may leave. If not, when to look again at the latest."""

    may_go: bool
    why: str
    again_s: float = 0.0
    cut_off: bool = False


def drain_step(pods: Sequence[Pod], wanted: int, replicas: int, policy: DrainPolicy, why: str) -> DrainStep:
    """The steps that leave `wanted` of these pods, while the Deployment asks for `replicas`. `why` is the reason."""
    leaving = victims(pods, wanted, policy)
    chosen = {pod["metadata"]["name"] for pod in leaving}
    groups = any(facts.group_index(pod) is not None for pod in leaving)
    stay = [pod for pod in pods if pod["metadata"]["name"] not in chosen]
    marks = [_mark(pod, "return", "it stays") for pod in stay if _is_marked(pod)]
    notes: list[str] = []
    again: list[float] = []
    waiting = 0
    blocked: int | None = None  # place of the first pod that must wait: later ones would not be deleted before it
    for pod in leaving:
        if _is_released(pod):
            continue
        waiting = max(waiting, (facts.group_index(pod) or 0) + 1 - wanted) if groups else waiting + 1
        decision = _may_release(pod, policy)
        place = _place(pod)
        if decision.may_go and blocked in (None, place):
            marks.append(_released(pod, policy, f"{why}; {decision.why}", cut_off=decision.cut_off))
            continue
        if not decision.may_go:
            blocked = place if blocked is None else blocked
            again.append(decision.again_s)
            notes.append(f"pod {pod['metadata']['name']} leaves: {decision.why}")
        if _since(pod, policy.now) is None and not _is_undecided(pod, policy):
            marks.append(_mark(pod, "drain", why, policy.in_flight(pod), since=stamp(policy.now)))
    # A pod that leaves next is still a replica: its cost must be set before the number falls.
    left = wanted if wanted >= replicas else min(replicas, wanted + waiting)
    return DrainStep(left, tuple(marks), min(again, default=None), tuple(notes))


def victims(pods: Sequence[Pod], wanted: int, policy: DrainPolicy) -> list[Pod]:
    """The pods beyond `wanted`, in the order in which they leave: among equally ready ones those already leaving, then
    those with the fewest requests, the coldest cache, the newest. Of leaders, those with the highest numbers."""

    def order(pod: Pod) -> tuple[Any, ...]:
        endpoint = policy.endpoint(pod)
        cached = endpoint.cached_tokens if endpoint is not None else 0
        stage = 0 if _is_released(pod) else 1 if facts.is_draining(pod) else 2
        age, name = -created(pod).timestamp(), pod["metadata"]["name"]
        return _place(pod), stage, policy.in_flight(pod) or 0, cached, age, name

    ordered = sorted(pods, key=order)
    if any(facts.group_index(pod) is not None for pod in pods):
        return [pod for pod in ordered if (facts.group_index(pod) or 0) >= wanted]
    return ordered[: max(0, len(pods) - wanted)]


def least_replicas(pods: Sequence[Pod], wanted: int) -> int:
    """The replicas that keep `wanted` groups ready, or all that are: a LeaderWorkerSet ends those with higher numbers
    than a broken one's. `wanted` for pods of a Deployment, or if that many of the lowest groups are ready."""
    ready = sorted(number for pod in pods if facts.is_ready(pod) and (number := facts.group_index(pod)) is not None)
    return max(wanted, *(number + 1 for number in ready[:wanted]), 0)


def deadline(pod: Pod, timeout: timedelta, now: datetime) -> datetime | None:
    """Until when a pod that drains is waited for; None where it does not say since when it does."""
    since = _since(pod, now)
    return None if since is None else since + timeout


def _may_release(pod: Pod, policy: DrainPolicy) -> _ReleaseDecision:
    if _is_undecided(pod, policy):
        return _ReleaseDecision(False, "the picker is asked for the least busy pod", again_s=_LOOK_AGAIN_S)
    if not policy.waits:
        return _ReleaseDecision(True, "its pool does not wait for requests")
    if not facts.may_have_requests(pod):
        return _ReleaseDecision(True, "it serves no requests")
    since = _since(pod, policy.now)
    if since is None:
        return _ReleaseDecision(False, "it begins", again_s=SETTLE_S)
    in_flight = policy.in_flight(pod)
    ends = since + policy.timeout
    left_s = (ends - policy.now).total_seconds()
    if left_s <= 0:
        return _ReleaseDecision(True, f"drained for {policy.timeout.seconds} s", cut_off=bool(in_flight))
    if in_flight:
        return _ReleaseDecision(False, f"{requests(in_flight)}, until {stamp(ends)} at the latest", again_s=left_s)
    endpoint = policy.endpoint(pod)
    if in_flight == 0 and endpoint is not None and endpoint.draining:
        settled = since + timedelta(seconds=SETTLE_S)
        if policy.seen_at is not None and policy.seen_at >= settled:
            return _ReleaseDecision(True, "no requests left")
        soon = max(_LOOK_AGAIN_S, (settled - policy.now).total_seconds())
        return _ReleaseDecision(False, "apparently no requests left", again_s=min(left_s, soon))
    return _unseen(policy, since, left_s)


def _unseen(policy: DrainPolicy, since: datetime, left_s: float) -> _ReleaseDecision:
    """Decide for a pod whose requests are unknown."""
    if policy.silent_since is None:
        return _ReleaseDecision(False, "its requests are not known yet", again_s=min(left_s, SETTLE_S))
    silent = policy.silent_since
    blind_s = (max(since, silent) + timedelta(seconds=BLIND_S) - policy.now).total_seconds()
    if blind_s <= 0:
        return _ReleaseDecision(True, "its requests are unknown; it finishes them by itself")
    return _ReleaseDecision(False, "its requests are unknown", again_s=min(left_s, blind_s))


def _is_undecided(pod: Pod, policy: DrainPolicy) -> bool:
    """Whether another pod may be a better choice, as far as is known before the picker is asked."""
    chosen = facts.group_index(pod) is not None
    return not chosen and not policy.fresh and facts.is_ready(pod) and not facts.is_draining(pod)


def _place(pod: Pod) -> int:
    """The order in which a ReplicaSet deletes pods before it looks at their costs; a LeaderWorkerSet's is by number."""
    if (index := facts.group_index(pod)) is not None:
        return -index
    if facts.is_ready(pod):
        return 3
    if not pod.get("spec", {}).get("nodeName"):
        return 0
    return 1 if pod.get("status", {}).get("phase") == "Pending" else 2


def _is_released(pod: Pod) -> bool:
    return facts.is_draining(pod) and annotation(pod, names.DELETION_COST) == names.LOWEST_COST


def _is_marked(pod: Pod) -> bool:
    """Whether our marks keep the pod from serving, or mark it for deletion."""
    cost = annotation(pod, names.DELETION_COST) == names.LOWEST_COST
    return label(pod, labels.SERVING) != "true" or cost or bool(annotation(pod, names.DRAINING_SINCE))


def _since(pod: Pod, now: datetime) -> datetime | None:
    """Since when the pod drains; None where it does not, or where no time stands that may have been."""
    if not facts.is_draining(pod):
        return None
    try:
        since = datetime.fromisoformat(annotation(pod, names.DRAINING_SINCE))
    except ValueError:
        return None
    return since if since.tzinfo is not None and since <= now + timedelta(seconds=BLIND_S) else None


def stamp(moment: datetime) -> str:
    """A moment for annotations and people."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _released(pod: Pod, policy: DrainPolicy, why: str, *, cut_off: bool) -> Mark:
    since = _since(pod, policy.now) or policy.now
    return _mark(pod, "release", why, policy.in_flight(pod), since=stamp(since), cut_off=cut_off)


def _mark(
    pod: Pod, step: Any, why: str, in_flight: int | None = None, *, since: str = "", cut_off: bool = False
) -> Mark:
    meta = pod["metadata"]
    annotations = {names.DRAINING_SINCE: since} if since else {}
    if step == "release":
        annotations[names.DELETION_COST] = names.LOWEST_COST
    return Mark(
        ref=Ref("v1", "Pod", meta.get("namespace", ""), meta["name"]),
        uid=meta["uid"],
        labels={labels.SERVING: "true" if step == "return" else "false"},
        annotations=annotations,
        why=why,
        step=step,
        in_flight=in_flight,
        cut_off=cut_off,
    )


def requests(count: int) -> str:
    """A number of pods, in words."""
    return f"{count} request{'' if count == 1 else 's'} left"
