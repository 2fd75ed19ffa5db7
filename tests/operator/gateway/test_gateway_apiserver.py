"""The gateway's plan on a real API server: accepted, admitted by restricted Pod Security, and then stable."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.control_plane import ControlPlane
from support.epp_io import until
from support.gateway_cluster import CASES, NOW, pool
from treeline_kube.client import Client
from treeline_operator.actions import Apply, CreateKeys, Delete, Plan
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.gateway import plan_gateway
from treeline_operator.world import GatewayWorld, Observed, Platform

pytestmark = [pytest.mark.integration, pytest.mark.deep]

KINDS = (
    ("v1", "ConfigMap"),
    ("v1", "Service"),
    ("v1", "ServiceAccount"),
    ("apps/v1", "Deployment"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("policy/v1", "PodDisruptionBudget"),
    ("rbac.authorization.k8s.io/v1", "Role"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
)


@pytest.fixture
async def cluster(control_plane: ControlPlane) -> AsyncIterator[Client]:
    async with await Client.from_config(control_plane.admin) as cluster:
        yield cluster


async def observed(cluster: Client, namespace: str, *pools: InferencePool) -> GatewayWorld:
    """Return the world of the gateway `treeline`, as an operator observes it."""

    async def everything(api_version: str, kind: str) -> tuple[Observed, ...]:
        found = cluster.list(api_version, kind, namespace, "treeline.dev/gateway=treeline")
        return tuple([Observed.of(obj) async for obj in found])

    children = tuple([one for kind in KINDS for one in await everything(*kind)])
    pods = await everything("v1", "Pod")
    return GatewayWorld(namespace, "treeline", pools, children, pods, Platform(), NOW)


async def do(cluster: Client, plan: Plan) -> None:
    """Carry out a plan; any refusal fails."""
    for action in plan.actions:
        match action:
            case Apply():
                await cluster.apply(action.object)
            case CreateKeys():
                key = base64.b64encode(b"0" * 40).decode()
                await cluster.create({**action.object, "data": {"public.key": key, "secret.key": key}})
            case Delete():
                await cluster.delete(action.ref, uid=action.uid)


def owned(uid: str, namespace: str, **spec: Any) -> InferencePool:
    """Return the pool `llama` of a namespace, with its uid there."""
    made = pool("llama", **spec)
    return made.model_copy(update={"metadata": made.metadata.model_copy(update={"uid": uid, "namespace": namespace})})


async def test_the_gateways_objects_are_accepted_and_stable(
    control_plane: ControlPlane, cluster: Client, namespace: str
) -> None:
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    path = f"/api/v1/namespaces/{namespace}"
    merge = {"content_type": "application/merge-patch+json"}
    control_plane.request("PATCH", path, {"metadata": {"labels": labels}}, **merge)
    uid = await _a_pool(cluster, namespace)
    for case in ("plain", "full", "attached", "plain"):
        ours = owned(uid, namespace, **CASES[case])

        async def rests(ours: InferencePool = ours) -> bool:
            plan = plan_gateway(await observed(cluster, namespace, ours))
            await do(cluster, plan)
            return not plan.actions

        await until(rests, f"{case} rests", timeout_s=60)
        world = await observed(cluster, namespace, ours)
        wanted = {
            obj["metadata"]["name"]: obj["spec"]["replicas"]
            for child in world.children
            if child.ref.kind == "Deployment"
            for obj in [child.object]
        }
        assert len(wanted) == (1 if case == "attached" else 2)

        async def let_in(wanted: dict[str, int] = wanted, ours: InferencePool = ours) -> bool:
            pods = (await observed(cluster, namespace, ours)).pods
            there = dict.fromkeys(wanted, 0)
            for pod in pods:
                there[f"treeline-{pod.object['metadata']['labels']['treeline.dev/component']}"] += 1
            return all(there[name] >= count for name, count in wanted.items())

        if case == "plain":
            await until(let_in, "the pods are made", timeout_s=60)


async def _a_pool(cluster: Client, namespace: str) -> str:
    made = await cluster.create(
        {
            "apiVersion": "treeline.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": "llama", "namespace": namespace},
            "spec": {"model": {"uri": "builtin://tiny"}},
        }
    )
    return str(made["metadata"]["uid"])
