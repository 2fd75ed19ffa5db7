"""Benchmark `picker`: the cost of asking the endpoint picker.

Method. One Envoy (one worker) with two listeners that differ only in the ext_proc filter (`envoy.py`), the picker, and
two simulated engines (`sim/`) that answer at once and publish KV events. The tree is populated, one of the two holds
each prompt, and each request is a chat completion that the picker parses, renders, matches and scores.

- `picker.added_ms`: the difference of the two medians (p50), and of the two 99th percentiles (p99), of a paced load
  (a request every 5 ms, 1 KB bodies). The client's clock starts when it writes a request; `picker.send_late_ms` says
  how late that was.
- `picker.rps_per_core`: 64 clients with 1 KB bodies, 20 with 220 KB. It does not depend on what else the machine's
  cores did, and is not the throughput of one loop on one core; `picker.rps` is that throughput.

Bias. Bodies are ASCII; prompts are fully cached, so trees are walked to the end, which costs the most; responses are
tiny and not streamed. Envoy and picker share a machine, without a network.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
from treeline_sim.openai import SimCase

from treeline_bench.context import Benchmark, BenchmarkError, Context
from treeline_bench.envoy import bootstrap, envoy
from treeline_bench.metrics import row
from treeline_bench.processes import Child, child, free_ports
from treeline_bench.prompts import PromptMaker
from treeline_bench.results import Row
from treeline_bench.rig import (
    MODEL_NAME,
    PACED_SIZE,
    START_S,
    Requests,
    Rig,
    Settings,
    added_ms,
    answered,
    build_load,
    cores,
    failed,
)
from treeline_bench.serving.messages import Record
from treeline_bench.stats import percentile

ENGINES = 2
SIZES = {"1kb": 1_000, "220kb": 220_000}
CONCURRENCY = {"1kb": 64, "220kb": 20}
FULL = Settings({"1kb": 256, "220kb": 8}, SIZES, CONCURRENCY)
QUICK = Settings({"1kb": 32, "220kb": 2}, SIZES, CONCURRENCY, turns=1, turn_s=1.0, saturate_s=1.5)


@contextmanager
def running(load: Requests, context: Context) -> Iterator[Rig]:
    """Engines, picker and Envoy, ready; stopped at the end. Raises ChildFailed."""
    picker_cores, other_cores = cores()
    folder = context.folder
    grpc, eds, metrics, pages, bare, asking, admin, *sim_ports = free_ports(7 + 4 * ENGINES)
    argv = [sys.executable, "-m", "treeline_epp", "--policy", "treeline", "--log-level", "warning"]
    argv += ["--grpc-port", str(grpc), "--grpc-health-port", str(eds)]
    argv += ["--metrics-port", str(metrics), "--admin-port", str(pages)]
    with ExitStack() as stack:
        engines: list[tuple[Child, int]] = []
        for index, cases in enumerate(load.cases):
            ports = sim_ports[4 * index : 4 * index + 4]
            command = _sim_command(index, ports, cases, context)
            engines.append((stack.enter_context(child(f"sim-{index}", command, folder, other_cores)), ports[0]))
            argv += ["--endpoint", f"sim-{index}=127.0.0.1:{ports[0]}"]
        for engine, port in engines:
            engine.wait_ready(f"http://127.0.0.1:{port}/ready", START_S)
        picker = stack.enter_context(child("picker", argv, folder, picker_cores))
        picker.wait_ready(f"http://127.0.0.1:{pages}/ready", START_S)
        config = bootstrap(bare_port=bare, picker_port=asking, admin_port=admin, ext_proc_port=grpc, eds_port=eds)
        proxy = stack.enter_context(envoy(config, folder, other_cores))
        proxy.wait_ready(f"http://127.0.0.1:{bare}/ready", START_S)
        yield Rig(picker, bare, asking, folder)


def _sim_command(index: int, ports: Sequence[int], cases: tuple[SimCase, ...], context: Context) -> list[str]:
    path = context.folder / f"cases-{index}.msgpack"
    path.write_bytes(msgspec.msgpack.encode(cases))
    argv = [sys.executable, "-m", "treeline_sim", "serve", "--model", str(context.model), "--name", MODEL_NAME]
    # A learning engine would turn every later request into a hit.
    argv += ["--cases", str(path)]
    for name, port in zip(("port", "events-port", "replay-port", "load-port"), ports, strict=True):
        argv += [f"--{name}", str(port)]
    return argv


def hit(record: Record) -> bool:
    """Whether a request reached the engine that holds its prompt (the other reports no cached tokens)."""
    return record.header not in ("", "0")


def warm_up(rig: Rig, load: Requests) -> None:
    """Runs until every prompt is routed to an engine that holds it. Raises BenchmarkError."""
    calls = [call for group in load.calls.values() for call in group]
    deadline = time.monotonic() + START_S
    while True:
        records = rig.send(calls, count=len(calls))
        missed = sum(not hit(record) for record in records)
        if not missed:
            return
        rig.picker.check()
        if time.monotonic() > deadline:
            raise BenchmarkError(
                f"after {START_S:g} s the picker still sends {missed} of {len(records)} requests to engines "
                "without their prompts"
            )


def rows_of(bare: list[Record], asking: list[Record], saturated: dict[str, tuple[list[Record], float]]) -> list[Row]:
    """`saturated`: by size, the requests' results and their CPU seconds."""
    rows: list[Row] = []
    for q in (50, 99):
        times = [record.latency_ms for record in answered(bare)]
        rows += [
            row(f"picker.added_ms.p{q}", added_ms(bare, asking, q)),
            row(f"picker.bare_ms.p{q}", percentile(times, q)),
        ]
    for name, (records, cpu_s) in saturated.items():
        good = answered(records)
        wall_s = (max(record.done_ns for record in records) - min(record.sent_ns for record in records)) / 1e9
        rows += [
            row(f"picker.rps_per_core.{name}", len(good) / cpu_s),
            row(f"picker.rps.{name}", len(good) / wall_s),
            row(f"picker.hit_rate.{name}", sum(map(hit, good)) / len(good)),
        ]
    late = [(record.begun_ns - record.due_ns) / 1e6 for record in (*bare, *asking)]
    errors = failed(bare) + failed(asking) + sum(failed(records) for records, _ in saturated.values())
    return [*rows, row("picker.send_late_ms.p99", percentile(late, 99)), row("picker.errors", errors)]


def run(context: Context) -> list[Row]:
    settings, display = QUICK if context.quick else FULL, context.display
    display.phase("starting Envoy, the picker and 2 simulated engines")
    load = build_load(settings, PromptMaker.of_model(context.model), ENGINES)
    with running(load, context) as rig:
        display.phase("warm-up: until every prompt is routed to an engine that holds it")
        warm_up(rig, load)
        bare, asking = rig.paced(load.calls[PACED_SIZE], settings, display)
        saturated = {}
        for name in settings.sizes:
            display.phase(f"saturation with {name} bodies, {settings.saturate_s:g} s")
            saturated[name] = rig.saturate(load.calls[name], settings.concurrency[name], settings.saturate_s)
    for records in (bare, asking, *(records for records, _ in saturated.values())):
        if not answered(records):
            raise BenchmarkError(f"no request was answered; the first: {next(iter(records), None)}")
    return rows_of(bare, asking, saturated)


BENCHMARK = Benchmark(
    "picker",
    "What asking the picker costs",
    "latency added to bare Envoy, requests/s per core (two minutes)",
    run,
)
