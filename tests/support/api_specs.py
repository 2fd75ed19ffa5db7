"""Objects of the API for tests: from a few lines of YAML, and by chance from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, get_args

import yaml
from treeline_operator.api.engine import EngineType

API_VERSION = "treeline.dev/v1alpha1"
_POOL = {"model": {"uri": "builtin://tiny"}}
_MODEL = {"modelName": "chat", "poolRef": {"name": "tiny"}}
BASES: dict[str, dict[str, Any]] = {"InferencePool": _POOL, "InferenceModel": _MODEL}


def document(kind: str, text: str, name: str = "tiny") -> dict[str, Any]:
    """An object that is valid but for what ``text`` (YAML of the spec) says over the smallest valid one."""
    spec = overlaid(BASES[kind], yaml.safe_load(text) or {})
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def overlaid(base: Any, over: Any) -> Any:
    """Maps are merged, everything else is replaced."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    merged = {key: overlaid(base[key], over[key]) if key in over else base[key] for key in base}
    return merged | {key: value for key, value in over.items() if key not in base}


class Chance:
    """Pools and models whose every field has a possible value, and whose fields together often make no sense."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pool(self) -> dict[str, Any]:
        """The spec of an InferencePool."""
        return self._some(
            {
                "model": self._model,
                "preset": lambda: self._one("a", "h100-80"),
                "replicas": lambda: self._one(0, 1, 7),
                "template": self._template,
                "accelerator": self._accelerator,
                "engine": self._engine,
                "endpointPicker": lambda: self._some(
                    {
                        "policy": lambda: self._one("treeline", "round_robin", "random"),
                        "policyParameters": dict,
                        "parameters": lambda: self._some({"maxTtftSeconds": lambda: 2.5, "maxBodyBytes": lambda: 4096}),
                        "failureMode": lambda: self._one("FailOpen", "FailClose"),
                        "replicas": lambda: self._one(1, 3),
                    }
                ),
                "gateway": self._gateway,
                "autoscaling": self._autoscaling,
                "drain": lambda: {"timeoutSeconds": self._one(1, 3600)},
                "rollout": lambda: self._some(
                    {
                        "strategy": lambda: self._one("SurgeIfCapacity", "Replace"),
                        "maxSurge": lambda: self._one(0, 1, 2, "0%", "25%"),
                        "maxUnavailable": lambda: self._one(0, 1, "0%", "100%"),
                        "surgeTimeoutSeconds": lambda: self._one(0, 600),
                        "paused": lambda: self._one(True, False),
                    }
                ),
                "disruptionBudget": lambda: {"maxUnavailable": self._one(1, 2, "50%", 1, 3, 0)},
            },
            always=("model",),
        )

    def model(self) -> dict[str, Any]:
        """The spec of an InferenceModel."""
        return self._some(
            {
                "modelName": lambda: self._one("chat", "org/chat:1"),
                "poolRef": lambda: {"name": self._one("a", "b")},
                "criticality": lambda: self._one("Critical", "Standard", "Sheddable"),
                "targetModels": lambda: [
                    self._some({"name": lambda n=n: n, "weight": lambda: 3}, always=("name",)) for n in ("x", "y")
                ],
                "fallbackPools": lambda: self._one([], [{"name": "a"}], [{"name": "c"}, {"name": "b"}]),
            },
            always=("modelName", "poolRef"),
        )

    def _model(self) -> dict[str, Any]:
        return self._some(
            {
                "uri": lambda: self._one("hf://o/m@main", "pvc://c/p", "path:///m", "builtin://tiny"),
                "name": lambda: self._one("m", "lora"),
                "tokenizer": lambda: self._one("hf://o/t", "path:///t"),
                "tokenSecretRef": lambda: {"name": "token"},
                "cache": lambda: self._some(
                    {
                        "claimName": lambda: "claim",
                        "size": lambda: self._one("20Gi", 1000),
                        "storageClassName": lambda: "fast",
                        "accessModes": lambda: ["ReadWriteMany"],
                    }
                ),
                "size": lambda: self._one("16Gi", "1e3", 5),
            },
            always=("uri",),
        )

    def _template(self) -> dict[str, Any]:
        return self._some(
            {
                "metadata": lambda: {"labels": {self._one("team", "treeline.dev/pool"): "x"}},
                "spec": lambda: {"containers": [{"name": "runtime", "env": []}], "priorityClassName": "high"},
            }
        )

    def _accelerator(self) -> dict[str, Any]:
        return self._some(
            {
                "type": lambda: self._one("cpu", "nvidia", "nvidia"),
                "count": lambda: self._one(1, 2, 4, 3),
                "class": lambda: "H100",
                "resourceName": lambda: self._one("nvidia.com/gpu", "nvidia.com/mig-1g.10gb"),
            }
        )

    def _engine(self) -> dict[str, Any]:
        adapters = [{"name": "lora", "uri": self._one("hf://o/l", "pvc://c/l")}]
        return self._some(
            {
                "type": lambda: self._one(*get_args(EngineType)),
                "image": lambda: "image:1",
                "args": lambda: self._one([], ["--enable-dp-attention"]),
                "port": lambda: self._one(8000, 5557),
                "contextLength": lambda: 4096,
                "memoryFraction": lambda: 0.5,
                "pageSize": lambda: 16,
                "cache": lambda: self._one({"size": "5Gi"}, {"claimName": "c"}, {}),
                "tensorParallel": lambda: self._one(1, 2),
                "dataParallel": lambda: self._one(1, 2),
                "maxRunningRequests": lambda: 8,
                "maxQueuedRequests": lambda: 0,
                "chunkedPrefillSize": lambda: 512,
                "maxTotalTokens": lambda: 4096,
                "dtype": lambda: "bfloat16",
                "quantization": lambda: "fp8",
                "kvCacheDtype": lambda: "fp8_e4m3",
                "threads": lambda: 2,
                "evictionPolicy": lambda: "lru",
                "schedulePolicy": lambda: "fcfs",
                "adapters": lambda: self._one([], adapters),
                "resources": lambda: {"requests": {"cpu": self._one("500m", 2)}, "limits": {"memory": "2Gi"}},
            },
            chance=0.2,
            always=("type",),
        )

    def _gateway(self) -> dict[str, Any]:
        parents = [{"name": "g"}, {"name": "g", "namespace": "x", "sectionName": "http", "port": 80}]
        return self._some(
            {
                "name": lambda: "edge",
                "standalone": lambda: self._some({"port": lambda: 8080, "tls": lambda: {"secretRef": {"name": "t"}}}),
                "parentRefs": lambda: self._one([], parents, [parents[0], parents[0]]),
                "hostnames": lambda: self._one([], ["*.example.com"]),
            }
        )

    def _autoscaling(self) -> dict[str, Any]:
        return self._some(
            {
                "type": lambda: self._one("None", "Picker"),
                "minReplicas": lambda: self._one(0, 1, 5),
                "maxReplicas": lambda: self._one(2, 9),
                "picker": lambda: {"scaleDownSeconds": self._one(0, 60)},
            }
        )

    def _one(self, *values: Any) -> Any:
        return self._random.choice(values)

    def _some(
        self, fields: dict[str, Callable[[], Any]], *, chance: float = 0.4, always: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        return {key: make() for key, make in fields.items() if key in always or self._random.random() < chance}
