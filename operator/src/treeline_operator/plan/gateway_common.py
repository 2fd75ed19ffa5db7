"""Common parts of the picker's and Envoy's objects: owner, labels, pod template, grace period, and when they roll."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from treeline_operator import names
from treeline_operator.actions import CreateKeys
from treeline_operator.api.parts import Resources
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan import objects
from treeline_operator.plan.canonical import canonical
from treeline_operator.plan.facts import condition_of, container_statuses, find, pod_template, since, state_of
from treeline_operator.plan.merge import laid_over, merged
from treeline_operator.plan.objects import Object, manifest
from treeline_operator.plan.shared_gateway import SharedGateway
from treeline_operator.world import GatewayWorld, Observed, Platform

Component = Literal["epp", "edge"]

IMAGE: Final = "treeline.dev/image"
"""The image that a Deployment's pods were given, so that a new default of the operator does not roll them."""
LINGER_S: Final = 5
"""Seconds for which a pod continues after it was asked to end, while the cluster learns of it."""
_STEP_S: Final = 60
_MARGIN_S: Final = 25
"""The part of the grace period after lingering and draining."""


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """The inputs of every object of a gateway."""

    namespace: str
    gateway: str
    pools: tuple[InferencePool, ...]
    shared: SharedGateway
    platform: Platform
    owner_uid: str
    """The anchor's."""

    @classmethod
    def of(cls, world: GatewayWorld, shared: SharedGateway, owner_uid: str) -> GatewayContext:
        return cls(world.namespace, world.name, world.pools, shared, world.platform, owner_uid)

    def labels(self, component: Component | None = None) -> dict[str, str]:
        """The labels of an object; with a component also the selector of its pods."""
        found = {names.MANAGED_BY: names.MANAGER, names.GATEWAY: self.gateway}
        return found | {names.COMPONENT: component} if component else found

    def pods(self, component: Component) -> dict[str, str]:
        """The label selector of a component's pods; it never changes, a Deployment's may not."""
        return {names.GATEWAY: self.gateway, names.COMPONENT: component}

    def meta(
        self, name: str, component: Component | None = None, annotations: Mapping[str, str] | None = None
    ) -> Object:
        """Metadata of an object that is deleted with the anchor. (It does not block the anchor's deletion, which would
        need a right on ConfigMaps' finalizers.)"""
        owner = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": names.anchor(self.gateway),
            "uid": self.owner_uid,
            "controller": True,
        }
        meta: Object = {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels(component),
            "ownerReferences": [owner],
        }
        return meta | {"annotations": dict(annotations)} if annotations else meta

    def name_of(self, component: Component) -> str:
        """The name that the objects of a component have."""
        return {"epp": names.epp, "edge": names.edge}[component](self.gateway)

    def meta_of(self, component: Component, annotations: Mapping[str, str] | None = None) -> Object:
        """Metadata of an object that has the component's own name."""
        return self.meta(self.name_of(component), component, annotations)

    def fragments(self, component: Component) -> tuple[Object, ...]:
        """The fragments for a component's pods: the operator's, then the pools'."""
        shared, platform = self.shared, self.platform
        settings = shared.picker if component == "epp" else shared.edge
        default = platform.epp_template if component == "epp" else platform.edge_template
        if default and settings.resources is not None:
            default = _without_resources(default, component)
        return tuple(fragment for fragment in (default, settings.template) if fragment)

    def fragments_hash(self, component: Component) -> dict[str, str]:
        """The fragments as part of the inputs; nothing without any. (Null in them has a meaning.)"""
        found = [canonical(fragment, keep_unset=True) for fragment in self.fragments(component)]
        return {"templates": names.digest(found)} if found else {}

    @property
    def drain_s(self) -> int:
        """Time for open requests to end: the longest of the pools, in whole minutes, so that joining pools seldom
        change it, which would roll the pods."""
        longest = max(pool.spec.drain.timeout_seconds for pool in self.pools)
        return _STEP_S * math.ceil(longest / _STEP_S)

    @property
    def grace_s(self) -> int:
        """Seconds from a pod's deletion until it is killed."""
        return LINGER_S + self.drain_s + _MARGIN_S


def deployment(
    context: GatewayContext,
    component: Component,
    *,
    replicas: int,
    image: str,
    inputs: str,
    container: Object,
    pod: Object,
    labels: Mapping[str, str] | None = None,
) -> Object:
    """A Deployment of one restricted container; `container` and `pod` are its specific parts. Raises
    TemplateInvalid."""
    annotations = {names.INPUTS: inputs, IMAGE: image}
    others = {
        "labelSelector": {"matchLabels": context.pods(component)},
        "topologyKey": "kubernetes.io/hostname",
    }
    spread = [{"weight": 100, "podAffinityTerm": others}]
    images = context.platform.images
    pull_secrets = [{"name": secret} for secret in images.pull_secrets]
    spec = {
        **({"imagePullSecrets": pull_secrets} if pull_secrets else {}),
        "serviceAccountName": context.name_of(component),
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": context.grace_s,
        "securityContext": objects.pod_security(),
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": spread}},
        **pod,
        "containers": [
            {
                "name": component,
                "image": image,
                "imagePullPolicy": images.pull_policy,
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": objects.container_security(),
                **container,
            }
        ],
    }
    ours = {"metadata": {"labels": {**context.labels(component), **(labels or {})}}, "spec": spec}
    template = laid_over(ours, context.fragments(component), component)
    meta = context.meta_of(component, annotations)
    return objects.deployment(meta, context.pods(component), template, replicas, revisionHistoryLimit=2)


def disruption_budget(context: GatewayContext, component: Component) -> Object:
    """One pod at a time may be evicted."""
    return objects.disruption_budget(context.meta_of(component), context.pods(component))


def service_account(context: GatewayContext, component: Component) -> Object:
    """A ServiceAccount without token, unless a pod mounts it, and without rights, unless a Role grants them."""
    meta = context.meta_of(component)
    return objects.manifest("v1", "ServiceAccount", meta, automountServiceAccountToken=False)


def _without_resources(fragment: Object, component: Component) -> Object:
    """The operator's own fragment for pools that name resources in their field."""
    spec = fragment.get("spec") or {}
    containers = [
        {k: v for k, v in c.items() if k != "resources"} if c.get("name") == component else c
        for c in spec.get("containers") or ()
    ]
    return {**fragment, "spec": {**spec, "containers": containers}} if containers else fragment


def container_resources(context: GatewayContext, component: Component, asked: Resources | None) -> Object:
    """Requests and limits of a component's container as they are in the end. Raises TemplateInvalid."""
    found: Object = {"requests": {}, "limits": {}, **resources(asked, {})}
    for fragment in context.fragments(component):
        for container in (fragment.get("spec") or {}).get("containers") or ():
            if container.get("name") == component:
                found = merged(found, container.get("resources") or {}, "resources")
    return found


def resources(asked: Resources | None, default: Mapping[str, str]) -> Object:
    """A container's resources: the requested ones, or sufficient default requests."""
    if asked is None:
        return {"requests": dict(default)}
    found = {"requests": dict(asked.requests), "limits": dict(asked.limits)}
    return {name: values for name, values in found.items() if values}


STUCK_S: Final = 30.0
"""Seconds that a pod may wait for its volumes before a missing key pair is made again; also the time to the next check
while pods wait, since no watch reports passing time."""


def has_keys(world: GatewayWorld) -> bool:
    """Whether the key pair was made, as far as is known: the Secret is never read. The picker's Deployment is the
    evidence, since it is written after the keys."""
    return find(world.children, "Deployment", names.epp(world.name)) is not None


def keys(context: GatewayContext) -> dict[str, Any]:
    """The Secret with the key pair, without its data."""
    meta = context.meta(names.kv_keys(context.gateway))
    return manifest("v1", "Secret", meta, type="Opaque", immutable=True)


def keys_again(context: GatewayContext) -> CreateKeys:
    """Make the key pair once more for pods that mount it and do not start; if it exists, this changes nothing."""
    return CreateKeys(keys(context), "a pod waits for its volumes; missing keys are made again")


def admin_key(pool: str, meta: dict[str, Any]) -> CreateKeys:
    """The key to the administration of a pool's engines. `meta` has its owner; its name is ours."""
    secret = manifest("v1", "Secret", {**meta, "name": names.admin_key(pool)}, type="Opaque", immutable=True)
    return CreateKeys(secret, "a key to the engines' administration", fresh="word")


def hands_admin_key(workload: Mapping[str, Any], pool: str) -> bool:
    """Whether the pods of a Deployment or LeaderWorkerSet mount that key, so it existed before."""
    containers = pod_template(workload)["spec"].get("containers", ())
    given = (env.get("valueFrom") or {} for one in containers for env in one.get("env") or ())
    return any((source.get("secretKeyRef") or {}).get("name") == names.admin_key(pool) for source in given)


def misses_admin_key(pod: Mapping[str, Any], pool: str) -> bool:
    """Whether the kubelet cannot start a container because that key is missing."""
    waiting = (state_of(status, "waiting") for status in container_statuses(pod, init=False))
    return any(
        one.get("reason") == "CreateContainerConfigError" and names.admin_key(pool) in str(one.get("message"))
        for one in waiting
    )


def longest_wait(pods: Iterable[Observed], now: datetime) -> float | None:
    """For how many seconds the first of the pods that wait for their volumes has waited; None if none does."""
    waiting = (
        pod
        for pod in (observed.object for observed in pods)
        if condition_of(pod, "PodScheduled").get("status") == "True"
        and condition_of(pod, "PodReadyToStartContainers").get("status") == "False"
    )
    return max((max(0.0, (now - (since(pod, "PodScheduled") or now)).total_seconds()) for pod in waiting), default=None)
