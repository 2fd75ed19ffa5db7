"""The plan of a pool: what its children should be, which of them differ, and in which order that is mended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any, Final

from treeline_wire import labels

from treeline_operator import names
from treeline_operator.actions import Action, Apply, Delete, Plan, Scale
from treeline_operator.api.engine import Accelerator
from treeline_operator.api.gateway import ParentRef
from treeline_operator.api.parts import pods_of
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan import download, facts, live_adapters, provision
from treeline_operator.plan.diff import applying, differences, prune
from treeline_operator.plan.download import files
from treeline_operator.plan.drain import DrainPolicy, DrainStep, drain_step, least_replicas
from treeline_operator.plan.facts import annotation, find
from treeline_operator.plan.gateway import context_of, shared
from treeline_operator.plan.gateway_common import (
    STUCK_S,
    admin_key,
    hands_admin_key,
    has_keys,
    keys_again,
    longest_wait,
    misses_admin_key,
)
from treeline_operator.plan.model_names import names_of
from treeline_operator.plan.network import download_policy, pods_policy, scraped_port
from treeline_operator.plan.objects import (
    LEADER_WORKER_SET,
    POD_MONITOR,
    disruption_budget,
    manifest,
    pod_monitor,
    service_port,
)
from treeline_operator.plan.revision import (
    UNSEEN_S,
    ExistingRevision,
    TargetRevision,
    existing_revisions,
    outdated,
    routable,
    target_revision,
)
from treeline_operator.plan.rollout import Revision, RolloutPolicy, RolloutStep
from treeline_operator.plan.routes import ROUTE, UPSTREAM, http_route, upstream_pool
from treeline_operator.plan.runtime import (
    accelerator_of,
    images_of,
    needs_admin_key,
    needs_keys,
    selector,
    template_problem,
    workload,
)
from treeline_operator.plan.sides import SideNumbers, next_steps
from treeline_operator.world import Observed, PoolWorld, Ref

_REPLICAS: Final = "spec.replicas"
_PICKER_RECHECK_S: Final = 5.0


def plan_pool(world: PoolWorld) -> Plan:
    """The remaining writes for a pool, with reasons. None while it is being deleted: its children are deleted with
    it."""
    if world.pool.deleting:
        return Plan(notes=("the pool is being deleted; its children are garbage-collected",))
    return _Planner(world).plan()


@dataclass(frozen=True, slots=True)
class _Side:
    """The revisions whose pods answer, or those whose pods compute prompts, oldest first, with the replicas to come.
    `target` is None where no more pods are wanted."""

    there: tuple[ExistingRevision, ...]
    desired: int
    target: TargetRevision | None
    step: RolloutStep = field(default_factory=lambda: RolloutStep({}))

    @property
    def olds(self) -> list[ExistingRevision]:
        """The revisions that the target replaces."""
        return [one for one in self.there if self.target is None or one.name != self.target.name]


@dataclass(slots=True)
class _Planner:
    """One run over one world; it only gathers."""

    world: PoolWorld
    notes: list[str] = field(default_factory=list)
    wanted: list[Ref] = field(default_factory=list)
    recheck_s: float | None = None

    def plan(self) -> Plan:
        pool = self.pool
        there = existing_revisions(self.world)
        target = target_revision(pool, there)
        problem = template_problem(pool) or lacking_groups(self.world) or self._missing_keys(target)
        if problem:
            self.notes.append(f"{problem}; the pods stay as they are")
        sides = self._sides(there, still=bool(problem))
        made = target.existing
        if made is not None and made.nodes > 1 and not facts.is_observed(made.object):
            self._look_again(UNSEEN_S)
        first = [
            *self._keys(),
            *self._admin_key(there, target),
            *self._network(there, any(map(self._wants_download, sides))),
            *self._claims(),
            *self._commits(),
        ]
        pods = [*self._services(), *(action for side in sides for action in self._revisions(side))]
        return Plan(
            (*first, *pods, *self._routes(there), *self._deletes(sides)),
            recheck_s=self.recheck_s,
            notes=tuple(self.notes),
        )

    @property
    def pool(self) -> InferencePool:
        return self.world.pool

    def _missing_keys(self, target: TargetRevision) -> str:
        """Return why the target's Deployment is not made yet: pods would fail without the Secret that they mount. When
        the gateway's plan has made it, the pools are planned again."""
        if target.existing is not None or not needs_keys(self.pool) or has_keys(self.world.gateway):
            return ""
        return f"revision {target.name} waits until gateway {self.world.gateway.name} has made its keys"

    def _keys(self) -> Iterator[Action]:
        """Make the key pair again if pods wait for volumes: only they show that the Secret was deleted."""
        waited = longest_wait(self.world.pods, self.world.now)
        if waited is None or not needs_keys(self.pool) or not has_keys(self.world.gateway):
            return
        context = context_of(self.world.gateway)
        if context is None:
            return
        self._look_again(STUCK_S)
        if waited >= STUCK_S:
            yield keys_again(context)

    def _admin_key(self, there: tuple[ExistingRevision, ...], target: TargetRevision) -> Iterator[Action]:
        """Make the key before the first pod that uses it, and again for pods that do not find it."""
        name = self.pool.name
        if not needs_admin_key(self.pool):
            return
        made = target.existing is not None or any(hands_admin_key(one.object, name) for one in there)
        if not made or any(misses_admin_key(pod.object, name) for pod in self.world.pods):
            yield admin_key(name, self._meta(name))

    # ---- revisions ------------------------------------------------------------------------------------------

    def _sides(self, there: tuple[ExistingRevision, ...], *, still: bool) -> list[_Side]:
        """The side that answers, and the one that computes prompts if there is one or was; with their next numbers, or
        the present ones while the pods must stay `still`."""
        spec = self.pool.spec
        answer = tuple(one for one in there if not names.is_prefill(one.name))
        prompt = tuple(one for one in there if names.is_prefill(one.name))
        sides = [_Side(answer, spec.replicas, target_revision(self.pool, answer))]
        if spec.prefill is not None or prompt:
            target = target_revision(self.pool, prompt, prefill=True) if spec.prefill is not None else None
            sides.append(_Side(prompt, self.pool.prefill_replicas, target))
        if still:
            steps = tuple(RolloutStep({one.name: one.replicas for one in side.there}) for side in sides)
        else:
            steps = self._steps(sides)
        return [replace(side, step=step) for side, step in zip(sides, steps, strict=True)]

    def _steps(self, sides: Sequence[_Side]) -> tuple[RolloutStep, ...]:
        rolls = any(side.olds for side in sides)
        numbers = [
            SideNumbers(
                side.desired,
                self._policy(side.desired),
                None if side.target is None else self._measured(side.target, side.olds, rolls=rolls),
                [one.measured(None, self.world.now) for one in side.olds],
            )
            for side in sides
        ]
        steps = next_steps(*numbers)
        for step in steps:
            if step.waiting:
                self.notes.append(("InsufficientCapacity: " if step.insufficient_capacity else "") + step.waiting)
            if step.recheck_s is not None:
                self._look_again(step.recheck_s)
        return steps

    def _policy(self, replicas: int) -> RolloutPolicy:
        rollout = self.pool.spec.rollout
        return RolloutPolicy(
            rollout.strategy,
            pods_of(rollout.max_surge, replicas, up=True),
            pods_of(rollout.max_unavailable, replicas, up=False),
            rollout.paused,
            float(rollout.surge_timeout_seconds),
        )

    def _measured(self, target: TargetRevision, olds: Sequence[ExistingRevision], *, rolls: bool) -> Revision:
        """The target's numbers. While it replaces another revision, only pods that the picker would choose count as
        ready."""
        if target.existing is None:
            return Revision(target.name, 0)
        seen = target.existing.measured(None, self.world.now, olds)
        if not rolls:
            return seen
        listed = routable(self.world.picker, self.pool.name)
        chosen = target.existing.measured(listed, self.world.now, olds)
        if chosen.ready < seen.ready:
            self._look_again(_PICKER_RECHECK_S)
            self.notes.append(f"the picker lists {chosen.ready} of {seen.ready} ready pods of revision {target.name}")
        return chosen

    def _revisions(self, side: _Side) -> Iterator[Action]:
        draining = DrainPolicy.of(self.world)
        others = 0
        olds: list[Action] = []
        self.wanted.extend(one.observed.ref for one in side.there)
        for one in side.olds:
            why = f"revision {side.target.name} replaces it" if side.target is not None else "no pods are wanted"
            why = why if self.pool.spec.replicas else "the pool is scaled to 0"
            out = self._out(one, side.step.replicas.get(one.name, 0), draining, why)
            others += out.replicas
            scale = Scale(one.observed.ref, one.observed.uid, out.replicas, why)
            olds += _around(out, one, (scale,) if one.replicas != out.replicas else ())
        if side.target is not None and side.target.name in side.step.replicas:
            yield from self._aimed_at(side.target, side, others, draining)
        yield from olds

    def _aimed_at(self, target: TargetRevision, side: _Side, others: int, draining: DrainPolicy) -> Iterator[Action]:
        there = target.existing
        if there is None:
            yield from self._target(target, side.step.beside(Revision(target.name, 0), others), side.desired)
            return
        wanted = side.step.beside(there.measured(None, self.world.now), others)
        # In a rollout, other revisions serve meanwhile, and more replicas here would take their room.
        least = wanted if others else min(least_replicas(there.pods, wanted), max(wanted, there.replicas))
        if least > wanted:
            self.notes.append(
                f"{least} groups stay, not {wanted}: LeaderWorkerSet would end ready ones before broken ones"
            )
        asked = f"{side.desired} replicas wanted"
        out = self._out(there, least, draining, asked if wanted == side.desired else "older pods take its place")
        yield from _around(out, there, self._target(target, out.replicas, side.desired))

    def _out(self, one: ExistingRevision, wanted: int, draining: DrainPolicy, why: str) -> DrainStep:
        """The leaving pods of a revision leave rotation first, and drain."""
        out = drain_step(one.pods, wanted, one.replicas, draining, why)
        if out.recheck_s is not None:
            self._look_again(out.recheck_s)
        self.notes.extend(out.notes)
        return out

    def _look_again(self, after_s: float) -> None:
        self.recheck_s = after_s if self.recheck_s is None else min(after_s, self.recheck_s)

    def _target(self, target: TargetRevision, replicas: int, desired: int) -> Iterator[Action]:
        pool, images = self.pool, self.world.platform.images
        meta = self._meta(names.deployment(pool.name, target.name))
        if target.existing is None:
            made = workload(pool, target, replicas, meta, images)
            self.wanted.append(Ref.of(made))
            why = f"revision {target.name} of the spec{_devices(accelerator_of(pool, target.name))}"
            write = self._write(made, why, ignore_paths=(_REPLICAS,))
            if write is not None:
                yield write
            return
        there = target.existing
        repair = self._repair(target, replicas, meta)
        if repair is not None:
            yield repair
        elif there.replicas != replicas:
            step = f"{there.replicas} → {replicas} of {desired} in a rollout"
            why = f"{desired} replicas wanted" if replicas == desired else step
            yield Scale(there.observed.ref, there.observed.uid, replicas, why)

    def _repair(self, target: TargetRevision, replicas: int, meta: dict[str, Any]) -> Apply | None:
        """The write that undoes manual changes to a revision. A template that we would make differently today is left
        alone, because an edit would replace the pods."""
        assert target.existing is not None
        there, ours = target.existing.observed, self.world.platform.images
        for images in (ours, images_of(target.existing, ours)):
            desired = workload(self.pool, target, replicas, meta, images)
            write = applying(desired, there, f"revision {target.name}", ignore_paths=(_REPLICAS,))
            if write is None or write.drift:
                return write
        if not annotation(there.object, names.APPLIED):  # somebody removed that too
            differing = differences(desired, there.object)
            if not any(path.startswith(("spec.template", "spec.leaderWorkerTemplate")) for path in differing):
                return write
        self.notes.append(f"revision {target.name} would be made differently now; it stays unchanged")
        return None

    # ---- the other children ---------------------------------------------------------------------------------

    def _wants_download(self, side: _Side) -> bool:
        """Whether a pod, present or about to be made, has to download."""
        pods = {one.name: (*one.pods, *one.workers) for one in side.there}
        nodes = {one.name: one.nodes for one in side.there}
        fetching = {one.name: one.downloads for one in side.there}
        if (target := side.target) is not None:
            nodes[target.name] = self.pool.spec.accelerator.nodes
            fetching[target.name] = fetching.get(target.name, False) or bool(files(self.pool).fetches)
        return any(
            fetching[name]
            and sum(facts.downloaded(pod) is not None for pod in pods.get(name, ())) < replicas * nodes[name]
            for name, replicas in side.step.replicas.items()
        )

    def _network(self, there: tuple[ExistingRevision, ...], downloading: bool) -> Iterator[Action]:
        meta = self._meta(f"{self.pool.name}-pods")
        spec = self.pool.spec
        groups = spec.accelerator.nodes > 1 or any(one.nodes > 1 and not one.is_empty for one in there)
        apart = (spec.prefill is not None and not spec.engine.host_cache) or any(
            one.role == "prefill" and not one.is_empty and not one.page_ports for one in there
        )
        pages = max(spec.engine.data_parallel * bool(spec.engine.host_cache), *(one.page_ports for one in there), 0)
        meet = None if groups or apart else pages
        policy = pods_policy(self.pool, self._parents(), self.world.platform, meta, meet=meet)
        yield from self._apply(policy, "access to the pods")
        if downloading or live_adapters.downloads(self.pool, self.world.gateway.models):
            policy = download_policy(self.pool, self._meta(f"{self.pool.name}-download"))
            yield from self._apply(policy, "a pod must download the model" if downloading else "pods download adapters")

    def _claims(self) -> Iterator[Action]:
        for asked in provision.wanted(self.pool):
            there = find(self.world.children, "PersistentVolumeClaim", asked.name)
            trouble = provision.unshareable(self.pool, asked, there)
            self.notes.extend([*([trouble] if trouble else []), *provision.kept(asked, there)])
            yield from self._apply(provision.claim(asked, there, self._meta(asked.name)), f"keeps {asked.keeps}")

    def _commits(self) -> Iterator[Action]:
        if found := download.recorded(self.world):
            record = download.record(found, self._meta(names.commits(self.pool.name)))
            yield from self._apply(record, "the commit for all pods")

    def _services(self) -> Iterator[Action]:
        pool, match = self.pool, selector(self.pool.name)
        service = {
            "clusterIP": "None",
            "selector": {**match, labels.SERVING: "true"},
            "ports": [service_port("http", pool.spec.engine.port, "http")],
        }
        meta = self._meta(f"{pool.name}-pods")
        yield from self._apply(manifest("v1", "Service", meta, spec=service), "identity of the pods")
        allowed = pool.spec.disruption_budget.max_unavailable
        if pool.spec.accelerator.nodes > 1:
            # Each evicted pod takes its group with it, so a share of the pods would be too many.
            allowed = max(1, pods_of(allowed, pool.spec.replicas, up=True))
        budget = disruption_budget(self._meta(pool.name), match, allowed)
        yield from self._apply(budget, "how many pods may be evicted at once")
        if POD_MONITOR not in self.world.platform.apis:
            self._leave(POD_MONITOR)
        elif scraped := scraped_port(pool, self.world.platform):
            monitor = pod_monitor(self._meta(pool.name), match, scraped[0], self.world.platform, ours=False)
            yield from self._apply(monitor, "metrics of the pods")

    def _routes(self, there: tuple[ExistingRevision, ...]) -> Iterator[Action]:
        parents, owner = self._parents(), self._owner()
        if not parents:
            return
        if missing := [text for api in (ROUTE, UPSTREAM) if (text := self.world.platform.lacking(api))]:
            self.notes.extend(missing)
            self._leave(ROUTE, UPSTREAM)
            return
        pool, gateway = self.pool, shared(self.world.gateway)
        failure_mode = gateway.failure_mode if gateway is not None else owner.spec.endpoint_picker.failure_mode
        # Pods from before `spec.prefill` are left out once they are gone.
        apart = pool.spec.prefill is not None and not any(one.role == "both" and not one.is_empty for one in there)
        meta = self._meta(names.upstream_pool(pool.name))
        mirror = upstream_pool(pool, failure_mode, meta, role="decode" if apart else "")
        yield from self._apply(mirror, "the pool for Gateways")
        hostnames = pool.spec.gateway.hostnames or owner.spec.gateway.hostnames
        by_model = owner.name != pool.name
        if by_model and (winner := self._route_of_another(parents, hostnames)):
            self.notes.append(f"requests for {pool.spec.model.served_name} are pool {winner}'s: no HTTPRoute is made")
            return
        route = http_route(pool, parents, hostnames, self._meta(pool.name), by_model=by_model)
        yield from self._apply(route, "from the Gateways to the pool")

    def _route_of_another(self, parents: Sequence[ParentRef], hostnames: Sequence[str]) -> str:
        """The pool with our model's name at the same host of a Gateway; empty if none. A route that matches the name
        would precede the route of the oldest pool, which matches every name."""
        world, gateway = self.world.gateway, self._owner().spec.gateway
        own = self.pool.spec.gateway.name, self.pool.spec.model.served_name
        holder = names_of(world.models, world.pools).holders.get(own)
        other = next((pool for pool in world.pools if holder is not None and pool.name == holder.pool), self.pool)
        if other.name == self.pool.name:
            return ""
        hosts = other.spec.gateway.hostnames or gateway.hostnames
        attached = {(ref.namespace, ref.name) for ref in other.spec.gateway.parent_refs or gateway.parent_refs}
        meets = not hosts or not hostnames or any(fnmatch(a, b) or fnmatch(b, a) for a in hosts for b in hostnames)
        return other.name if meets and attached & {(ref.namespace, ref.name) for ref in parents} else ""

    def _deletes(self, sides: Sequence[_Side]) -> Iterator[Delete]:
        old = [one for side in sides for one in outdated(side.olds)]
        gone = {one.observed.ref for one in old}
        for one in old:
            yield Delete(one.observed.ref, one.observed.uid, "an old revision without pods")
        if self.world.platform.lacking(LEADER_WORKER_SET):
            self._leave(LEADER_WORKER_SET)
        yield from prune(self.world.children, self.wanted, self.pool.metadata.uid, kept=gone)

    # ---- helpers --------------------------------------------------------------------------------------------

    def _owner(self) -> InferencePool:
        """The pool whose gateway settings apply: the oldest (the pools of a gateway are sorted)."""
        return next((pool for pool in self.world.gateway.pools if not pool.deleting), self.pool)

    def _parents(self) -> Sequence[ParentRef]:
        """The Gateways that the pool attaches to; none where the gateway is an Envoy of our own."""
        owners = self._owner().spec.gateway.parent_refs
        return (self.pool.spec.gateway.parent_refs or owners) if owners else ()

    def _meta(self, name: str) -> dict[str, Any]:
        pool = self.pool
        own = {
            names.MANAGED_BY: names.MANAGER,
            names.GATEWAY: pool.spec.gateway.name,
            labels.POOL: pool.name,
            names.COMPONENT: "runtime",
        }
        return {
            "name": name,
            "namespace": pool.namespace,
            "labels": own,
            "ownerReferences": [pool.owner_reference(controller=True)],
        }

    def _apply(self, desired: dict[str, Any], why: str) -> Iterator[Apply]:
        self.wanted.append(Ref.of(desired))
        write = self._write(desired, why)
        if write is not None:
            yield write

    def _leave(self, *kinds: str) -> None:
        """Keep objects of kinds that cannot be read now, which may be temporary."""
        found = (child.ref for child in self.world.children)
        self.wanted.extend(ref for ref in found if f"{ref.api_version}/{ref.kind}" in kinds)

    def _write(self, desired: dict[str, Any], why: str, ignore_paths: tuple[str, ...] = ()) -> Apply | None:
        ref = Ref.of(desired)
        there = find(self.world.children, ref.kind, ref.name, ref.api_version.rpartition("/")[0])
        other = _other_controller(there, self.pool.metadata.uid)
        if other:
            self.notes.append(f"{ref.kind} {ref.name} belongs to {other}; it is left alone")
            return None
        if there is not None and there.object["metadata"].get("deletionTimestamp"):
            self.notes.append(f"{ref.kind} {ref.name} is being deleted; it is created again afterwards")
            return None
        return applying(desired, there, why, ignore_paths=ignore_paths)


def _around(out: DrainStep, there: ExistingRevision, writes: Iterable[Action]) -> Iterator[Action]:
    """The marks of pods before the number that takes some of them away; after one that lets more of them stay."""
    if out.replicas > there.replicas:
        yield from writes
        yield from out.marks
    else:
        yield from out.marks
        yield from writes


def _devices(accelerator: Accelerator) -> str:
    """How many GPUs a replica takes; empty on CPUs."""
    gpus, pods = accelerator.count * accelerator.nodes, accelerator.nodes
    on = f" in {pods} pods" if pods > 1 else ""
    return f", {gpus} GPU{'s' * (gpus > 1)}{on} per replica" if accelerator.is_gpu else ""


def lacking_groups(world: PoolWorld) -> str:
    """Why the cluster cannot start a replica of several pods; empty if it can, or if the pool's are single ones."""
    return world.platform.lacking(LEADER_WORKER_SET) if world.pool.spec.accelerator.nodes > 1 else ""


def _other_controller(there: Observed | None, uid: str) -> str:
    if there is None:
        return ""
    for owner in there.object["metadata"].get("ownerReferences", ()):
        if owner.get("controller") and owner["uid"] != uid:
            return f"{owner['kind']} {owner['name']} ({owner['uid']})"
    return ""
