"""Objects of the API for tests: from a few lines of YAML, and random ones from a seed."""

from __future__ import annotations

import copy
import random
from typing import Any, get_args

import yaml
from treeline_operator.api.engine import EngineType

API_VERSION = "treeline.dev/v1alpha1"
_POOL = {"model": {"uri": "builtin://tiny"}}
_MODEL = {"modelName": "chat", "poolRef": {"name": "tiny"}}
BASES: dict[str, dict[str, Any]] = {"InferencePool": _POOL, "InferenceModel": _MODEL}


def document(kind: str, text: str, name: str = "tiny") -> dict[str, Any]:
    """Return the smallest valid object, overlaid with ``text`` (YAML of the spec), which may make it invalid."""
    spec = overlaid(BASES[kind], yaml.safe_load(text) or {})
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def overlaid(base: Any, over: Any) -> Any:
    """Merge maps and replace everything else."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    merged = {key: overlaid(base[key], over[key]) if key in over else base[key] for key in base}
    return merged | {key: value for key, value in over.items() if key not in base}


# Fields: a list has the values of which one is taken, a map the fields of which some are there (those with a ! always),
# a tuple the items of a list, each made so.
_MODEL_SOURCE = {
    "uri!": ["hf://o/m@main", "pvc://c/p", "path:///m", "builtin://tiny"],
    "name": ["m", "lora"],
    "tokenizer": ["hf://o/t", "path:///t"],
    "tokenSecretRef": [{"name": "token"}],
    "cache": {
        "claimName": ["claim"],
        "size": ["20Gi", 1000],
        "storageClassName": ["fast"],
        "accessModes": [["ReadWriteMany"]],
    },
    "size": ["16Gi", "1e3", 5],
}
_ENGINE = {
    "type!": [*get_args(EngineType)],
    "image": ["image:1"],
    "args": [[], ["--enable-dp-attention"]],
    "port": [8000, 5557],
    "contextLength": [4096],
    "memoryFraction": [0.5],
    "pageSize": [16],
    "cache": [{"size": "5Gi"}, {"claimName": "c"}, {}],
    "tensorParallel": [1, 2],
    "dataParallel": [1, 2],
    "maxRunningRequests": [8],
    "maxQueuedRequests": [0],
    "chunkedPrefillSize": [512],
    "maxTotalTokens": [4096],
    "dtype": ["bfloat16"],
    "quantization": ["fp8"],
    "kvCacheDtype": ["fp8_e4m3"],
    "threads": [2],
    "hostCache": ["2Gi"],
    "evictionPolicy": ["lru"],
    "schedulePolicy": ["fcfs"],
    "adapters": [[], [{"name": "lora", "uri": "hf://o/l"}], [{"name": "lora", "uri": "pvc://c/l"}]],
    "resources": [{"requests": {"cpu": cpu}, "limits": {"memory": "2Gi"}} for cpu in ("500m", 2)],
}
_PARENTS = [{"name": "g"}, {"name": "g", "namespace": "x", "sectionName": "http", "port": 80}]
_FIELDS: dict[str, dict[str, Any]] = {
    "InferencePool": {
        "model!": _MODEL_SOURCE,
        "preset": ["a", "h100-80"],
        "replicas": [0, 1, 7],
        "template": {
            "metadata": [{"labels": {label: "x"}} for label in ("team", "treeline.dev/pool")],
            "spec": [{"containers": [{"name": "runtime", "env": []}], "priorityClassName": "high"}],
        },
        "accelerator": {
            "type": ["cpu", "nvidia", "nvidia"],
            "count": [1, 2, 4, 3],
            "class": ["H100"],
            "resourceName": ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"],
        },
        "engine": _ENGINE,
        "prefill": {
            "replicas": [1, 3],
            "minReplicas": [1, 2],
            "maxReplicas": [1, 4],
            "accelerator": {"type": ["cpu", "nvidia"], "count": [1, 2]},
            "template": [{"spec": {"priorityClassName": "high"}}],
        },
        "endpointPicker": {
            "policy": ["treeline", "round_robin", "random"],
            "policyParameters": [{}],
            "parameters": {"maxTtftSeconds": [2.5], "maxBodyBytes": [4096]},
            "failureMode": ["FailOpen", "FailClose"],
            "replicas": [1, 3],
        },
        "gateway": {
            "name": ["edge"],
            "standalone": {"port": [8080], "console": [True], "tls": [{"secretRef": {"name": "t"}}]},
            "parentRefs": [[], _PARENTS, [_PARENTS[0], _PARENTS[0]]],
            "hostnames": [[], ["*.example.com"]],
        },
        "autoscaling": {
            "type": ["None", "Picker"],
            "minReplicas": [0, 1, 5],
            "maxReplicas": [2, 9],
            "picker": {"scaleDownSeconds!": [0, 60]},
        },
        "drain": {"timeoutSeconds!": [1, 3600]},
        "rollout": {
            "strategy": ["SurgeIfCapacity", "Replace"],
            "maxSurge": [0, 1, 2, "0%", "25%"],
            "maxUnavailable": [0, 1, "0%", "100%"],
            "surgeTimeoutSeconds": [0, 600],
            "paused": [True, False],
        },
        "disruptionBudget": {"maxUnavailable!": [1, 2, "50%", 1, 3, 0]},
    },
    "InferenceModel": {
        "modelName!": ["chat", "org/chat:1"],
        "poolRef!": {"name!": ["a", "b"]},
        "criticality": ["Critical", "Standard", "Sheddable"],
        "targetModels": ({"name!": ["x"], "weight": [3]}, {"name!": ["y"], "weight": [3]}),
        "fallbackPools": [[], [{"name": "a"}], [{"name": "c"}, {"name": "b"}]],
    },
}


class Chance:
    """Random pools and models: every field has a possible value, and the combinations are often invalid."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def spec(self, kind: str) -> dict[str, Any]:
        made: dict[str, Any] = self._made(_FIELDS[kind])
        return made

    def _made(self, of: Any) -> Any:
        match of:
            case dict():
                chance = 0.2 if of is _ENGINE else 0.4
                there = [key for key in of if key.endswith("!") or self._random.random() < chance]
                return {key.removesuffix("!"): self._made(of[key]) for key in there}
            case tuple():
                return [self._made(item) for item in of]
        return copy.deepcopy(self._random.choice(of))
