"""Treeline in a cluster: installed by its chart, given pools, reached by its URL."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from typing import Any, Final

import httpx
from treeline_operator.controller.kinds import CHILDREN
from treeline_wire import ports

from e2e.kit.kube import PATIENCE_S, Kube, condition, is_ready

SYSTEM: Final = "treeline-system"
RELEASE: Final = "treeline"
OPERATOR: Final = "treeline-operator"
OPERATORS: Final = f"app.kubernetes.io/name={OPERATOR}"
"""Selects the operator's pods."""
API: Final = "treeline.dev/v1alpha1"
CHART: Final = "charts/treeline"


def pool(name: str, **spec: Any) -> dict[str, Any]:
    """Return an InferencePool with the small model, sized for a small machine, reached through a port of the nodes."""
    gateway = spec.pop("gateway", {})
    standalone = {"serviceType": "NodePort", "exposeRouting": True} | gateway.pop("standalone", {})
    engine = {
        "threads": 1,
        "resources": {"requests": {"cpu": "50m", "memory": "400Mi"}, "limits": {"memory": "2Gi"}},
    } | spec.pop("engine", {})
    settled: dict[str, Any] = {
        "model": {"uri": "builtin://tiny"},
        "replicas": 2,
        "engine": engine,
        "drain": {"timeoutSeconds": 600},  # longer than any wait here, so that a needless full drain fails a test
        "gateway": {"standalone": standalone, **gateway},
    }
    return {"apiVersion": API, "kind": "InferencePool", "metadata": {"name": name}, "spec": settled | spec}


def model(name: str, model_name: str, pool_name: str, **spec: Any) -> dict[str, Any]:
    """Return an InferenceModel."""
    spec = {"modelName": model_name, "poolRef": {"name": pool_name}} | spec
    return {"apiVersion": API, "kind": "InferenceModel", "metadata": {"name": name}, "spec": spec}


@dataclass(frozen=True)
class Installed:
    """Treeline in a cluster, and a namespace to serve in."""

    kube: Kube
    namespace: str

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kube.apply(self.namespace, *objects)

    def change(self, name: str, **spec: Any) -> None:
        """Change a pool's spec by a merge patch."""
        self.kube.patch("tlpool", name, self.namespace, {"spec": spec})

    def pool(self, name: str) -> dict[str, Any]:
        found = self.kube.look(f"/apis/{API}/namespaces/{self.namespace}/inferencepools/{name}")
        assert found is not None, f"there is no pool {name}"
        return found

    def is_ready(self, name: str) -> bool:
        """Return whether the pool's status covers its latest spec and says Ready with all pods, and no change is in
        progress."""
        found = self.pool(name)
        ready, progressing = condition(found, "Ready"), condition(found, "Progressing")
        return (
            ready.get("status") == "True"
            and condition(found, "WorkloadsReady").get("status") == "True"
            and progressing.get("status") == "False"
            and ready.get("observedGeneration") == found["metadata"]["generation"]
        )

    def await_ready(self, *names: str, seconds: float = PATIENCE_S) -> None:
        """Wait until the pools serve their latest specs and no change is in progress."""
        for name in names:
            self.until(lambda name=name: self.is_ready(name), f"pool {name} to be ready", seconds)

    def until(self, look: Any, what: str, seconds: float = PATIENCE_S) -> Any:
        return self.kube.until(look, what, seconds, self.namespace)

    def pods(self, component: str, pool_name: str = "") -> list[dict[str, Any]]:
        """Return the pods of a component (runtime, epp, edge), including those being deleted."""
        selector = f"treeline.dev/component={component}"
        selector += f",treeline.dev/pool={pool_name}" if pool_name else ""
        return self.kube.pods(self.namespace, selector)

    def ready_pods(self, component: str, pool_name: str = "") -> list[dict[str, Any]]:
        return [pod for pod in self.pods(component, pool_name) if is_ready(pod)]

    def url(self, gateway: str = "treeline") -> str:
        """Return the gateway's URL: a port of a node, once the node's kube-proxy has opened it.

        (It does that within a second of the endpoint's being ready, and nobody can see when.)
        """
        service = self.kube.get("service", f"{gateway}-gateway", self.namespace)
        assert service is not None, f"gateway {gateway} has no Service"
        port = service["spec"]["ports"][0]["nodePort"]
        node = self.kube.items("nodes", "")[0]
        address = next(a["address"] for a in node["status"]["addresses"] if a["type"] == "InternalIP")
        self.until(lambda: _accepts(address, port), f"port {port} of the nodes to be open")
        return f"http://{address}:{port}"

    def delete_pod(self, pod: dict[str, Any], *, now: bool = False) -> None:
        """Delete a pod as `kubectl delete pod` does. ``now`` leaves it no time to shut down."""
        how = ("--grace-period=0", "--force") if now else ()
        meta = pod["metadata"]
        self.kube.kubectl("-n", meta["namespace"], "delete", "pod", meta["name"], "--wait=false", *how)

    def logs(self, *, check: bool = True) -> str:
        """Return the logs of the namespace's pods and of the operator's, with times."""
        told = ("--all-containers", "--prefix", "--timestamps", "--tail=-1")
        return "".join(
            self.kube.kubectl("-n", namespace, "logs", "-l", selector, *told, check=check)
            for namespace, selector in ((self.namespace, "treeline.dev/component"), (SYSTEM, OPERATORS))
        )

    def inside(self, pod: dict[str, Any], *command: str, check: bool = False) -> str:
        """Run a command in a pod's first container and return its output. The container may die of it."""
        return self.kube.kubectl("-n", self.namespace, "exec", pod["metadata"]["name"], "--", *command, check=check)

    def _text(self, pod: dict[str, Any], url: str) -> str:
        """Return what a pod serves on loopback; the network need not allow anybody else in."""
        script = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=30).read().decode())"
        return self.inside(pod, "python3", "-c", script, check=True)

    def page(self, pod: dict[str, Any], url: str) -> Any:
        """Return a JSON document that a pod serves on loopback."""
        return json.loads(self._text(pod, url))

    def picker_metrics(self) -> dict[str, float]:
        """Return the metrics of the namespace's one picker, by name and labels."""
        (picker,) = self.ready_pods("epp")
        lines = self._text(picker, f"http://127.0.0.1:{ports.METRICS}/metrics").splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def conclude(self) -> None:
        """Delete all pools and wait until nothing of them is left."""
        self.kube.kubectl("-n", self.namespace, "delete", "tlpool,tlmodel", "--all", "--wait=false")
        self.until(lambda: not self.leftovers(), "everything of the pools to be gone", 120.0)

    def leftovers(self) -> list[str]:
        """List the objects that the operator made and that still exist."""
        kinds = ",".join(("replicasets.apps", "secrets", *(watched.resource.label for watched in CHILDREN)))
        selector = "app.kubernetes.io/managed-by=treeline"
        return self.kube.kubectl("-n", self.namespace, "get", kinds, "-l", selector, "-o", "name").split()


def install(kube: Kube, *settings: str, chart: str = CHART) -> None:
    """Run `helm install` (or upgrade) of this checkout's chart, as the README shows it."""
    words = [word for setting in settings for word in ("--set", setting)]
    kube.helm("upgrade", "--install", RELEASE, chart, "--namespace", SYSTEM, "--create-namespace", *words)


def installed_and_running(kube: Kube, *settings: str, chart: str = CHART) -> None:
    """Install, or upgrade, and wait for the operator's pods."""
    install(kube, *settings, chart=chart)
    wait = ("rollout", "status", f"deployment/{OPERATOR}", "--timeout=300s")
    kube.kubectl("-n", SYSTEM, *wait, timeout_s=330)


def uninstall(kube: Kube) -> None:
    """Run `helm uninstall` if the chart is installed."""
    kube.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--ignore-not-found")


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def ask(
    url: str, question: str = "What is the capital of France?", model_name: str = "tiny", **more: Any
) -> httpx.Response:
    """Send one request, as curl does."""
    body = {
        "model": model_name,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 24,
        **more,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30.0)


def in_room(number: int) -> list[dict[str, str]]:
    """Return a question after long rules that are the room's own: the pods that served the room have the prefix
    cached."""
    rules = f"These are the rules of room {number}. " + "Answer in one short sentence. " * 60
    return [{"role": "system", "content": rules}, {"role": "user", "content": "What is the capital of Peru?"}]


def await_answer(url: str, seconds: float = PATIENCE_S) -> httpx.Response:
    """Ask until an answer has status 200, and return it."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer = ask(url)
            if answer.status_code == 200:
                return answer
            last = f"{answer.status_code} {answer.text[:200]}"
        except httpx.TransportError as exc:
            last = repr(exc)
        assert time.monotonic() < deadline, f"no answer in {seconds:g} s: {last}"
        time.sleep(0.1)
