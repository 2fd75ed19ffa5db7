"""The whole first plan of typical pools: one in full, the others as differences (see `support.golden`)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import golden
from support.pod_security import exceptions
from support.pool_world import EVERY_API, SimCluster, a_pool
from treeline_operator import names
from treeline_operator.actions import Apply, CreateKeys
from treeline_operator.world import Platform

FOLDER = Path(__file__).parent / "golden" / "pool"
SAMPLES: dict[str, dict[str, Any]] = {
    "cpu-tiny": {"replicas": 2},
    "llama-gpu": {
        "model": {
            "uri": "hf://meta-llama/Llama-3.1-8B-Instruct",
            "name": "llama-3.1-8b",
            "tokenSecretRef": {"name": "hf-token"},
            "cache": {"size": "40Gi", "storageClassName": "fast"},
            "size": "16Gi",
        },
        "accelerator": {"type": "nvidia", "class": "NVIDIA-L40S"},
        "template": {"spec": {"runtimeClassName": "nvidia"}},
        "engine": {
            "contextLength": 8192,
            "memoryFraction": 0.85,
            "resources": {"requests": {"cpu": 4, "memory": "16Gi"}},
        },
    },
    "vllm": {
        "model": {
            "uri": "hf://Qwen/Qwen3-32B@main",
            "tokenizer": "hf://Qwen/Qwen3-tokenizer",
            "size": "65Gi",
        },
        "replicas": 2,
        "accelerator": {"type": "nvidia", "count": 4},
        "engine": {
            "type": "vllm",
            "tensorParallel": 2,
            "dataParallel": 2,
            "maxRunningRequests": 256,
            "adapters": [{"name": "legal", "uri": "pvc://adapters/legal"}],
            "args": ["--enforce-eager"],
        },
        "autoscaling": {
            "type": "Picker",
            "minReplicas": 2,
            "maxReplicas": 6,
        },
    },
    "sglang": {
        "model": {"uri": "pvc://weights/qwen3-8b", "name": "qwen3"},
        "accelerator": {"type": "nvidia"},
        "template": {"spec": {"tolerations": [{"key": "dedicated", "value": "llm"}]}},
        "engine": {
            "type": "sglang",
            "pageSize": 64,
            "maxQueuedRequests": 100,
            "schedulePolicy": "lpm",
            "quantization": "fp8",
            "kvCacheDtype": "fp8_e5m2",
        },
        "drain": {"timeoutSeconds": 600},
    },
    "vllm-prefill": {
        "model": {"uri": "hf://Qwen/Qwen3-4B", "size": "8Gi"},
        "replicas": 2,
        "prefill": {"accelerator": {"type": "nvidia", "count": 2}},
        "accelerator": {"type": "nvidia"},
        "engine": {"type": "vllm"},
    },
    "prefill": {
        "model": {"uri": "hf://Qwen/Qwen3-4B", "size": "8Gi"},
        "replicas": 2,
        "prefill": {"maxReplicas": 3},
        "accelerator": {"type": "nvidia"},
        "engine": {"hostCache": "16Gi"},
        "autoscaling": {"type": "Picker", "maxReplicas": 4},
    },
    "gateway-api": {
        "gateway": {
            "name": "shared",
            "parentRefs": [{"name": "front", "namespace": "infra"}],
            "hostnames": ["llm.example.com"],
        },
        "endpointPicker": {"failureMode": "FailClose"},
    },
    "custom": {
        "model": {"uri": "path:///weights", "name": "mine"},
        "engine": {
            "type": "custom",
            "image": "example.com/engine:1",
            "args": ["serve", "$(TREELINE_MODEL)"],
            "port": 9000,
        },
        "template": {
            "metadata": {"annotations": {"note": "hello"}},
            "spec": {
                "containers": [
                    {"name": "runtime", "volumeMounts": [{"name": "weights", "mountPath": "/weights"}]},
                    {"name": "proxy", "image": "example.com/proxy:2"},
                ],
                "volumes": [{"name": "weights", "nfs": {"server": "nfs", "path": "/w"}}],
                "priorityClassName": "important",
            },
        },
    },
}


BASE = "cpu-tiny"


def first_plan(name: str) -> dict[str, str]:
    """Return every object of the plan. Names, and hashes of shown contents, are the same in all samples."""
    plan = SimCluster(Platform(apis=EVERY_API)).plan(a_pool("sample", **SAMPLES[name]))
    shown = {}
    for action in plan.actions:
        assert isinstance(action, Apply | CreateKeys)
        obj = copy.deepcopy(action.object)
        obj["metadata"].get("annotations", {}).pop(names.APPLIED, None)
        text = yaml.dump(obj, Dumper=golden.Plain, sort_keys=False, width=110)
        shown[f"{obj['kind']} {obj['metadata']['name']}"] = f"# {action.why}\n{text}"
    deployments = (title for title in shown if title.startswith("Deployment "))
    (revision,) = {title.removesuffix(names.PREFILL).rpartition("-")[2] for title in deployments}
    shown = {title.replace(revision, "REVISION"): text.replace(revision, "REVISION") for title, text in shown.items()}
    return {"revision": f"{revision}\n", **shown, "notes": "".join(f"{note}\n" for note in plan.notes)}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_first_plan_is_the_one_on_file(name: str) -> None:
    golden.check(FOLDER, name, first_plan(name), BASE, first_plan(BASE))


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "custom"])
def test_pods_that_no_template_changes_are_restricted(name: str) -> None:
    cluster = SimCluster()
    cluster.do(cluster.plan(a_pool(name, **SAMPLES[name])))
    for deployment in cluster.deployments().values():
        pod = deployment["spec"]["template"]["spec"]
        ours = {**pod, "containers": [c for c in pod["containers"] if c["name"] != "injected"]}
        assert exceptions(ours, gpu="accelerator" in SAMPLES[name]) == ()
