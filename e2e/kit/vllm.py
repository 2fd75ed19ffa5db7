"""Pools of a real vLLM on CPUs, which get the small model from a Hub in the cluster."""

from __future__ import annotations

from typing import Any, Final

from e2e.cluster.images import VLLM
from e2e.kit.hub import MIRROR, image_name
from e2e.kit.system import API

_ON_CPUS: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def vllm_pool(name: str, **spec: Any) -> dict[str, Any]:
    """Return an InferencePool of two vLLMs with the small model, which answers as `tiny`."""
    settled: dict[str, Any] = {
        "model": {"uri": "hf://org/tiny", "name": "tiny"},
        "replicas": 2,
        "engine": {
            "type": "vllm",
            "image": image_name(VLLM),
            "dtype": "float32",
            "contextLength": 2048,
            "pageSize": 32,  # its attention on CPUs wants multiples of that
            "maxRunningRequests": 8,
            "args": ["--enforce-eager"],
            "resources": {"requests": {"cpu": "50m", "memory": "2Gi"}, "limits": {"memory": "6Gi"}},
        },
        "drain": {"timeoutSeconds": 120},
        "gateway": {"standalone": {"serviceType": "NodePort", "exposeRouting": True}},
        "template": {
            "spec": {
                "initContainers": [{"name": "model", "env": [MIRROR]}],
                "containers": [
                    {"name": "runtime", "env": [{"name": key, "value": value} for key, value in _ON_CPUS.items()]}
                ],
            }
        },
    }
    return {"apiVersion": API, "kind": "InferencePool", "metadata": {"name": name}, "spec": settled | spec}
