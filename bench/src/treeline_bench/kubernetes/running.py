"""Operator and picker as processes, and their pages and the audit log."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from treeline_bench.context import BenchmarkError, Context
from treeline_bench.control_plane import ControlPlane
from treeline_bench.kubernetes.api import Api
from treeline_bench.processes import Child, answers, child, free_ports

OPERATOR = ("treeline-operator", ("system:masters",))
PICKER = ("treeline-picker", ("system:masters",))
OWN_NAMESPACE = "treeline-system"
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
START_S = 60.0
POLL_S = 0.5
"""Seconds between two reads of the operator's metrics, which cost it several milliseconds."""

_LINE = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Vitals:
    """From the operator's metrics: waiting keys, reconciliations and writes so far (without leases)."""

    depth: float
    reconciles: float
    writes: float


def read_vitals(page: str) -> Vitals:
    """From a metrics page."""
    depth = reconciles = writes = 0.0
    for line in _LINE.finditer(page):
        labels = dict(_LABEL.findall(line["labels"] or ""))
        value = float(line["value"])
        match line["name"]:
            case "treeline_operator_queue_depth":
                depth = value
            case "treeline_operator_reconciles_total":
                reconciles += value
            case "treeline_operator_api_requests_total":
                if labels["verb"] in WRITES and "leases" not in labels["resource"]:
                    writes += value
    return Vitals(depth, reconciles, writes)


@dataclass(frozen=True)
class Operator:
    """The running operator."""

    process: Child
    metrics_url: str

    def vitals(self) -> Vitals:
        self.process.check()
        return read_vitals(fetch(self.metrics_url).decode())

    def rss_mb(self) -> float:
        """Resident memory, in millions of bytes."""
        return float(psutil.Process(self.process.process.pid).memory_info().rss) / 1e6

    def await_quiet(self, quiet_s: float, timeout_s: float) -> None:
        """Waits until nothing has waited or been written for ``quiet_s``. Raises BenchmarkError."""
        deadline = time.monotonic() + timeout_s
        writes, since = -1.0, time.monotonic()
        while time.monotonic() - since < quiet_s:
            found = self.vitals()
            if found.depth or found.writes != writes:
                writes, since = found.writes, time.monotonic()
            if time.monotonic() > deadline:
                raise BenchmarkError(f"the operator is still busy after {timeout_s:g} s: {found}")
            time.sleep(min(POLL_S, quiet_s / 4))


@contextmanager
def cluster(context: Context) -> Iterator[tuple[ControlPlane, Api]]:
    """A control plane with the CRDs, and a client; both are stopped at the end."""
    context.display.phase("starting etcd, the API server and the controller manager")
    with ExitStack() as stack:
        plane = ControlPlane(parent=context.folder)
        stack.callback(plane.stop)
        plane.start(crds=True)
        host, _, port = plane.url.removeprefix("https://").partition(":")
        api = Api(host, int(port), plane.tls())
        stack.callback(api.close)
        yield plane, api


@contextmanager
def operator(plane: ControlPlane, folder: Path, *flags: str) -> Iterator[Operator]:
    """The operator for all namespaces, leading and synced; stopped at the end. Raises ChildFailed."""
    health, metrics = free_ports(2)
    argv = [sys.executable, "-m", "treeline_operator", "--kubeconfig", str(plane.kubeconfig(*OPERATOR))]
    argv += ["--lease-namespace", OWN_NAMESPACE, "--host", "127.0.0.1", "--log-level", "warning"]
    argv += ["--health-port", str(health), "--metrics-port", str(metrics), *flags]
    with child("operator", argv, folder) as process:
        url = f"http://127.0.0.1:{metrics}/metrics"
        ready = f"http://127.0.0.1:{health}/readyz"
        process.wait_until(lambda: answers(url) and leads(fetch(url).decode()), "taking the lease", START_S)
        process.wait_ready(ready, START_S)
        yield Operator(process, url)


def leads(page: str) -> bool:
    """Whether the replica with this metrics page is the leader."""
    return any(
        line["name"] == "treeline_operator_is_leader" and float(line["value"]) == 1 for line in _LINE.finditer(page)
    )


@dataclass(frozen=True)
class Picker:
    """A gateway's running picker."""

    process: Child
    endpoints_url: str

    def models(self) -> dict[str, set[str]]:
        """The names that it would serve, per pool."""
        self.process.check()
        pools: dict[str, Any] = json.loads(fetch(self.endpoints_url))["pools"]
        return {name: set(pool["models"]) for name, pool in pools.items()}


@contextmanager
def picker(plane: ControlPlane, folder: Path, namespace: str, gateway: str) -> Iterator[Picker]:
    """A gateway's picker, synced; stopped at the end. Raises ChildFailed."""
    grpc, health, metrics, admin = free_ports(4)
    argv = [sys.executable, "-m", "treeline_epp", "--kubeconfig", str(plane.kubeconfig(*PICKER))]
    argv += ["--gateway", gateway, "--pool-namespace", namespace, "--log-level", "warning"]
    argv += ["--grpc-port", str(grpc), "--grpc-health-port", str(health)]
    argv += ["--metrics-port", str(metrics), "--admin-port", str(admin)]
    with child("picker", argv, folder) as process:
        process.wait_ready(f"http://127.0.0.1:{admin}/ready", START_S)
        yield Picker(process, f"http://127.0.0.1:{admin}/endpoints")


def writes_seen(plane: ControlPlane) -> list[str]:
    """The operator's writes answered so far, without lease renewals."""
    return [
        f"{event['verb']} {event.get('requestURI')}"
        for event in plane.audit_events(OPERATOR[0])
        if event["verb"] in WRITES and (event.get("objectRef") or {}).get("resource") != "leases"
    ]


def fetch(url: str) -> bytes:
    """Gets a page of one of our processes. Raises BenchmarkError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10.0) as response:
            content: bytes = response.read()
            return content
    except OSError as error:
        raise BenchmarkError(f"{url}: {error}") from error
