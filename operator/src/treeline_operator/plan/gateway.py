"""The plan of a gateway: the objects that its pools share, from its anchor to the URL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from treeline_operator import names
from treeline_operator.actions import Action, CreateKeys, Delete, Plan, Scale
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan import edge, epp
from treeline_operator.plan.diff import applying, prune
from treeline_operator.plan.facts import annotation, find, is_observed, label
from treeline_operator.plan.gateway_common import (
    IMAGE,
    STUCK_S,
    Component,
    GatewayContext,
    disruption_budget,
    has_keys,
    keys,
    keys_again,
    longest_wait,
    service_account,
)
from treeline_operator.plan.merge import TemplateInvalid
from treeline_operator.plan.network import gateway_policies
from treeline_operator.plan.objects import POD_MONITOR, manifest, pod_monitor
from treeline_operator.plan.shared_gateway import SharedGateway, share, written
from treeline_operator.world import GatewayWorld, Observed, Ref

_GOING_S: Final = 2.0
_PROTECTIONS: Final = "protections"
_REPLICAS: Final = "spec.replicas"


def shared(world: GatewayWorld) -> SharedGateway | None:
    """The pools of the gateway and whose settings apply; None if no pool names it."""
    return share(world.pools, protections_record(world)).get(world.name)


def protections_record(world: GatewayWorld) -> str:
    """The protections recorded in the anchor."""
    observed = _anchor(world)
    record: str = (observed.object.get("data") or {}).get(_PROTECTIONS, "") if observed is not None else ""
    return record


def context_of(world: GatewayWorld) -> GatewayContext | None:
    """The inputs of the gateway's objects; None before its anchor exists."""
    found, observed = shared(world), _anchor(world)
    if found is None or observed is None:
        return None
    return GatewayContext.of(world, found, observed.uid)


def _anchor(world: GatewayWorld) -> Observed | None:
    return find(world.children, "ConfigMap", names.anchor(world.name))


def gateway_url(world: GatewayWorld, pool: InferencePool | None = None) -> str | None:
    """The URL of the gateway for clients: the load balancer's address if it has one, else the Service's name.

    With Gateway API it is the first host name of `pool`, else of the first pool with one, and None without any, since
    the Gateway's address is unknown.
    """
    found = shared(world)
    if found is None:
        return None
    if found.mode == "gateway-api":
        return _route_url((pool,) if pool is not None else found.members)
    settings = found.edge
    scheme, usual = ("https", 443) if settings.tls else ("http", 80)
    service = find(world.children, "Service", names.url_service(world.name))
    host = f"{names.url_service(world.name)}.{world.namespace}.svc"
    if settings.service_type == "LoadBalancer" and service is not None:
        host = _balancer_host(service) or host
    return f"{scheme}://{host}" if settings.port == usual else f"{scheme}://{host}:{settings.port}"


def _route_url(pools: Sequence[InferencePool]) -> str | None:
    for pool in pools:
        gateway = pool.spec.gateway
        for host in gateway.hostnames:
            if not host.startswith("*"):
                secure = any(
                    parent.port == 443 or "https" in (parent.section_name or "") for parent in gateway.parent_refs
                )
                return f"{'https' if secure else 'http'}://{host}"
    return None


def _balancer_host(service: Observed) -> str | None:
    balancer = service.object.get("status", {}).get("loadBalancer", {})
    for address in balancer.get("ingress") or ():
        host: str = address.get("hostname") or address.get("ip") or ""
        if host:
            return f"[{host}]" if ":" in host else host
    return None


def plan_gateway(world: GatewayWorld) -> Plan:
    """The writes that bring a gateway to what its pools ask for.

    The anchor comes first, since it owns everything else and its uid must be known. When the last pool is deleted,
    Kubernetes deletes the anchor and the rest; when the last pool moves to another gateway, the plan deletes the
    anchor.
    """
    found = shared(world)
    observed = _anchor(world)
    if found is None:
        return _abandoned(world, observed)
    if found.leaving:
        return Plan(notes=("every pool is being deleted; the gateway is deleted with the last one",))
    first = applying(anchor(world, found), observed, f"pools of gateway {world.name}: {_listed(found)}")
    if observed is None:
        return Plan((first,) if first else ())
    if _is_going(observed):
        return Plan(recheck_s=_GOING_S, notes=("the anchor is being deleted; it is created again afterwards",))
    if left := [child.ref.name for child in world.children if _is_left_over(child, observed)]:
        text = f"{', '.join(sorted(set(left)))} are of a former gateway of this name, and made anew when they are gone"
        return Plan((first,) if first else (), recheck_s=_GOING_S, notes=(text,))
    planning = _Planning(world, GatewayContext.of(world, found, observed.uid))
    planning.everything()
    actions = (*([first] if first else ()), *planning.actions, *planning.prunes())
    return Plan(actions, planning.recheck_s, tuple(planning.notes))


def _abandoned(world: GatewayWorld, observed: Observed | None) -> Plan:
    if world.unreadable:
        held = ", ".join(sorted(pool.ref.name for pool in world.unreadable))
        return Plan(notes=(f"pool {held} cannot be read; the gateway stays as it is",))
    if observed is None or _is_going(observed):
        return Plan()
    why = f"no pool names gateway {world.name} any more; all its objects are deleted with it"
    return Plan((Delete(observed.ref, observed.uid, why),))


def _is_going(observed: Observed) -> bool:
    return "deletionTimestamp" in observed.object["metadata"]


def _is_left_over(child: Observed, anchor: Observed) -> bool:
    """Whether the child belongs to a deleted anchor: it is deleted too, even if another anchor of that name exists.
    Adopting it would separate it from the keys, which are never read."""
    former = {"kind": anchor.ref.kind, "name": anchor.ref.name, "controller": True}.items()
    owners = child.object["metadata"].get("ownerReferences") or ()
    return any(former <= owner.items() and owner["uid"] != anchor.uid for owner in owners)


def anchor(world: GatewayWorld, found: SharedGateway) -> dict[str, Any]:
    """The ConfigMap that everything else belongs to, and that belongs to all pools: it goes with the last of them,
    whether an operator runs or not."""
    meta = {
        "name": names.anchor(world.name),
        "namespace": world.namespace,
        "labels": {names.MANAGED_BY: names.MANAGER, names.GATEWAY: world.name},
        "ownerReferences": [
            *(pool.owner_reference(controller=False) for pool in found.members),
            *(_reference(pool) for pool in sorted(world.unreadable, key=lambda pool: pool.ref.name)),
        ],
    }
    data = {
        "owner": found.owner.name,
        "pools": "".join(f"{pool.name}\n" for pool in found.members),
        _PROTECTIONS: written(found.protections),
    }
    return manifest("v1", "ConfigMap", meta, data=data)


def _reference(pool: Observed) -> dict[str, Any]:
    ref = pool.ref
    return {"apiVersion": ref.api_version, "kind": ref.kind, "name": ref.name, "uid": pool.uid}


def _listed(found: SharedGateway) -> str:
    return ", ".join(pool.name for pool in found.members)


class _Planning:
    """One pass: collects the actions, and what must not be pruned."""

    def __init__(self, world: GatewayWorld, context: GatewayContext) -> None:
        self.actions: list[Action] = []
        self.notes: list[str] = []
        self.recheck_s: float | None = None
        self._world = world
        self._context = context
        self._wanted = [Ref("v1", "ConfigMap", world.namespace, names.anchor(world.name))]

    def everything(self) -> None:
        """The objects in the order in which they are needed: policies, identities, keys, picker, Envoy."""
        context = self._context
        for policy in gateway_policies(context):
            self._apply(policy, "only the paths that are needed")
        for thing in epp.identity(context):
            self._apply(thing, "rights of the picker")
        self._keys()
        self._apply(epp.service(context), "the picker's address")
        self._apply(epp.peers_service(context), "addresses of the pickers")
        self._picker()
        self._monitor("epp", "metrics")
        if context.shared.mode == "standalone":
            self._apply(service_account(context, "edge"), "an identity without rights for Envoy")
            self._apply(edge.service(context), "the URL")
            self._envoy()
            self._monitor("edge", "health")
        for pool, conflicts in sorted(context.shared.conflicts.items()):
            self.notes += [f"pool {pool}: {conflict}" for conflict in conflicts]

    def prunes(self) -> tuple[Action, ...]:
        """Objects of an earlier plan that this one does not need."""
        return prune(self._world.children, self._wanted, self._context.owner_uid)

    def _apply(self, desired: dict[str, Any], why: str, ignore_paths: tuple[str, ...] = ()) -> bool:
        """Whether the object must be written."""
        ref = Ref.of(desired)
        self._wanted.append(ref)
        action = applying(desired, find(self._world.children, ref.kind, ref.name), why, ignore_paths=ignore_paths)
        if action is not None:
            self.actions.append(action)
        return action is not None

    def _keys(self) -> None:
        """The key pair must be there before the first pod that mounts it; there is no way to ask whether it is."""
        if not has_keys(self._world):
            self.actions.append(CreateKeys(keys(self._context), "keys for the runtimes' KV sockets"))
            return
        selector = self._context.pods("epp").items()
        pickers = (pod for pod in self._world.pods if selector <= pod.object["metadata"].get("labels", {}).items())
        waited = longest_wait(pickers, self._world.now)
        if waited is None:
            return
        self.recheck_s = STUCK_S
        if waited >= STUCK_S:
            self.actions.append(keys_again(self._context))

    def _picker(self) -> None:
        context = self._context
        image = context.shared.picker.image or context.platform.images.epp
        self._apply_pods(
            "epp", epp.inputs(context), image, lambda image: [(epp.workload(context, image), "the picker")]
        )
        self._apply(disruption_budget(context, "epp"), "evictions of pickers one at a time")

    def _monitor(self, component: Component, port: str) -> None:
        """Dashboards, alerts and autoscalers find the component's metrics in Prometheus."""
        context = self._context
        meta, match = context.meta_of(component), context.pods(component)
        monitor = pod_monitor(meta, match, port, context.platform, ours=True)
        if POD_MONITOR in context.platform.apis:
            self._apply(monitor, f"metrics of {component}")
        else:  # the kind may be away for a moment
            self._wanted.append(Ref.of(monitor))

    def _envoy(self) -> None:
        context = self._context
        image = context.shared.edge.image or context.platform.images.edge
        self._apply_pods("edge", edge.inputs(context), image, lambda image: _envoy_of(context, image))
        self._apply(disruption_budget(context, "edge"), "evictions of Envoys one at a time")
        self._keep_mounted(find(self._world.children, "Deployment", names.edge(context.gateway)))

    def _apply_pods(
        self, component: Component, inputs: str, image: str, make: Callable[[str], list[tuple[dict[str, Any], str]]]
    ) -> None:
        """Write a component's objects. `make` returns them for an image: what the pods mount, then the Deployment.

        While `inputs` equal those of the present Deployment, its pods keep their image and template, so that an
        operator upgrade rolls none of them. Manual changes are undone. An invalid template fragment leaves the pods
        unchanged.
        """
        name = self._context.name_of(component)
        there = find(self._world.children, "Deployment", name)
        same = there is not None and annotation(there.object, names.INPUTS) == inputs
        try:
            made = make((annotation(there.object, IMAGE) if there is not None and same else "") or image)
            if there is not None and same and self._is_made_otherwise(made[-1][0], there):
                if self._has_configuration(there):
                    self._keep(there, made[-1][0]["spec"]["replicas"])
                    return
                made = make(image)
        except TemplateInvalid as problem:
            self.notes.append(f"Deployment {name} stays as it is: {problem}")
            self._wanted.append(Ref("apps/v1", "Deployment", self._world.namespace, name))
            return
        *mounted, (workload, why) = made
        for obj, of_what in mounted:
            self._apply(obj, of_what)
        if not self._apply(workload, why, ignore_paths=(_REPLICAS,)) and there is not None:
            self._scale(there, workload["spec"]["replicas"])

    def _is_made_otherwise(self, desired: dict[str, Any], there: Observed) -> bool:
        """Whether our intent differs from our last write, including removed fields."""
        write = applying(desired, there, "", ignore_paths=(_REPLICAS,))
        return write is not None and not write.drift and bool(annotation(there.object, names.APPLIED))

    def _has_configuration(self, there: Observed) -> bool:
        """Whether the mounted configuration exists; another release's cannot be written."""
        mounted = _mounted(there)
        return not mounted or find(self._world.children, "ConfigMap", mounted) is not None

    def _keep(self, there: Observed, replicas: int) -> None:
        """Leave a Deployment as it is, but for the number of its pods."""
        self.notes.append(f"{there.ref.name} would be made differently now; its pods stay unchanged")
        self._wanted.append(there.ref)
        self._scale(there, replicas)

    def _scale(self, there: Observed, replicas: int) -> None:
        if there.object["spec"].get("replicas", 1) != replicas:
            self.actions.append(Scale(there.ref, there.uid, replicas, f"replicas of {there.ref.name}"))

    def _keep_mounted(self, deployment: Observed | None) -> None:
        """Configurations that pods may still start with stay until the rollout that ends them is over."""
        if deployment is None:
            return
        used = {label(pod.object, names.REVISION) for pod in self._world.pods}
        rolled_out = _is_rolled_out(deployment.object)
        for child in self._world.children:
            if child.ref.kind == "ConfigMap":
                revision = label(child.object, names.REVISION)
                if revision and (not rolled_out or revision in used or child.ref.name == _mounted(deployment)):
                    self._wanted.append(child.ref)


def _envoy_of(context: GatewayContext, image: str) -> list[tuple[dict[str, Any], str]]:
    config = edge.config_map(context)
    return [(config, "Envoy's configuration"), (edge.workload(context, image, config), "Envoy")]


def template_problem(world: GatewayWorld) -> str:
    """Errors in the fragments for pickers and Envoys, as far as they show without the API server."""
    context = context_of(world)
    if context is None:
        return ""
    try:
        if context.fragments("epp"):
            epp.workload(context, "")
        if context.shared.mode == "standalone" and context.fragments("edge"):
            _envoy_of(context, "")
    except TemplateInvalid as problem:
        return f"of gateway {world.name}, {problem}"
    return ""


def _mounted(deployment: Observed) -> str:
    """The name of the configuration that a Deployment's pods mount."""
    pod = deployment.object["spec"]["template"]["spec"]
    configs = (volume.get("configMap", {}).get("name", "") for volume in pod.get("volumes", ()))
    return next(filter(None, configs), "")


def _is_rolled_out(deployment: dict[str, Any]) -> bool:
    status, replicas = deployment.get("status", {}), deployment["spec"].get("replicas", 1)
    return bool(
        is_observed(deployment)
        and status.get("updatedReplicas", 0) == status.get("replicas", 0) == replicas
        and not status.get("unavailableReplicas")
    )
