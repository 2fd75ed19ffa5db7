"""The revisions that a pool has and should have. Each is a Deployment or, for replicas of several pods, a
LeaderWorkerSet, named by a hash of its pods' inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from treeline_wire import labels

from treeline_operator import names
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan import facts
from treeline_operator.plan.canonical import canonical
from treeline_operator.plan.diff import is_ours
from treeline_operator.plan.engines import hides_hits
from treeline_operator.plan.facts import (
    condition_of,
    created,
    is_observed,
    label,
)
from treeline_operator.plan.rollout import Revision
from treeline_operator.world import Observed, PickerView, PoolWorld

KEPT_HISTORY: Final = 1
"""Old revisions without pods that stay, so that going back costs nothing but the pods."""

UNSEEN_S: Final = 60
"""Seconds in which a controller that runs processes a new object."""


def inputs(pool: InferencePool) -> str:
    """Hash of everything in the spec that the pods are made from; the name of their revision.

    Fields that have their default are left out: a field that a later version of the API adds changes no hash.
    """
    spec = pool.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)
    model = {name: value for name, value in spec["model"].items() if name != "pickerReadsClaim"}
    if "cache" in model:
        # Size and class concern the claim; pods only mount it.
        model["cache"] = model["cache"].get("claimName", "own")
    engine = {k: v for k, v in spec.get("engine", {}).items() if k != "tensorParallel"}
    if pool.spec.tensor_parallel != 1:
        # The effective value: setting a field to its present default keeps the pods.
        engine["tensorParallel"] = pool.spec.tensor_parallel
    if "cache" in engine:
        engine["cache"] = engine["cache"].get("claimName", "own")
    made_from = {
        "model": model,
        "accelerator": spec.get("accelerator"),
        "engine": engine or None,
        "drain": spec.get("drain"),
        "tracing": spec.get("tracing"),
        "gateway": pool.spec.gateway.name,
    }
    if hides_hits(pool):
        made_from["tellsHits"] = False
    if own := pool.spec.prefill:
        # Both sides of a revision belong together: a change of one makes both anew.
        patched = canonical(own.template, keep_unset=True) if own.template else {}
        made_from["prefill"] = [spec["prefill"].get("accelerator"), patched]
    patch = canonical(pool.spec.template, keep_unset=True) if pool.spec.template else {}
    return names.digest([canonical(made_from), patch])


@dataclass(frozen=True, slots=True)
class ExistingRevision:
    """A present revision: its Deployment or LeaderWorkerSet, decoded, and its pods that are not being deleted: those
    that serve, one a replica, and the workers of their groups."""

    name: str
    observed: Observed
    object: dict[str, Any]
    pods: tuple[dict[str, Any], ...]
    workers: tuple[dict[str, Any], ...] = ()

    @property
    def replicas(self) -> int:
        return int(self.object["spec"].get("replicas", 1))

    @property
    def is_empty(self) -> bool:
        """Whether it has no pods and will get none."""
        status = self.object.get("status", {})
        told = is_observed(self.object) and not status.get("replicas")
        return self.replicas == 0 and told and not self.pods

    @property
    def role(self) -> str:
        """The part of a request that its pods compute: `prefill`, `decode` or `both`."""
        return label(facts.pod_template(self.object), labels.ROLE)

    @property
    def page_ports(self) -> int:
        """Ports at which each of its pods gives pages; 0 once it has no pods."""
        containers = () if self.is_empty else facts.pod_template(self.object)["spec"]["containers"]
        named = {str(port.get("name")) for one in containers for port in one.get("ports", ())}
        return sum(name.startswith("kv-transfer") for name in named)

    @property
    def downloads(self) -> bool:
        """Whether its pods download the model before they start."""
        pod = facts.pod_template(self.object)["spec"]
        return any(container["name"] == facts.DOWNLOAD for container in pod.get("initContainers", ()))

    @property
    def nodes(self) -> int:
        """Pods of a replica."""
        return int(self.object["spec"].get("leaderWorkerTemplate", {}).get("size", 1))

    def is_unseen(self, now: datetime) -> bool:
        """Whether LeaderWorkerSet's controller, which has had UNSEEN_S, has not processed it."""
        waited_s = (now - created(self.object)).total_seconds()
        return self.nodes > 1 and not is_observed(self.object) and waited_s >= UNSEEN_S

    def group(self, leader: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        """All pods of a replica, by the one that serves."""
        index = facts.group_index(leader)
        return leader, *(pod for pod in self.workers if facts.group_index(pod) == index)

    def measured(
        self, picker: Collection[str] | None, now: datetime, olds: Collection[ExistingRevision] = ()
    ) -> Revision:
        """The numbers that decide a rollout.

        `picker` are the pods that it would choose, None if unknown; `olds` are the revisions to replace. A draining pod
        no longer serves, but can be taken back.
        """
        ready = [pod for pod in self.pods if facts.is_ready(pod) and not facts.is_draining(pod)]
        if picker is not None:
            ready = [pod for pod in ready if pod["metadata"]["name"] in picker]
        refused = max(0, self.replicas - len(self.pods)) if self._refusal else 0
        groups = [self.group(pod) for pod in self.pods]
        last = max((facts.group_index(pod) or 0 for pod in self.pods if facts.is_ready(pod)), default=0)
        homeless = [pod for pod in (*self.pods, *self.workers) if facts.is_unschedulable(pod)]
        since = str(self._refusal.get("lastTransitionTime") or "") if refused else ""
        return Revision(
            self.name,
            self.replicas,
            ready=len(ready),
            unschedulable=refused + sum(any(map(facts.is_unschedulable, group)) for group in groups),
            failing=sum(any(map(facts.is_failing, group)) for group in groups),
            held=sum(
                any(facts.is_unschedulable(pod) or facts.is_failing(pod) for pod in group)
                for group in groups
                if (number := facts.group_index(group[0])) is not None and number < last
            ),
            waited_s=facts.waited_s(homeless, since, now),
            fits=self._fits(homeless, olds),
            unpaired=self.role == "decode",  # until its other side is looked at
        )

    def _fits(self, homeless: Collection[dict[str, Any]], olds: Collection[ExistingRevision]) -> bool:
        """Whether its pods would find a node in the place of an old one. An admission policy that refuses them does so
        in any case."""
        by_quota = "quota" in str(self._refusal.get("message", ""))
        if not homeless and not by_quota:
            return False
        ours = facts.pod_template(self.object)["spec"]
        theirs = [(facts.pod_template(old.object)["spec"], old.nodes) for old in olds if old.replicas]
        return bool(theirs) and all(
            self.nodes <= nodes and facts.fits_in_place(homeless, ours, old) for old, nodes in theirs
        )

    @property
    def _refusal(self) -> Mapping[str, Any]:
        """The Deployment's condition while the API server refuses its pods (a quota, a policy); else empty."""
        refusal = condition_of(self.object, "ReplicaFailure")
        return refusal if refusal.get("status") == "True" else {}


def existing_revisions(world: PoolWorld) -> tuple[ExistingRevision, ...]:
    """The existing revisions, of both sides, oldest first; pods that are being deleted do not count."""
    by_revision: dict[str, list[dict[str, Any]]] = {}
    for observed in world.pods:
        pod = observed.object
        if not facts.is_leaving(pod):
            by_revision.setdefault(label(pod, names.REVISION), []).append(pod)
    found = []
    for child in world.children:
        if child.ref.kind in ("Deployment", "LeaderWorkerSet"):
            obj = child.object
            if is_ours(obj["metadata"], world.pool.metadata.uid):
                # The name cannot be changed; labels and annotations are repaired from it.
                revision = child.ref.name.removeprefix(f"{world.pool.name}-")
                mine = by_revision.get(revision, ())
                grouped = child.ref.kind == "LeaderWorkerSet"
                workers = tuple(pod for pod in mine if grouped and facts.is_worker(pod))
                found.append(
                    ExistingRevision(revision, child, obj, tuple(p for p in mine if p not in workers), workers)
                )
    return tuple(sorted(found, key=lambda one: (created(one.object), one.name)))


@dataclass(frozen=True, slots=True)
class TargetRevision:
    """The revision that the pool should have: an existing one, or one to be made."""

    name: str
    existing: ExistingRevision | None


def target_revision(pool: InferencePool, there: Iterable[ExistingRevision], *, prefill: bool = False) -> TargetRevision:
    """Return the revision for the pool's spec: of the pods that answer, or of those that only compute prompts. An
    existing one keeps its pods, whichever release of the operator made them."""
    wanted = inputs(pool) + names.PREFILL * prefill
    return TargetRevision(wanted, next((one for one in there if one.name == wanted), None))


def routable(picker: PickerView | None, pool: str) -> frozenset[str] | None:
    """Names of the pods that the picker would choose; None without an answer, or if it does not know the pool yet."""
    if picker is None or not picker.synced or pool not in picker.pools:
        return None
    return frozenset(e.name for e in picker.pools[pool] if e.ready and not e.draining)


def outdated(olds: Sequence[ExistingRevision]) -> tuple[ExistingRevision, ...]:
    """Those of one side's old revisions that may be deleted: without pods, and older than the history that stays."""
    empty = [one for one in olds if one.is_empty]
    return tuple(empty[: max(0, len(empty) - KEPT_HISTORY)])
