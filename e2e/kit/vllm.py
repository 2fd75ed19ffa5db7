"""Pools of a real vLLM on CPUs, and a Hub in the cluster that gives the small model to them and to the picker."""

from __future__ import annotations

from typing import Any, Final

from e2e.cluster.images import VLLM, wanted
from e2e.cluster.place import ROOT
from e2e.kit.system import API

PORT: Final = 8080
_HUB: Final = {"app": "hub"}
_MODEL: Final = "/opt/treeline/models/tiny"
"""The model's folder in the runtime's image."""
_SERVE: Final = f"""import pathlib, fake_hub
files = {{file.name: file.read_bytes() for file in pathlib.Path({_MODEL!r}).iterdir()}}
hub = fake_hub.FakeHub(repos={{"org/tiny": fake_hub.FakeRepo(files)}})
fake_hub.hub_server(hub, "", {PORT}).serve_forever()
"""
_ON_CPUS: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def hub() -> list[dict[str, Any]]:
    """Return the objects of a Hub with the small model as `hf://org/tiny`, at `http://hub:8080` in its namespace, and
    of the network rule for pods that may otherwise connect to port 443 only."""
    image = _name_of("runtime-cpu")
    scripts = {"fake_hub.py": (ROOT / "tests/support/fake_hub.py").read_text(), "serve.py": _SERVE}
    container = {
        "name": "hub",
        "image": image,
        "command": ["python3", "/hub/serve.py"],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1, "timeoutSeconds": 10},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "scripts", "mountPath": "/hub"}],
    }
    pod = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "scripts", "configMap": {"name": "hub"}}],
        "terminationGracePeriodSeconds": 0,
    }
    clients = {"matchExpressions": [{"key": "treeline.dev/component", "operator": "In", "values": ["runtime", "epp"]}]}
    way = {"to": [{"podSelector": {"matchLabels": _HUB}}], "ports": [{"port": PORT}]}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "hub"}, "data": scripts},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hub", "labels": _HUB}, "spec": pod},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "hub"},
            "spec": {"selector": _HUB, "ports": [{"port": PORT}]},
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "to-hub"},
            "spec": {"podSelector": clients, "policyTypes": ["Egress"], "egress": [way]},
        },
    ]


def vllm_pool(name: str, **spec: Any) -> dict[str, Any]:
    """Return an InferencePool of two vLLMs with the small model, which answers as `tiny`."""
    mirror = {"name": "HF_ENDPOINT", "value": f"http://hub:{PORT}"}
    settled: dict[str, Any] = {
        "model": {"uri": "hf://org/tiny", "name": "tiny"},
        "replicas": 2,
        "engine": {
            "type": "vllm",
            "image": _name_of(VLLM),
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
                "initContainers": [{"name": "model", "env": [mirror]}],
                "containers": [
                    {"name": "runtime", "env": [{"name": key, "value": value} for key, value in _ON_CPUS.items()]}
                ],
            }
        },
    }
    return {"apiVersion": API, "kind": "InferencePool", "metadata": {"name": name}, "spec": settled | spec}


def _name_of(word: str) -> str:
    return next(image.name for image in wanted() if image.word == word)
