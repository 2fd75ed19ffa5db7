"""Plans of pools on a real API server, by dry run: it accepts every object, and its defaults cause no writes."""

from __future__ import annotations

from typing import Any

import pytest
from support.control_plane import ControlPlane
from support.pool_world import SimCluster, a_pool
from treeline_kube.resources import Resource
from treeline_operator.actions import Apply, CreateKeys
from treeline_operator.controller.execute import with_keys
from treeline_operator.controller.kinds import CHILDREN

pytestmark = [pytest.mark.integration, pytest.mark.deep]

RESOURCES = {watched.resource.kind: watched.resource for watched in CHILDREN}
RESOURCES["Secret"] = Resource("v1", "Secret", "secrets")
USERS: dict[str, Any] = {
    "metadata": {"annotations": {"empty": ""}},
    "spec": {
        "hostNetwork": False,
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "containers": [
            {
                "name": "runtime",
                "env": [{"name": "EMPTY", "value": ""}],
                "resources": {"limits": {"memory": "1024Mi", "cpu": 0.5}},
                "livenessProbe": {"exec": {"command": ["true"]}, "initialDelaySeconds": 0},
            }
        ],
        "volumes": [{"name": "more", "emptyDir": {"sizeLimit": "2048Mi"}}],
    },
}
SPECS: dict[str, dict[str, Any]] = {
    "plain": {"replicas": 0},
    "cached": {
        "model": {
            "uri": "hf://org/name",
            "size": "1Gi",
            "cache": {"size": "1024Mi"},
            "tokenSecretRef": {"name": "t"},
        },
        "accelerator": {"type": "nvidia", "class": "L40S"},
        "engine": {"resources": {"requests": {"cpu": "1000m", "memory": "0.5Gi"}}},
    },
    "vllm": {
        "model": {"uri": "hf://org/name", "chatTemplateRef": {"name": "of-ours"}},
        "accelerator": {"type": "nvidia", "count": 2},
        "engine": {"type": "vllm", "dataParallel": 2},
    },
    "sglang": {
        "model": {"uri": "pvc://claim/dir"},
        "accelerator": {"type": "nvidia"},
        "engine": {"type": "sglang"},
    },
    "own-pair": {
        "accelerator": {"type": "nvidia"},
        "engine": {"hostCache": "1024Mi"},
        "prefill": {"maxReplicas": 2},
        "autoscaling": {"type": "Picker", "maxReplicas": 2},
    },
    "pair": {
        "model": {"uri": "hf://org/name"},
        "accelerator": {"type": "nvidia"},
        "engine": {"type": "vllm"},
        "prefill": {"template": {"spec": {"priorityClassName": "prompts"}}},
    },
    "custom": {"engine": {"type": "custom", "image": "x:1"}, "template": USERS},
    "parents": {"gateway": {"parentRefs": [{"name": "front"}]}},
}


@pytest.mark.parametrize("name", SPECS)
def test_the_api_server_takes_every_object_and_its_defaults_are_no_difference(
    name: str, control_plane: ControlPlane, namespace: str
) -> None:
    pool = a_pool(name, metadata={"namespace": namespace}, **SPECS[name])
    cluster = SimCluster()
    for action in cluster.plan(pool).actions:
        if isinstance(action, CreateKeys):
            _dry_run(control_plane, with_keys(action))
            continue
        assert isinstance(action, Apply)
        cluster.objects[action.ref] = _dry_run(control_plane, action.object)
    plan = cluster.plan(pool)
    assert [(a.ref.kind, getattr(a, "drift", ())) for a in plan.actions] == []


def _dry_run(plane: ControlPlane, obj: dict[str, Any]) -> dict[str, Any]:
    version, meta = obj["apiVersion"], obj["metadata"]
    path = RESOURCES[obj["kind"]].path(meta["namespace"], meta["name"])
    query = "fieldManager=treeline-operator&force=true&dryRun=All&fieldValidation=Strict"
    made = plane.request("PATCH", f"{path}?{query}", obj, content_type="application/apply-patch+yaml")
    return {**made, "apiVersion": version, "kind": obj["kind"]}
