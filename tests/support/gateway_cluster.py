"""Pools, and a small simulated API server with Deployments and garbage collection, for the gateway's plan."""

from __future__ import annotations

import copy
import itertools
from datetime import UTC, datetime
from typing import Any

from treeline_operator.actions import Action, Apply, CreateKeys, Delete, Plan, Scale
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.gateway import plan_gateway
from treeline_operator.world import GatewayWorld, Observed, Platform, Ref

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
GATEWAY = "treeline.dev/gateway"
POOL = "treeline.dev/pool"

PLAIN: dict[str, Any] = {}
FULL: dict[str, Any] = {
    "endpointPicker": {
        "policy": "round_robin",
        "parameters": {"maxTtftSeconds": 2.5, "maxBodyBytes": 1048576},
        "failureMode": "FailClose",
        "replicas": 2,
        "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "4Gi"}},
        "image": "example.com/epp:1",
    },
    "gateway": {
        "standalone": {
            "serviceType": "LoadBalancer",
            "port": 443,
            "replicas": 3,
            "resources": {"limits": {"cpu": "2500m", "memory": "1Gi"}},
            "image": "example.com/edge:1",
            "annotations": {"cloud.example/type": "nlb"},
            "apiKeysSecretRef": {"name": "clients"},
            "tls": {"secretRef": {"name": "certificate"}},
        }
    },
    "engine": {"type": "sglang", "image": "example.com/sglang:1", "port": 30000, "dataParallel": 4},
    "drain": {"timeoutSeconds": 90},
}
ATTACHED: dict[str, Any] = {
    "gateway": {
        "parentRefs": [{"name": "inference", "namespace": "infra", "sectionName": "https"}, {"name": "own"}],
        "hostnames": ["*.example.com", "models.example.com"],
    }
}
CASES = {"plain": PLAIN, "full": FULL, "attached": ATTACHED}
"""Specs without a model: no field set, every field set, an existing Gateway."""


def pool(name: str, *, created: int | None = 0, deleting: bool = False, **spec: Any) -> InferencePool:
    """Return a pool; ``created`` is a day of the month less one."""
    meta: dict[str, Any] = {"name": name, "namespace": "ns", "uid": f"uid-{name}"}
    if created is not None:
        meta["creationTimestamp"] = f"2026-11-{created + 1:02}T00:00:00Z"
    if deleting:
        meta["deletionTimestamp"] = "2026-11-29T00:00:00Z"
    body = {"model": {"uri": "builtin://tiny"}, **spec}
    return InferencePool.from_object(
        {"apiVersion": "treeline.dev/v1alpha1", "kind": "InferencePool", "metadata": meta, "spec": body},
        strict=True,
    )


def merged(base: Any, over: Any) -> Any:
    """Merge ``over`` into ``base``; lists are replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{k: merged(base.get(k), v) for k, v in over.items()}}
    return copy.deepcopy(over)


class Cluster:
    """Holds objects by reference. Fields that an earlier apply set and a later one does not are removed, others
    stay."""

    def __init__(self) -> None:
        self.objects: dict[Ref, dict[str, Any]] = {}
        self.secrets: list[str] = []
        self._ours: dict[Ref, dict[str, Any]] = {}
        self._uids = itertools.count(1)

    def do(self, actions: tuple[Action, ...]) -> None:
        """Apply a plan's actions, as the API server does."""
        for action in actions:
            match action:
                case Apply(object=desired, ref=ref):
                    self._apply(ref, desired)
                case CreateKeys(ref=ref):
                    self.secrets.append(ref.name)
                case Scale(ref=ref, uid=uid, replicas=replicas):
                    assert self.objects[ref]["metadata"]["uid"] == uid
                    self.objects[ref]["spec"]["replicas"] = replicas
                    self.objects[ref]["metadata"]["generation"] += 1
                case Delete(ref=ref, uid=uid):
                    assert self.objects[ref]["metadata"]["uid"] == uid
                    del self.objects[ref]

    def _apply(self, ref: Ref, desired: dict[str, Any]) -> None:
        there = self.objects.get(ref)
        if there is None:
            there = {"metadata": {"uid": f"uid-{next(self._uids)}", "generation": 0}}
        immutable = there.get("immutable") and there.get("data") != desired.get("data")
        assert not immutable, f"{ref.name} is immutable"
        kept = _without(there, self._ours.get(ref, {}))
        new = merged(kept, desired)
        if new.get("spec") != there.get("spec"):
            new["metadata"]["generation"] += 1
        self.objects[ref], self._ours[ref] = new, copy.deepcopy(desired)

    def collect(self, living: set[str]) -> None:
        """Collect garbage: delete objects all of whose owners are gone. ``living`` are the pools' uids."""
        while True:
            uids = living | {obj["metadata"]["uid"] for obj in self.objects.values()}
            gone = [
                ref
                for ref, obj in self.objects.items()
                if (owners := obj["metadata"].get("ownerReferences"))
                and not any(owner["uid"] in uids for owner in owners)
            ]
            if not gone:
                return
            for ref in gone:
                del self.objects[ref]

    def roll_out(self) -> None:
        """Give every Deployment its pods at once, of its newest template alone."""
        for ref in [ref for ref in self.objects if ref.kind == "Pod"]:
            del self.objects[ref]
        for ref, obj in list(self.objects.items()):
            if ref.kind == "Deployment":
                count = obj["spec"]["replicas"]
                obj["status"] = {
                    "observedGeneration": obj["metadata"]["generation"],
                    **dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas"), count),
                }
                for index in range(count):
                    self.add_pod(obj, f"{ref.name}-{index}")

    def add_pod(self, deployment: dict[str, Any], name: str) -> None:
        """Add a pod of a Deployment's current template."""
        template = copy.deepcopy(deployment["spec"]["template"])
        meta = {**template["metadata"], "name": name, "namespace": "ns", "uid": f"uid-{next(self._uids)}"}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"], "status": {}}
        self.objects[Ref("v1", "Pod", "ns", name)] = body

    def world(self, *pools: InferencePool, platform: Platform | None = None, name: str = "treeline") -> GatewayWorld:
        """Return the gateway's world, as an operator observes it."""
        ours = [
            Observed.of(obj)
            for obj in self.objects.values()
            if obj["metadata"].get("labels", {}).get(GATEWAY) == name and POOL not in obj["metadata"]["labels"]
        ]
        members = tuple(pool for pool in pools if pool.spec.gateway.name == name)
        return GatewayWorld(
            "ns",
            name,
            members,
            tuple(one for one in ours if one.ref.kind != "Pod"),
            tuple(one for one in ours if one.ref.kind == "Pod"),
            platform or Platform(),
            NOW,
        )

    def converge(self, *pools: InferencePool, platform: Platform | None = None, rounds: int = 6) -> list[Plan]:
        """Plan and apply until nothing is left; return the plans that had actions."""
        plans: list[Plan] = []
        for _ in range(rounds):
            plan = plan_gateway(self.world(*pools, platform=platform))
            if not plan.actions:
                return plans
            plans.append(plan)
            self.do(plan.actions)
            self.collect({pool.metadata.uid for pool in pools})
            self.roll_out()
        raise AssertionError(f"still not there: {[action.why for action in plan.actions]}")

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """Return an object by kind and name."""
        (found,) = [obj for ref, obj in self.objects.items() if (ref.kind, ref.name) == (kind, name)]
        return found

    def names(self, kind: str) -> list[str]:
        """Return the names of all objects of a kind."""
        return sorted(ref.name for ref in self.objects if ref.kind == kind)


def _without(there: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in there.items():
        if key not in ours:
            kept[key] = value
        elif isinstance(value, dict) and isinstance(ours[key], dict):
            kept[key] = _without(value, ours[key])
    return kept


def converged(*pools: InferencePool) -> Cluster:
    """Return a cluster in which the gateway of these pools has converged."""
    cluster = Cluster()
    cluster.converge(*pools)
    return cluster


def container(cluster: Cluster, deployment: str) -> dict[str, Any]:
    """Return the one container of a Deployment's template."""
    (found,) = cluster.get("Deployment", deployment)["spec"]["template"]["spec"]["containers"]
    return found  # type: ignore[no-any-return]
