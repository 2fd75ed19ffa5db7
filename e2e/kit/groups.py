"""LeaderWorkerSet in a cluster without a registry: built from its Go module, installed by that module's manifests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from e2e.kit.kube import Kube

PROGRAM: Final = "leader-worker-set"
"""Its name in scripts/control_plane.sh, which brings the manifests along."""
SYSTEM: Final = "lws-system"
IMAGE: Final = "docker.io/library/treeline-e2e-leader-worker-set:e2e"
_MANAGER: Final = "lws-controller-manager"


class Groups:
    """Owns an installation of LeaderWorkerSet. ``folder`` is for the manifests with our image."""

    def __init__(self, kube: Kube, program: Path, folder: Path) -> None:
        self._kube, self._folder = kube, folder
        base = os.path.relpath(program / "config" / "default", folder)
        (folder / "kustomization.yaml").write_text(json.dumps({"resources": [base], "patches": [_of_manager()]}))

    def install(self) -> None:
        """Install it. Returns when its controller is ready: until then the API server refuses pods."""
        self._kube.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(self._folder))
        wait = ("rollout", "status", f"deployment/{_MANAGER}", "--timeout=300s")
        self._kube.kubectl("-n", SYSTEM, *wait, timeout_s=330)

    def remove(self) -> None:
        """Remove it, with its definition and webhooks."""
        self._kube.kubectl("delete", "--ignore-not-found", "-k", str(self._folder), timeout_s=330)


def _of_manager() -> dict[str, Any]:
    """Return the change of its Deployment for a small machine, and for an image with nothing but the program."""
    manager = "/spec/template/spec/containers/0"
    changes = {
        "/spec/replicas": 1,
        f"{manager}/command": [PROGRAM],
        f"{manager}/image": IMAGE,
        f"{manager}/imagePullPolicy": "Never",
        f"{manager}/resources": {"requests": {"cpu": "50m", "memory": "100Mi"}},
        f"{manager}/securityContext/runAsUser": 65532,
    }
    patch = [{"op": "add", "path": path, "value": value} for path, value in changes.items()]
    return {"target": {"kind": "Deployment", "name": _MANAGER}, "patch": json.dumps(patch)}
