"""The `existing` provider: the cluster of a kubeconfig, if its context is allowed by name."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e.cluster.place import ClusterError

ALLOWED = "TREELINE_E2E_CONTEXTS"


def allowed(context: str, contexts: str) -> bool:
    """Return whether a context is in a list of exact names, separated by commas. There are no patterns, and no
    default."""
    return bool(context) and context in [name.strip() for name in contexts.split(",") if name.strip()]


class Existing:
    """A cluster that others maintain: `up` only checks it, `down` leaves it alone."""

    name = "existing"

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = os.environ if environment is None else environment

    def unfit(self) -> str | None:
        """Return why the cluster cannot be used from here."""
        if not self._environment.get(ALLOWED):
            return f"{ALLOWED} names no context that tests may use"
        return None

    def prepare(self) -> None:
        """Do nothing: the images are in the cluster."""

    def up(self) -> Path:
        """Check that the cluster answers. Return the path of its kubeconfig."""
        path = self._kubeconfig()
        context = self._kubectl("config", "current-context").strip()
        if not allowed(context, self._environment.get(ALLOWED, "")):
            raise ClusterError(
                f"the context '{context}' is not allowed: tests install and delete things in it. "
                f"If you mean it, set {ALLOWED}={context}"
            )
        self._kubectl("get", "--raw=/readyz")
        return path

    def down(self) -> None:
        """Do nothing: the cluster is not ours."""

    def status(self) -> dict[str, Any]:
        """Return provider, state, kubeconfig and nodes of the cluster."""
        state: dict[str, Any] = {"provider": self.name, "kubeconfig": None}
        try:
            state["kubeconfig"] = str(self.up())
        except ClusterError as error:
            return {**state, "state": "refused", "why": str(error)}
        nodes = json.loads(self._kubectl("get", "nodes", "-o", "json"))["items"]
        return {**state, "state": "up", "nodes": [n["metadata"]["name"] for n in nodes]}

    def commands(self) -> list[Path]:
        """Return no folders: the user has the cluster's tools."""
        return []

    def _kubeconfig(self) -> Path:
        # kubectl would merge several files; here it must be plain which one is meant
        path = Path(self._environment.get("KUBECONFIG") or Path.home() / ".kube/config")
        if not path.is_file():
            raise ClusterError(f"no kubeconfig at {path}: set KUBECONFIG to one file")
        return path

    def _kubectl(self, *args: str) -> str:
        command = ["kubectl", f"--kubeconfig={self._kubeconfig()}", "--request-timeout=20s", *args]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except FileNotFoundError:
            raise ClusterError("kubectl is not installed") from None
        if done.returncode:
            raise ClusterError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout
