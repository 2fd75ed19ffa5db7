"""The `kind` provider: nodes are Docker containers. Images are built by Docker and loaded into them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from e2e.cluster.images import wanted
from e2e.cluster.place import ClusterError, Home
from e2e.cluster.progress import Progress

CLUSTER = "treeline-e2e"


class Kind:
    """Owns the kind cluster of our name."""

    name = "kind"

    def __init__(
        self,
        home: Home | None = None,
        progress: Progress | None = None,
        *,
        nodes: int | None = None,
        images: bool = True,
    ) -> None:
        self.home = home or Home.default()
        self.progress = progress or Progress()
        self._nodes, self._images = nodes or 1, images

    def unfit(self) -> str | None:
        """Return why kind cannot run here."""
        for command in ("docker", "kind"):
            if not shutil.which(command):
                return f"{command} is not installed"
        if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
            return "Docker's daemon does not answer"
        return None

    def prepare(self) -> None:
        """Build the images; Docker skips those that it has."""
        for image in wanted() if self._images else []:
            with self.progress.step(f"building {image.name}"):
                self._run(*image.build("docker"))

    def up(self) -> Path:
        """Create the cluster unless it exists; build and load the images. Return the path of its kubeconfig."""
        if reason := self.unfit():
            raise ClusterError(f"the kind provider: {reason}")
        self.prepare()
        self.home.make()
        if not self._exists():
            with self.progress.step("making the cluster"):
                self._run(
                    "kind",
                    "create",
                    "cluster",
                    "--name",
                    CLUSTER,
                    "--wait=120s",
                    "--config=-",
                    stdin=self._config(),
                )
        self._run("kind", "export", "kubeconfig", "--name", CLUSTER, f"--kubeconfig={self.home.kubeconfig}")
        for image in wanted() if self._images else []:
            with self.progress.step(f"loading {image.name}"):
                self._run("kind", "load", "docker-image", "--name", CLUSTER, image.name)
        return self.home.kubeconfig

    def down(self) -> None:
        """Delete the cluster and the work folder; Docker keeps the images."""
        if self.unfit() is None and self._exists():
            self._run("kind", "delete", "cluster", "--name", CLUSTER)
        self.home.remove()

    def status(self) -> dict[str, Any]:
        """Return provider, state, kubeconfig and nodes of the cluster."""
        up = self.unfit() is None and self._exists()
        kubeconfig = str(self.home.kubeconfig) if up and self.home.kubeconfig.exists() else None
        nodes = self._run("kind", "get", "nodes", "--name", CLUSTER).split() if up else []
        return {
            "provider": self.name,
            "state": "up" if up else "down",
            "kubeconfig": kubeconfig,
            "nodes": nodes,
        }

    def commands(self) -> list[Path]:
        """Return no folders: kind's users have the tools in PATH."""
        return []

    def _config(self) -> str:
        roles = ["control-plane", *["worker"] * (self._nodes - 1)]
        nodes = "".join(f"  - role: {role}\n" for role in roles)
        return f"kind: Cluster\napiVersion: kind.x-k8s.io/v1alpha4\nnodes:\n{nodes}"

    def _exists(self) -> bool:
        return CLUSTER in self._run("kind", "get", "clusters").split()

    def _run(self, *command: str, stdin: str | None = None) -> str:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-1500:]}")
        return done.stdout
