"""Routers as processes: our picker behind Envoy, and others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from treeline_sim.model.engine import EngineConfig

from treeline_bench.context import BenchmarkError, Context
from treeline_bench.envoy import bootstrap, envoy
from treeline_bench.processes import child, free_ports

MODEL_NAME = "tiny"
OURS = "treeline"
START_S = 60.0


@dataclass(frozen=True)
class Peer:
    """A router from PyPI in an environment of its own, and the compared version."""

    name: str
    version: str

    def find(self, programs: Mapping[str, Path]) -> Path:
        """Its program in `programs`, else on the PATH. Raises BenchmarkError that says what to do."""
        found = programs.get(self.name) or shutil.which(self.name)
        if found is None:
            raise BenchmarkError(f"{self.name} is not installed: {self._how}")
        try:
            said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=START_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise BenchmarkError(f"{self.name} does not start: {error}") from None
        version = said.stdout.strip().rpartition(" ")[2]
        if version != self.version:
            raise BenchmarkError(f"{self.name} is {version or 'of no version'} and not {self.version}: {self._how}")
        return Path(found)

    @property
    def _how(self) -> str:
        install = f"python -m venv DIR && DIR/bin/pip install {self.name}=={self.version}"
        return f"{install}, then --peer-path {self.name}=DIR/bin/{self.name}"

    @contextmanager
    def running(self, program: Path, engines: Sequence[str], context: Context) -> Iterator[int]:
        """Its port, once it knows all engines. Raises ChildFailed."""
        port, metrics = free_ports(2)
        argv = [str(program), "launch", "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", "warn"]
        argv += ["--policy", "cache_aware", "--worker-urls", *(f"http://{address}" for address in engines)]
        with child(self.name, argv, context.folder) as process:
            url = f"http://127.0.0.1:{port}"
            process.wait_until(lambda: _workers(url) == len(engines), "finding the engines", START_S)
            process.wait_ready(f"{url}/readiness", START_S)
            yield port


PEERS = {peer.name: peer for peer in (Peer("smg", "1.13.0"), Peer("sglang-router", "0.3.2"))}
"""Both have the same command line. Each package installs a program `smg`, so they need separate environments."""


def _workers(url: str) -> int:
    """A peer's number of healthy engines; 0 while it does not answer."""
    try:
        with httpx.Client(trust_env=False, timeout=2) as http:
            workers = http.get(f"{url}/workers").raise_for_status().json()["workers"]
    except httpx.HTTPError:
        return 0
    return sum(worker["is_healthy"] for worker in workers)


@contextmanager
def ours(engines: Sequence[str], context: Context) -> Iterator[int]:
    """The port of an Envoy with one worker that asks our picker, once this follows all engines. Raises ChildFailed,
    EnvoyMissing."""
    grpc, eds, metrics, pages, bare, port, admin = free_ports(7)
    argv = [sys.executable, "-m", "treeline", "pick", "--log-level", "warning"]
    argv += ["--grpc-port", str(grpc), "--grpc-health-port", str(eds)]
    argv += ["--metrics-port", str(metrics), "--admin-port", str(pages)]
    for number, address in enumerate(engines):
        argv += ["--endpoint", f"sim{number}={address}"]
    config = bootstrap(bare_port=bare, picker_port=port, admin_port=admin, ext_proc_port=grpc, eds_port=eds)
    with child("picker", argv, context.folder) as picker:
        picker.wait_ready(f"http://127.0.0.1:{pages}/ready", START_S)
        page = f"http://127.0.0.1:{metrics}/metrics"
        picker.wait_until(lambda: follows(page, len(engines)), "following the engines' events", START_S)
        with envoy(config, context.folder) as proxy:
            proxy.wait_ready(f"http://127.0.0.1:{port}/ready", START_S)
            yield port


def follows(metrics: str, engines: int) -> bool:
    """Whether the picker with this metrics page has applied everything that so many engines published."""
    with httpx.Client(trust_env=False, timeout=10) as http:
        page = http.get(metrics).raise_for_status().text
    states = [line.split() for line in page.splitlines() if line.startswith("treeline_epp_kv_subscriptions{")]
    return sum(float(count) for name, count in states if "live" in name or "checking" in name) == engines


@contextmanager
def engines(count: int, engine: EngineConfig, speed: float, context: Context) -> Iterator[list[str]]:
    """Addresses of so many new engines of the default preset with that memory, in one process. Raises ChildFailed."""
    port, *others = free_ports(4, run=count)
    argv = [sys.executable, "-m", "treeline", "sim", "serve", "--model", str(context.model), "--name", MODEL_NAME]
    argv += ["--count", str(count), "--speedup", str(speed), "--kv-tokens", str(engine.kv_tokens)]
    argv += ["--port", str(port)]
    for name, first in zip(("events", "replay", "load"), others, strict=True):
        argv += [f"--{name}-port", str(first)]
    with child("engines", argv, context.folder) as process:
        addresses = [f"127.0.0.1:{port + number}" for number in range(count)]
        for address in addresses:
            process.wait_ready(f"http://{address}/ready", START_S)
        yield addresses
