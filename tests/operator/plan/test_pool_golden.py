"""The whole first plan of typical pools, as YAML. TREELINE_GOLDEN=write makes the files anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.pool_world import EVERY_API, SimCluster, a_pool
from treeline_operator.actions import Apply
from treeline_operator.plan.security import exceptions
from treeline_operator.world import Platform


class Plain(yaml.SafeDumper):
    """Without anchors: everything is written out where it stands."""

    def ignore_aliases(self, data: object) -> bool:
        return True


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
        "accelerator": {"type": "nvidia", "class": "NVIDIA-L40S", "runtimeClassName": "nvidia"},
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
            "type": "HPA",
            "minReplicas": 2,
            "maxReplicas": 6,
            "hpa": {
                "metrics": [
                    {
                        "type": "Pods",
                        "pods": {
                            "metric": {"name": "vllm:num_requests_waiting"},
                            "target": {"type": "AverageValue", "averageValue": "5"},
                        },
                    }
                ]
            },
        },
    },
    "sglang": {
        "model": {"uri": "pvc://weights/qwen3-8b", "name": "qwen3"},
        "accelerator": {"type": "nvidia", "tolerations": [{"key": "dedicated", "value": "llm"}]},
        "engine": {"type": "sglang", "pageSize": 64, "maxQueuedRequests": 100, "schedulePolicy": "lpm"},
        "drain": {"timeoutSeconds": 600},
        "autoscaling": {
            "type": "KEDA",
            "minReplicas": 0,
            "maxReplicas": 4,
            "keda": {"triggers": [{"type": "prometheus", "metadata": {"query": "x", "threshold": "1"}}]},
        },
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


@pytest.mark.parametrize("name", SAMPLES)
def test_the_first_plan_is_the_one_on_file(name: str) -> None:
    plan = SimCluster(Platform(apis=EVERY_API)).plan(a_pool(name, **SAMPLES[name]))
    assert all(isinstance(action, Apply) for action in plan.actions)
    shown = "".join(
        f"---\n# {action.why}\n{yaml.dump(action.object, Dumper=Plain, sort_keys=False, width=110)}"
        for action in plan.actions
        if isinstance(action, Apply)
    ) + "".join(f"# note: {note}\n" for note in plan.notes)
    path = FOLDER / f"{name}.yaml"
    if os.environ.get("TREELINE_GOLDEN") == "write":
        path.write_text(shown)
    assert shown == path.read_text()


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "custom"])
def test_pods_that_no_template_changes_are_restricted(name: str) -> None:
    cluster = SimCluster()
    cluster.do(cluster.plan(a_pool(name, **SAMPLES[name])))
    for deployment in cluster.deployments().values():
        pod = deployment["spec"]["template"]["spec"]
        ours = {**pod, "containers": [c for c in pod["containers"] if c["name"] != "injected"]}
        assert exceptions(ours) == ()
