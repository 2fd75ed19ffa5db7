"""A control plane with LeaderWorkerSet: its definition, its controller as a process, and its webhooks."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from support.control_plane import CONTROLLERS, ROOT, ControlPlane, programs_or_skip
from support.ports import free_ports

DEFINITION = ROOT / "e2e/crds/leader-worker-set"
_MUTATES = {
    "/mutate-leaderworkerset-x-k8s-io-v1-leaderworkerset": ("leaderworkerset.x-k8s.io", "leaderworkersets"),
    "/mutate--v1-pod": ("", "pods"),
}
"""Without the second, pods do not get the labels and the environment of their group."""


class GroupPlane(ControlPlane):
    """A control plane that can make groups of pods; `start_groups` installs what it needs for that."""

    def __init__(self) -> None:
        self._program = programs_or_skip("leader-worker-set")["leader-worker-set"] / "leader-worker-set"
        super().__init__(controllers=(*CONTROLLERS, "statefulset-controller"))

    def start_groups(self) -> None:
        """Install LeaderWorkerSet, and return when its webhooks answer."""
        self.install_crds(DEFINITION)
        (port,) = free_ports(1)
        served = self._authority.issue("webhooks", "webhooks", addresses=("127.0.0.1",))
        folder = self.folder / "webhooks"
        folder.mkdir()
        for name, source in (("tls.crt", served.cert), ("tls.key", served.key)):
            (folder / name).symlink_to(source)
        config = folder / "config.json"
        config.write_text(
            json.dumps(
                {
                    "apiVersion": "config.lws.x-k8s.io/v1alpha1",
                    "kind": "Configuration",
                    "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(folder)},
                    "internalCertManagement": {"enable": False},
                    "leaderElection": {"leaderElect": False},
                    "metrics": {"bindAddress": "0"},
                    "health": {"healthProbeBindAddress": "0"},
                }
            )
        )
        admin = ("--kubeconfig", str(self.admin), "--config", str(config))
        self._spawn("groups", [str(self._program), *admin])
        path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
        self.request("POST", path, _webhooks(port, self._authority.cert))
        probe = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}}
        probe["spec"] = {"containers": [{"name": "one", "image": "one"}], "automountServiceAccountToken": False}

        def answers() -> bool:
            self.check()
            pods = "/api/v1/namespaces/default/pods?dryRun=All"
            return self._http.post(pods, json=probe).status_code == 201

        self._until(answers, "the webhooks of LeaderWorkerSet to answer")


def _webhooks(port: int, authority: Path) -> dict[str, Any]:
    trust = base64.b64encode(authority.read_bytes()).decode()
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "leader-worker-set"},
        "webhooks": [
            {
                "name": f"{resource}.groups.test",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "clientConfig": {"url": f"https://127.0.0.1:{port}{path}", "caBundle": trust},
                "rules": [
                    {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": [resource]}
                ],
            }
            for path, (group, resource) in _MUTATES.items()
        ],
    }
