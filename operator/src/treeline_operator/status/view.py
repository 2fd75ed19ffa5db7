"""What a pool's status is judged by: its pods sorted by state, its revisions, and why pods are not ready."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from treeline_wire import labels

from treeline_operator import names
from treeline_operator.plan import facts, runtime
from treeline_operator.plan import revision as revisions
from treeline_operator.plan.facts import is_observed, label
from treeline_operator.plan.gateway import protections_record
from treeline_operator.plan.shared_gateway import SharedGateway, share
from treeline_operator.status.causes import Cause, Progress, diagnose
from treeline_operator.world import PoolRouting, PoolWorld


@dataclass(frozen=True)
class PoolView:
    """A decoded world, with pods sorted by state: those that answer, or with `prefill` those that compute prompts."""

    world: PoolWorld
    progress: Progress
    refused: Cause | None
    prefill: bool = False

    @cached_property
    def prompts(self) -> PoolView | None:
        """The view of the pods that compute prompts, where the pool asks for them."""
        return None if self.world.pool.spec.prefill is None else replace(self, prefill=True)

    @cached_property
    def shared(self) -> SharedGateway:
        pool, members = self.world.pool, self.world.gateway.pools
        there = next((member for member in members if member.name == pool.name), None)
        if there is None or (there.deleting, there.spec) != (pool.deleting, pool.spec):
            members = (*(member for member in members if member is not there), pool)
        return share(members, protections_record(self.world.gateway))[pool.spec.gateway.name]

    @cached_property
    def existing(self) -> tuple[revisions.ExistingRevision, ...]:
        found = revisions.existing_revisions(self.world)
        return tuple(one for one in found if names.is_prefill(one.name) == self.prefill)

    @cached_property
    def target(self) -> revisions.TargetRevision:
        return revisions.target_revision(self.world.pool, self.existing, prefill=self.prefill)

    @cached_property
    def live(self) -> list[dict[str, Any]]:
        """All pods that serve and are not being deleted."""
        return [pod for pod in self.leaders if not facts.is_leaving(pod)]

    @cached_property
    def leaders(self) -> list[dict[str, Any]]:
        """All pods that serve, one a replica."""
        single = {one.name for one in self.existing if one.nodes == 1}
        return [pod for pod in self.pods if label(pod, names.REVISION) in single or not facts.is_worker(pod)]

    @cached_property
    def pods(self) -> list[dict[str, Any]]:
        """All pods, also the workers of groups."""
        pods = (pod.object for pod in self.world.pods)
        mine = (pod for pod in pods if names.is_prefill(label(pod, names.REVISION)) == self.prefill)
        return sorted(mine, key=lambda pod: str(pod["metadata"]["name"]))

    @cached_property
    def active(self) -> list[dict[str, Any]]:
        """Live pods that do not drain."""
        return [pod for pod in self.live if label(pod, labels.SERVING) == "true"]

    @cached_property
    def current(self) -> list[dict[str, Any]]:
        """The pods of the current revision."""
        return [pod for pod in self.active if label(pod, names.REVISION) == self.target.name]

    @cached_property
    def ready(self) -> list[dict[str, Any]]:
        return [pod for pod in self.current if facts.is_ready(pod)]

    @cached_property
    def old(self) -> list[dict[str, Any]]:
        return [pod for pod in self.active if label(pod, names.REVISION) != self.target.name]

    @cached_property
    def old_ready(self) -> int:
        return sum(facts.is_ready(pod) for pod in self.old)

    @cached_property
    def serving(self) -> list[dict[str, Any]]:
        """Pods of any revision that serve the model now: ready, and in the picker's list."""
        name = self.world.pool.spec.model.served_name
        picker = self.world.picker
        # A picker that has read the cluster and does not know the pool chooses no pod of it.
        knows_others = picker is not None and picker.synced and self.world.pool.name not in picker.pools
        listed = frozenset() if knows_others else revisions.routable(picker, self.world.pool.name)
        of_name = {one.name for one in self.existing if runtime.names_model(one.object, name)}
        able = {self.target.name, *of_name}
        return [
            pod
            for pod in self.active
            if facts.is_ready(pod)
            and label(pod, names.REVISION) in able
            and (listed is None or pod["metadata"]["name"] in listed)
        ]

    @cached_property
    def draining(self) -> list[dict[str, Any]]:
        """Pods that finish their requests: taken out of rotation, or asked to end."""
        ending = [pod for pod in self.leaders if "deletionTimestamp" in pod["metadata"]]
        return [*ending, *(pod for pod in self.live if label(pod, labels.SERVING) != "true")]

    @property
    def routing(self) -> PoolRouting | None:
        """The picker's routing of the pool; None if unknown."""
        picker = self.world.picker
        return None if picker is None else picker.routing.get(self.world.pool.name)

    @property
    def desired(self) -> int:
        pool = self.world.pool
        return pool.prefill_replicas if self.prefill else pool.spec.replicas

    @cached_property
    def observed(self) -> bool:
        """Whether the current revision's Deployment exists and its controller has processed it."""
        there = self.target.existing
        return there is not None and is_observed(there.object)

    @cached_property
    def causes(self) -> list[Cause]:
        """Why the current revision's pods are not all ready."""
        there = self.target.existing
        if there is None:
            return diagnose(self.current, (), self.world.events, self.progress)
        mine = (pod for pod in self.pods if label(pod, names.REVISION) == self.target.name)
        ended = [pod for pod in mine if there.nodes > 1 and facts.is_leaving(pod)]
        return diagnose((*self.current, *there.workers, *ended), (there.object,), self.world.events, self.progress)
