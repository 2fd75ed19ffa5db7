"""A Hub in the cluster that gives models and adapters to the pods of a journey, and to the picker."""

from __future__ import annotations

from typing import Any, Final

from e2e.cluster.images import wanted
from e2e.cluster.place import ROOT

PORT: Final = 8080
MIRROR: Final = {"name": "HF_ENDPOINT", "value": f"http://hub:{PORT}"}
"""The environment of a container that downloads from it."""
_HUB: Final = {"app": "hub"}
_MODEL: Final = "/opt/treeline/models/tiny"
"""The model's folder in the runtime's image."""
_SERVE: Final = f"""import json, pathlib, sys, fake_hub, torch
from safetensors.torch import save
repos = {{"tiny": {{file.name: file.read_bytes() for file in pathlib.Path({_MODEL!r}).iterdir()}}}}
config = {{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}}
for seed, name in enumerate(sys.argv[1:]):
    random, tensors = torch.Generator().manual_seed(seed), {{}}
    for layer in range(6):
        at = f"base_model.model.model.layers.{{layer}}.self_attn.q_proj"
        tensors[f"{{at}}.lora_A.weight"] = torch.randn(8, 256, generator=random) / 2
        tensors[f"{{at}}.lora_B.weight"] = torch.randn(512, 8, generator=random) / 2
    repos[name] = {{"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(tensors)}}
hub = fake_hub.FakeHub(repos={{f"org/{{name}}": fake_hub.FakeRepo(files) for name, files in repos.items()}})
fake_hub.hub_server(hub, "", {PORT}).serve_forever()
"""


def hub(*adapters: str) -> list[dict[str, Any]]:
    """Return the objects of a Hub with the small model as `hf://org/tiny`, and adapters of it with random numbers, at
    `http://hub:8080` in its namespace, and of the network rule for pods that may otherwise connect to port 443 only."""
    image = image_name("runtime-cpu")
    scripts = {"fake_hub.py": (ROOT / "tests/support/fake_hub.py").read_text(), "serve.py": _SERVE}
    container = {
        "name": "hub",
        "image": image,
        "command": ["python3", "/hub/serve.py", *adapters],
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


def image_name(word: str) -> str:
    """Return the name of one of the cluster's images."""
    return next(image.name for image in wanted() if image.word == word)
