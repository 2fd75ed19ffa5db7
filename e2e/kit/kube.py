"""Runs kubectl and helm for a journey, and polls a cluster until it shows what the journey waits for."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from kubernetes.client import ApiClient
from kubernetes.config import new_client_from_config

from e2e.cluster.place import ROOT

PATIENCE_S: Final = 300.0
"""Even on a busy machine this ends only waits that hang."""
T = TypeVar("T")


class KubeFailed(AssertionError):
    """A command failed; the message is its output."""


class Seen(NamedTuple):
    """A line of a command's output, and when it came (``time.monotonic``)."""

    at: float
    text: str


@dataclass(frozen=True)
class Kube:
    """A cluster, by its kubeconfig. ``binaries`` come first in PATH: kubectl and helm of the cluster's provider."""

    kubeconfig: Path
    binaries: Path | None = None

    def _environment(self) -> dict[str, str]:
        path = f"{self.binaries}:{os.environ['PATH']}" if self.binaries else os.environ["PATH"]
        return os.environ | {"KUBECONFIG": str(self.kubeconfig), "PATH": path}

    def run(self, *command: str, stdin: str | None = None, timeout_s: float = 300.0, check: bool = True) -> str:
        """Run a command and return its stdout. Raises KubeFailed with its stderr."""
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=self._environment(),
            cwd=ROOT, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise KubeFailed(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True, timeout_s: float = 300.0) -> str:
        """Run ``kubectl WORDS``."""
        return self.run("kubectl", *words, stdin=stdin, check=check, timeout_s=timeout_s)

    def helm(self, *words: str, stdin: str | None = None, timeout_s: float = 300.0) -> str:
        """Run ``helm WORDS``."""
        return self.run("helm", *words, stdin=stdin, timeout_s=timeout_s)

    @cached_property
    def _client(self) -> ApiClient:
        return new_client_from_config(str(self.kubeconfig))  # type: ignore[no-untyped-call,no-any-return]

    def look(self, path: str, **query: str) -> dict[str, Any] | None:
        """Return the API server's object at a path, or None if there is none. Raises KubeFailed.

        For what is looked at again and again: a kubectl for each look takes a tenth of a second of a core, which the
        pods that are waited for would miss.
        """
        client = self._client
        asked = client.param_serialize("GET", path, query_params=list(query.items()), auth_settings=["BearerToken"])
        answer = client.call_api(*asked, _request_timeout=30.0)
        text: bytes = answer.read()  # type: ignore[no-untyped-call]
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise KubeFailed(f"GET {path}: {answer.status} {text[:500]!r}")
        found: dict[str, Any] = json.loads(text)
        return found

    def pods(self, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        """Return the pods of a namespace, including those being deleted."""
        found = self.look(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)
        return list(found["items"]) if found else []

    def get(self, kind: str, name: str, namespace: str) -> dict[str, Any] | None:
        """Return an object, or None."""
        text = self.kubectl("-n", namespace, "get", kind, name, "-o", "json", "--ignore-not-found")
        found: dict[str, Any] | None = json.loads(text) if text else None
        return found

    def items(self, kind: str, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        """Return the objects of a kind; of all namespaces if none is named."""
        where = ("-n", namespace) if namespace else ("-A",)
        chosen = ("-l", selector) if selector else ()
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, *where, "-o", "json", *chosen))["items"]
        return found

    def apply(self, namespace: str, *objects: dict[str, Any]) -> None:
        """Apply objects, as a user does."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.kubectl("-n", namespace, "apply", "-f", "-", stdin=text)

    def patch(self, kind: str, name: str, namespace: str, change: dict[str, Any]) -> None:
        """Apply a merge patch."""
        self.kubectl("-n", namespace, "patch", kind, name, "--type=merge", "-p", json.dumps(change))

    def until(self, look: Callable[[], T], what: str, seconds: float = PATIENCE_S, namespace: str = "") -> T:
        """Wait for the first true answer and return it. Raises KubeFailed with the state of the namespace."""
        deadline = time.monotonic() + seconds
        while not (found := look()):
            if time.monotonic() > deadline:
                raise KubeFailed(f"waited {seconds:g} s for {what}\n{self.picture(namespace)}")
            time.sleep(0.25)
        return found

    @contextmanager
    def started(self, *command: str) -> Iterator[list[Seen]]:
        """Run a command that does not end by itself during a block. Yields its lines, as they come."""
        seen: list[Seen] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self._environment(), cwd=ROOT) as process:

            def read() -> None:
                assert process.stdout is not None
                seen.extend(Seen(time.monotonic(), line.strip()) for line in process.stdout)

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            try:
                yield seen
            finally:
                process.terminate()
                reader.join(10.0)

    @contextmanager
    def watched(self, kind: str, namespace: str, path: str, selector: str = "") -> Iterator[list[Seen]]:
        """Watch a jsonpath of the objects of a kind; yields a list that gets a line for each change."""
        shown = f"jsonpath={path}{{'\\n'}}"
        with self.started("kubectl", "-n", namespace, "get", kind, "-l", selector, "--watch", "-o", shown) as seen:
            yield seen

    def picture(self, namespace: str) -> str:
        """Return pools, models, pods and events of a namespace, for the report of a failed wait."""
        where = ("-n", namespace) if namespace else ("-A",)
        looks = (
            ("get", "tlpool,tlmodel,pods", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
        )
        return "\n".join(self.kubectl(*look, *where, check=False)[-6000:] for look in looks)


def condition(obj: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    """Return a condition of an object; empty if it has none of that type."""
    conditions = ((obj or {}).get("status") or {}).get("conditions") or []
    return next((dict(one) for one in conditions if one["type"] == kind), {})


def is_ready(pod: dict[str, Any]) -> bool:
    """Return whether a pod is Ready and not being deleted."""
    return condition(pod, "Ready").get("status") == "True" and "deletionTimestamp" not in pod["metadata"]
