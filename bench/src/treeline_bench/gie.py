"""Benchmark `gie`: our picker beside the one of the Gateway API Inference Extension 1.5, written in Go.

Method. Each picker in turn is put before an Envoy with one worker: an InferencePool of 2, 16 and 64 endpoints on a
minimal Kubernetes API (`api_server.py`). The endpoints are addresses of one simulated engine (`sim/`, with vLLM's
metrics) that answers at once. Bodies of requests and answers are streamed through the picker, with both trailers
(`streamed`, FULL_DUPLEX_STREAMED: that project's configuration, and its picker's only mode); or the request's body
comes whole and the answer's not at all (`buffered`), where ours is compared with theirs `streamed`. Settings are each
project's defaults, without TLS. The figures are

- requests answered ÷ CPU-seconds of the picker's process, all its threads counted, under a saturating closed loop;
- of a paced load (200 a second, 1 KB), which goes in turns through a listener that does not ask and one that does, what
  asking adds to the median and to the 99th percentile.

`gie.vs_gie.rps_per_core` and `gie.added_ms` are the worst over all endpoint counts and modes; the others follow.

Bias. Chat completions are repeated, so both pickers know every prompt after a while; ours by its own requests alone,
since these engines publish nothing that a pool of vLLM's metrics announces. GIE's picker reads each endpoint's metrics
20 times a second, which is in its CPU-seconds, as what ours reads is in ours, and takes time of the core of Envoy,
engine and client. Go's garbage collector and scheduler have the cores that are there; with the picker pinned to one
core both have one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from treeline_bench.api_server import NAMESPACE, PODS, POOLS, ApiServer
from treeline_bench.context import Benchmark, BenchmarkError, Context
from treeline_bench.envoy import bootstrap, envoy
from treeline_bench.metrics import row
from treeline_bench.processes import child, free_ports
from treeline_bench.prompts import PromptMaker
from treeline_bench.results import Row
from treeline_bench.rig import PACED_SIZE, START_S, Rig, Settings, added_ms, answered, build_load, cores, failed
from treeline_bench.serving.messages import Call

POOL, LABELS = "bench", {"app": "bench"}
ENDPOINTS = (2, 16, 64)
MODES = ("streamed", "buffered")
SIZES = {"1kb": 1_000, "30kb": 30_000, "220kb": 220_000}
CONCURRENCY = {"1kb": 64, "30kb": 32, "220kb": 20}
FULL = Settings({"1kb": 256, "30kb": 64, "220kb": 8}, SIZES, CONCURRENCY, turns=2, turn_s=4.0, saturate_s=6.0)
QUICK = Settings({"1kb": 16, "30kb": 4, "220kb": 2}, SIZES, CONCURRENCY, turns=1, turn_s=1.0, saturate_s=1.5)
_BINARY = "TREELINE_GIE_PICKER"


def gie_binary() -> Path:
    """`$TREELINE_GIE_PICKER`, else the one built by `make conformance`. Raises BenchmarkError."""
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
    """The Kubernetes API with the pool, in its own thread."""

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
        self.kubeconfig = self._api.write_kubeconfig(folder)

    def put_pods(self, pods: Sequence[tuple[str, int]]) -> None:
        """Sets the pods; earlier ones stay."""
        for at, (address, port) in enumerate(pods):
            self._loop.call_soon_threadsafe(self._put_pod, f"pod-{at}", address, port)

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


def command_of(name: str, ports: Sequence[int], kubeconfig: Path) -> list[str]:
    """The command of a picker, `ours` or `gie`, with ports of ext_proc, health, metrics and our pages."""
    flags = ["--pool-name", POOL, "--pool-namespace", NAMESPACE, "--secure-serving=false"]
    flags += ["--grpc-port", str(ports[0]), "--grpc-health-port", str(ports[1]), "--metrics-port", str(ports[2])]
    if name == "gie":
        return [str(gie_binary()), *flags, "--metrics-endpoint-auth=false", "--tracing=false", "--enable-pprof=false"]
    ours = ["--kubeconfig", str(kubeconfig), "--admin-port", str(ports[3]), "--log-level", "warning"]
    return [sys.executable, "-m", "treeline_epp", *flags, *ours]


@contextmanager
def running(name: str, mode: str, world: World, pods: Sequence[tuple[str, int]], folder: Path) -> Iterator[Rig]:
    """The picker and its Envoy."""
    picker_cores, other_cores = cores()
    *ports, bare, asking, admin = free_ports(7)
    config = bootstrap(
        bare_port=bare,
        picker_port=asking,
        admin_port=admin,
        ext_proc_port=ports[0],
        pods=pods,
        streamed=mode == "streamed",
    )
    argv, environment = command_of(name, ports, world.kubeconfig), {"KUBECONFIG": str(world.kubeconfig)}
    with (
        child(name, argv, folder, picker_cores, environment) as picker,
        envoy(config, folder, other_cores, f"envoy-{name}"),
    ):
        yield Rig(picker, bare, asking, folder)


@dataclass(frozen=True)
class Figures:
    """A picker's figures: requests per CPU second by size, added latency of a paced load at percentiles in ms, and
    answers other than 200."""

    per_core: dict[str, float]
    added_ms: dict[int, float]
    errors: int


def _measure(name: str, rig: Rig, load: dict[str, list[Call]], settings: Settings, context: Context) -> Figures:
    calls, display = load[PACED_SIZE], context.display

    def ready() -> bool:
        return not failed(rig.send(calls, count=len(calls)))

    display.phase(f"{name}: until each prompt was answered")
    rig.picker.wait_until(ready, "answering each request", START_S)
    bare, asking = rig.paced(calls, settings, display)
    errors, per_core = failed(bare) + failed(asking), {}
    for size, clients in settings.concurrency.items():
        display.phase(f"{name}: saturation with {size} bodies, {settings.saturate_s:g} s")
        rig.send(load[size], clients=clients, count=len(load[size]))
        records, cpu_s = rig.saturate(load[size], clients, settings.saturate_s)
        per_core[size] = len(answered(records)) / cpu_s
        errors += failed(records)
    return Figures(per_core, {q: added_ms(bare, asking, q) for q in (50, 99)}, errors)


def run(context: Context) -> list[Row]:
    settings = QUICK if context.quick else FULL
    gie_binary()
    load = build_load(settings, PromptMaker.of_model(context.model)).calls
    addresses = [f"127.0.0.{number}" for number in range(2, 2 + ENDPOINTS[-1])]
    [port] = free_ports(1, addresses=("0.0.0.0", *addresses))
    ours: dict[tuple[str, int], Figures] = {}
    gie: dict[int, Figures] = {}
    with ExitStack() as stack:
        world = World(context.folder, port)
        stack.callback(world.close)
        (context.folder / "cases.msgpack").write_bytes(msgspec.msgpack.encode(()))
        argv = [sys.executable, "-m", "treeline_sim", "serve", "--model", str(context.model)]
        argv += ["--host", "0.0.0.0", "--cases", str(context.folder / "cases.msgpack")]
        words = ("--port", "--events-port", "--replay-port", "--load-port")
        argv += [text for pair in zip(words, map(str, (port, *free_ports(3))), strict=True) for text in pair]
        engine = stack.enter_context(child("sim", argv, context.folder, cores()[1]))
        engine.wait_ready(f"http://{addresses[0]}:{port}/ready", START_S)
        for count in ENDPOINTS:
            pods = [(address, port) for address in addresses[:count]]
            world.put_pods(pods)
            for name, mode in (("gie", MODES[0]), *(("ours", mode) for mode in MODES)):
                with running(name, mode, world, pods, context.folder) as rig:
                    found = _measure(f"{name}, {count} endpoints, {mode}", rig, load, settings, context)
                if name == "gie":
                    gie[count] = found
                else:
                    ours[mode, count] = found
    return _rows(ours, gie, settings)


def _rows(ours: dict[tuple[str, int], Figures], gie: dict[int, Figures], settings: Settings) -> list[Row]:
    rows: list[Row] = []
    for size in settings.sizes:
        ratios = {at: found.per_core[size] / gie[at[1]].per_core[size] for at, found in ours.items()}
        rows.append(row(f"gie.vs_gie.rps_per_core.{size}", min(ratios.values())))
        rows += [row(f"gie.times_gie.{size}.{mode}.{count}", ratio) for (mode, count), ratio in ratios.items()]
        rows += [
            row(f"gie.rps_per_core.{size}.{mode}.{count}", found.per_core[size])
            for (mode, count), found in ours.items()
        ]
        rows += [row(f"gie.rps_per_core_gie.{size}.{count}", found.per_core[size]) for count, found in gie.items()]
    for q in (50, 99):
        rows.append(row(f"gie.added_ms.p{q}", max(found.added_ms[q] for found in ours.values())))
        rows += [row(f"gie.each_added_ms.p{q}.{mode}.{count}", one.added_ms[q]) for (mode, count), one in ours.items()]
        rows += [row(f"gie.each_added_gie_ms.p{q}.{count}", one.added_ms[q]) for count, one in gie.items()]
    rows.append(row("gie.errors", sum(found.errors for found in ours.values())))
    rows.append(row("gie.errors_gie", sum(found.errors for found in gie.values())))
    return rows


BENCHMARK = Benchmark(
    "gie",
    "Our picker beside GIE 1.5's",
    "requests/s per core and latency added, with 2, 16 and 64 endpoints, beside GIE 1.5's (ten minutes; built by Go)",
    run,
    only_by_name=True,
)
