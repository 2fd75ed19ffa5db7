"""Benchmark `gie`: our picker beside the one of the Gateway API Inference Extension 1.5, which is written in Go.

Method. Each in turn, before one Envoy (one worker): an InferencePool of two simulated engines (`sim/`, with vLLM's
metrics) on a minimal Kubernetes API (`conformance/api_server.py`), and Envoy as that project configures it: bodies of
requests and answers go through the picker as streams (`FULL_DUPLEX_STREAMED`), both trailers are sent. Each has the
default settings of its project but TLS, which both are without. The figures are of the picker's process, all its
threads counted, as in the benchmark `picker`: requests answered ÷ CPU-seconds under a saturating closed loop, and the
99th percentile of a paced load (200 a second, 1 KB).

Bias. Chat completions are repeated, so both pickers know every prompt after a while; ours by its own requests alone,
since these engines publish nothing that a pool of vLLM's metrics announces. Go's garbage collector and scheduler have
the cores that are there; with the picker pinned to one core both have one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treeline_bench.client.messages import Call, ClosedLoop, Paced, Plan, Report
from treeline_bench.client.process import run_client
from treeline_bench.conformance.api_server import NAMESPACE, PODS, POOLS, ApiServer
from treeline_bench.conformance.pods import free_port
from treeline_bench.context import Benchmark, BenchmarkError, Context
from treeline_bench.envoy import bootstrap_for_pods, envoy_binary
from treeline_bench.machine import usable_cores
from treeline_bench.metrics import row
from treeline_bench.picker import FULL as PICKER
from treeline_bench.picker import Settings, build_load
from treeline_bench.processes import Child, child, free_ports
from treeline_bench.prompts import PromptMaker
from treeline_bench.results import Row
from treeline_bench.stats import percentile

POOL, LABELS = "bench", {"app": "bench"}
ADDRESSES = ("127.0.0.2", "127.0.0.3")
SIZES = {"1kb": 1_000, "30kb": 30_000, "220kb": 220_000}
FULL = replace(
    PICKER,
    prompts={"1kb": 256, "30kb": 64, "220kb": 8},
    sizes=SIZES,
    concurrency={"1kb": 64, "30kb": 32, "220kb": 20},
)
QUICK = replace(FULL, prompts={"1kb": 16, "30kb": 4, "220kb": 2}, turn_s=1.0, saturate_s=1.5)
START_S = 60.0
_BINARY = "TREELINE_GIE_PICKER"


def gie_binary() -> Path:
    """`$TREELINE_GIE_PICKER`, else the one that `make conformance` has built. Raises BenchmarkError."""
    if named := os.environ.get(_BINARY):
        return Path(named)
    cache = Path(os.environ.get("TREELINE_CACHE") or Path.home() / ".cache" / "treeline")
    found = sorted(cache.glob("bin/gie-picker-*/gie-picker"))
    if not found:
        raise BenchmarkError(
            f"no gie-picker here: `scripts/control_plane.sh gie-picker` builds it (Go), or set {_BINARY}"
        )
    return found[-1]


class World:
    """The Kubernetes API with the pool, in a thread of its own."""

    def __init__(self, folder: Path, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._api = ApiServer()
        self._api.held.set()
        self._do(self._api.start())
        spec = {
            "selector": {"matchLabels": LABELS},
            "targetPorts": [{"number": port}],
            "endpointPickerRef": {"name": "picker", "kind": "Service", "port": {"number": 9002}},
        }
        self._loop.call_soon_threadsafe(lambda: self._api.put(POOLS, POOL, spec=spec, status={}))
        for at, address in enumerate(ADDRESSES):
            self._loop.call_soon_threadsafe(self._put_pod, f"pod-{at}", address, port)
        self.kubeconfig = self._api.write_kubeconfig(folder)

    def _put_pod(self, name: str, address: str, port: int) -> None:
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "hostIP": "127.0.0.1",
            "conditions": [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")],
        }
        container = {"name": "vllm", "image": "vllm", "ports": [{"containerPort": port}]}
        self._api.put(PODS, name, labels=LABELS, spec={"containers": [container], "nodeName": "node"}, status=status)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    async def _end(self) -> None:
        await self._api.stop()
        watching = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    def close(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@dataclass(frozen=True)
class Rig:
    """A picker behind Envoy, and where to send."""

    picker: Child
    port: int
    folder: Path
    client_cores: Sequence[int]

    def send(self, plan: Plan) -> Report:
        return run_client(plan, self.folder, self.client_cores)


def command_of(name: str, ports: Sequence[int], kubeconfig: Path) -> list[str]:
    """How a picker is started: `ours` or `gie`; ports of ext_proc, health, metrics and our pages."""
    flags = ["--pool-name", POOL, "--pool-namespace", NAMESPACE, "--secure-serving=false"]
    flags += ["--grpc-port", str(ports[0]), "--grpc-health-port", str(ports[1]), "--metrics-port", str(ports[2])]
    if name == "gie":
        return [str(gie_binary()), *flags, "--metrics-endpoint-auth=false", "--tracing=false", "--enable-pprof=false"]
    ours = ["--kubeconfig", str(kubeconfig), "--admin-port", str(ports[3]), "--log-level", "warning"]
    return [sys.executable, "-m", "treeline_epp", *flags, *ours]


@contextmanager
def running(name: str, world: World, pods: Sequence[tuple[str, int]], folder: Path) -> Iterator[Rig]:
    """The picker, and Envoy before it; both have answered a request."""
    cores = usable_cores()
    picker_cores, other_cores = cores[-1:], cores[:-1] or cores
    *ports, listen, admin = free_ports(6)
    with ExitStack() as stack:
        argv = command_of(name, ports, world.kubeconfig)
        environment = {"KUBECONFIG": str(world.kubeconfig)}
        picker = stack.enter_context(child(name, argv, folder, picker_cores, environment))
        config = folder / f"envoy-{name}.json"
        config.write_text(json.dumps(bootstrap_for_pods(listen, admin, ports[0], pods)))
        argv = [str(envoy_binary()), "--config-path", str(config), "--log-level", "warning"]
        argv += ["--concurrency", "1", "--disable-hot-restart"]
        stack.enter_context(child(f"envoy-{name}", argv, folder, other_cores))
        rig = Rig(picker, listen, folder, other_cores)
        yield rig


def _plan(rig: Rig, calls: list[Call], arrivals: ClosedLoop | Paced, **end: float) -> Plan:
    """`count` or `seconds` is its end."""
    count, seconds = end.get("count"), end.get("seconds")
    whole = None if count is None else int(count)
    return Plan("127.0.0.1", rig.port, calls, arrivals, whole, seconds, timeout_s=10.0)


@dataclass(frozen=True)
class Figures:
    """Of one picker: requests per CPU-second by size, paced p99 in ms, and what was not a 200."""

    per_core: dict[str, float]
    p50_ms: float
    p99_ms: float
    errors: int


def _measure(name: str, rig: Rig, load: dict[str, list[Call]], settings: Settings, context: Context) -> Figures:
    def ready() -> bool:
        report = rig.send(_plan(rig, load["1kb"], ClosedLoop(1), count=len(load["1kb"])))
        return report.errors() == 0

    context.display.phase(f"{name}: until each prompt was answered")
    rig.picker.wait_until(ready, "answering each request", START_S)
    context.display.phase(f"{name}: {settings.rate_per_s:g} requests/s")
    paced = rig.send(_plan(rig, load["1kb"], Paced(settings.rate_per_s), seconds=settings.turn_s))
    times = [outcome.latency_ms for outcome in paced.answered()]
    per_core, errors = {}, paced.errors()
    for size in settings.sizes:
        context.display.phase(f"{name}: saturation with {size} bodies, {settings.saturate_s:g} s")
        before = rig.picker.cpu_seconds()
        arrivals = ClosedLoop(settings.concurrency[size])
        report = rig.send(_plan(rig, load[size], arrivals, seconds=settings.saturate_s))
        per_core[size] = len(report.answered()) / (rig.picker.cpu_seconds() - before)
        errors += report.errors()
    return Figures(per_core, percentile(times, 50), percentile(times, 99), errors)


def run(context: Context) -> list[Row]:
    settings = QUICK if context.quick else FULL
    gie_binary()
    load = build_load(settings, PromptMaker.of_model(context.model)).calls
    port = free_port(ADDRESSES)
    found: dict[str, Figures] = {}
    with ExitStack() as stack:
        world = World(context.folder, port)
        stack.callback(world.close)
        for at, address in enumerate(ADDRESSES):
            argv = [sys.executable, "-m", "treeline_bench.sim", "--model", str(context.model), "--host", address]
            argv += ["--port", str(port), "--fixed"]
            argv += [
                f"--{word}-port={number}"
                for word, number in zip(("events", "replay", "load"), free_ports(3), strict=True)
            ]
            engine = stack.enter_context(child(f"sim-{at}", argv, context.folder, usable_cores()[:-1] or None))
            engine.wait_ready(f"http://{address}:{port}/ready", START_S)
        for name in ("ours", "gie"):
            with running(name, world, [(address, port) for address in ADDRESSES], context.folder) as rig:
                found[name] = _measure(name, rig, load, settings, context)
    ours, gie = found["ours"], found["gie"]
    rows: list[Row] = []
    for size in settings.sizes:
        rows += [
            row(f"gie.vs_gie.rps_per_core.{size}", ours.per_core[size] / gie.per_core[size]),
            row(f"gie.rps_per_core.{size}", ours.per_core[size]),
            row(f"gie.rps_per_core_gie.{size}", gie.per_core[size]),
        ]
    rows += [
        row("gie.vs_gie.paced_p99", ours.p99_ms / gie.p99_ms),
        row("gie.paced_ms.p50", ours.p50_ms),
        row("gie.paced_ms.p99", ours.p99_ms),
        row("gie.paced_gie_ms.p50", gie.p50_ms),
        row("gie.paced_gie_ms.p99", gie.p99_ms),
        row("gie.errors", ours.errors),
        row("gie.errors_gie", gie.errors),
    ]
    return rows


BENCHMARK = Benchmark(
    "gie",
    "Our picker beside GIE 1.5's",
    "requests/s per core through Envoy and paced p99, ours ÷ GIE 1.5's (two minutes; its picker is built by Go)",
    run,
    only_by_name=True,
)
