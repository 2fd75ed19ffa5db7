"""Benchmark `picker`: what asking the endpoint picker costs.

Method. One Envoy (one worker) with two listeners that differ in the ext_proc filter alone (`envoy.py`), the picker,
and two simulated engines (`sim/`) that answer at once and publish, like real ones, what they hold: the tree is
populated, every prompt is held by one of the two, and every request is a chat completion that the picker parses,
renders, matches and scores.

- `picker.added_ms`: a paced load (open loop, a request every 5 ms, 1 KB bodies) goes in turns of a few seconds
  through the bare listener and through the asking one; the figure is the difference of the two medians (p50), and of
  the two 99th percentiles (p99). The client's clock starts when it writes a request; `picker.send_late_ms` says how
  late that was.
- `picker.rps_per_core`: a saturating closed loop (64 clients with 1 KB bodies, 20 with 220 KB); the figure is the
  requests answered ÷ the CPU-seconds that the picker's process used meanwhile, all its threads counted. It does not
  depend on what else the machine's cores did, and is not the throughput of one loop on one core; `picker.rps` is that
  throughput.
- `picker.one`, `picker.peers2`: the saturating load of 1 KB bodies through an Envoy of two threads and one picker, or
  two that are peers and that Envoy asks in turns. `equal_picks` is the share of requests that went where most with the
  same prompt went; `spread` is the busier engine's part ÷ the mean.

Where there are two cores or more the picker has the last one to itself, and Envoy, engines and client share the others;
but in these last, where all share all: on two cores a second picker has no core of its own.

Bias. Bodies are ASCII; prompts are held completely, so that trees are walked to the end, which costs the most;
responses are tiny; nothing streams. Envoy and picker share a machine, so no network is in the figures.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from treeline_wire import headers
from treeline_wire.security import CurveKeys

from treeline_bench.client.messages import Call, ClosedLoop, Outcome, Paced, Plan, Report
from treeline_bench.client.process import run_client
from treeline_bench.context import Benchmark, BenchmarkError, Context
from treeline_bench.envoy import bootstrap, envoy_binary
from treeline_bench.machine import usable_cores
from treeline_bench.metrics import row
from treeline_bench.processes import Child, child, free_ports
from treeline_bench.prompts import PromptMaker
from treeline_bench.results import Row
from treeline_bench.sim.engine import CHAT, SimCase
from treeline_bench.sim.http import CASE_HEADER
from treeline_bench.stats import percentile

MODEL_NAME = "tiny"
ENGINES = 2
START_S = 60.0


@dataclass(frozen=True)
class Settings:
    """Sizes in bytes, times in seconds. `prompts` of a size are shared out over the engines."""

    prompts: dict[str, int]
    sizes: dict[str, int]
    concurrency: dict[str, int]
    rate_per_s: float = 200.0
    turns: int = 3
    turn_s: float = 10.0
    saturate_s: float = 10.0
    company_s: float = 4.0
    seed: int = 1


SIZES = {"1kb": 1_000, "220kb": 220_000}
CONCURRENCY = {"1kb": 64, "220kb": 20}
FULL = Settings({"1kb": 256, "220kb": 8}, SIZES, CONCURRENCY)
QUICK = Settings({"1kb": 32, "220kb": 2}, SIZES, CONCURRENCY, turns=1, turn_s=1.0, saturate_s=1.5, company_s=1.0)


def chat_body(size: int, maker: PromptMaker, rng: random.Random) -> bytes:
    """A chat request of exactly `size` bytes; two thirds of its text are the system prompt."""

    def body(system: str, user: str) -> bytes:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return json.dumps({"model": MODEL_NAME, "max_tokens": 1, "messages": messages}).encode()

    room = size - len(body("", ""))
    words = "".join(rng.choices(maker.words, k=room // 3 + 1))
    text = words[:room].ljust(room, ".")
    return body(text[: room * 2 // 3], text[room * 2 // 3 :])


@dataclass(frozen=True)
class Load:
    """Requests of each size, and for each engine the cases it is told (the same requests; it holds its share)."""

    calls: dict[str, list[Call]]
    cases: list[tuple[SimCase, ...]]


def build_load(settings: Settings, maker: PromptMaker) -> Load:
    """The same for the same seed."""
    rng = random.Random(settings.seed)
    calls: dict[str, list[Call]] = {}
    cases: list[list[SimCase]] = [[] for _ in range(ENGINES)]
    for name, count in settings.prompts.items():
        calls[name] = []
        for index in range(count):
            body = chat_body(settings.sizes[name], maker, rng)
            calls[name].append(Call(CHAT, body, {CASE_HEADER: str(len(cases[0]))}))
            for engine, known in enumerate(cases):
                known.append(SimCase(CHAT, body, held=index % ENGINES == engine))
    return Load(calls, [tuple(known) for known in cases])


@dataclass(frozen=True)
class Layout:
    """Which processes decide: pickers that are peers, behind an Envoy of so many threads.
    `apart`: a picker has a core to itself, where there are two."""

    pickers: int = 1
    threads: int = 1
    apart: bool = True


@dataclass(frozen=True)
class Bench:
    """The running processes, and where to send."""

    pickers: tuple[Child, ...]
    bare_port: int
    asking_port: int
    folder: Path
    client_cores: Sequence[int]

    def send(self, plan: Plan) -> Report:
        return run_client(plan, self.folder, self.client_cores)

    def cpu_seconds(self) -> float:
        """Of all that decide."""
        return sum(picker.cpu_seconds() for picker in self.pickers)


@contextmanager
def running(load: Load, context: Context, layout: Layout) -> Iterator[Bench]:
    """Engines, pickers and Envoy, ready; stopped at the end. Raises ChildFailed."""
    cores = usable_cores()
    picker_cores, other_cores = (cores[-1:], cores[:-1] or cores) if layout.apart else (cores, cores)
    folder = context.folder
    bare_port, asking_port, admin_port, *sim_ports = free_ports(3 + 4 * ENGINES)
    places = [free_ports(5) for _ in range(layout.pickers)]
    with ExitStack() as stack:
        endpoints: list[str] = []
        engines: list[tuple[Child, int]] = []
        for index, cases in enumerate(load.cases):
            ports = sim_ports[4 * index : 4 * index + 4]
            argv = _sim_command(index, ports, cases, context)
            engines.append((stack.enter_context(child(f"sim-{index}", argv, folder, other_cores)), ports[0]))
            endpoints += ["--endpoint", f"sim-{index}=127.0.0.1:{ports[0]}"]
        for engine, port in engines:
            engine.wait_ready(f"http://127.0.0.1:{port}/ready", START_S)
        pickers = [
            stack.enter_context(child(f"picker-{index}", argv + endpoints, folder, picker_cores))
            for index, argv in enumerate(_picker_commands(layout, places, folder))
        ]
        for picker, (*_, pages_port, _peer_port) in zip(pickers, places, strict=True):
            picker.wait_ready(f"http://127.0.0.1:{pages_port}/ready", START_S)
        config = bootstrap(
            bare_port=bare_port,
            picker_port=asking_port,
            admin_port=admin_port,
            ext_proc_ports=[ports[0] for ports in places],
            eds_port=places[0][1],
        )
        config_path = folder / "envoy.json"
        config_path.write_text(json.dumps(config))
        argv = [str(envoy_binary()), "--config-path", str(config_path), "--log-level", "warning"]
        argv += ["--concurrency", str(layout.threads), "--disable-hot-restart"]
        envoy = stack.enter_context(child("envoy", argv, folder, other_cores))
        envoy.wait_ready(f"http://127.0.0.1:{bare_port}/ready", START_S)
        yield Bench(tuple(pickers), bare_port, asking_port, folder, other_cores)


def _picker_commands(layout: Layout, places: Sequence[Sequence[int]], folder: Path) -> Iterator[list[str]]:
    flags = ("--grpc-port", "--grpc-health-port", "--metrics-port", "--admin-port", "--peer-port")
    common = [sys.executable, "-m", "treeline_epp", "--policy", "treeline", "--log-level", "warning"]
    if layout.pickers > 1:
        if not (folder / "keys").exists():
            CurveKeys.generate(folder / "keys")
        common += ["--curve-dir", str(folder / "keys")]
        common += ["--peers", ",".join(f"127.0.0.1:{ports[-1]}" for ports in places)]
    for ports in places:
        yield common + [word for flag, port in zip(flags, ports, strict=True) for word in (flag, str(port))]


def _sim_command(index: int, ports: Sequence[int], cases: tuple[SimCase, ...], context: Context) -> list[str]:
    path = context.folder / f"cases-{index}.msgpack"
    path.write_bytes(msgspec.msgpack.encode(cases))
    argv = [sys.executable, "-m", "treeline_bench.sim", "--model", str(context.model), "--name", MODEL_NAME]
    # Fixed: an engine that learnt would make every later request a hit, whatever the picker knows.
    argv += ["--fixed", "--cases", str(path)]
    for name, port in zip(("port", "events-port", "replay-port", "load-port"), ports, strict=True):
        argv += [f"--{name}", str(port)]
    return argv


def hit(outcome: Outcome) -> bool:
    """Whether a request reached the engine that holds its prompt (the other one would report no cached tokens)."""
    return outcome.header not in ("", "0")


def _plan(port: int, calls: list[Call], arrivals: ClosedLoop | Paced, **end: float) -> Plan:
    count = end.get("count")
    return Plan(
        "127.0.0.1",
        port,
        calls,
        arrivals,
        count=None if count is None else int(count),
        seconds=end.get("seconds"),
        keep_header=headers.CACHED_TOKENS,
    )


def warm_up(bench: Bench, load: Load, clients: int = 1) -> None:
    """Until every prompt is routed to an engine that holds it: then the tree is populated. Raises BenchmarkError."""
    calls = [call for group in load.calls.values() for call in group]
    deadline = time.monotonic() + START_S
    while True:
        report = bench.send(_plan(bench.asking_port, calls, ClosedLoop(clients), count=clients * len(calls)))
        missed = sum(not hit(outcome) for outcome in report.answered()) + report.errors()
        if not missed:
            return
        for picker in bench.pickers:
            picker.check()
        if time.monotonic() > deadline:
            raise BenchmarkError(
                f"after {START_S:g} s the picker still sends {missed} of {len(report.outcomes)} requests to engines "
                "without their prompts"
            )


def _latency(bench: Bench, load: Load, settings: Settings, context: Context) -> dict[str, Report]:
    """Both listeners in turns, so that a machine that slows down slows both."""
    ports = {"bare": bench.bare_port, "asking": bench.asking_port}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in ports}
    context.display.phase(f"latency at {settings.rate_per_s:g} requests/s", 2 * settings.turns)
    for turn in range(settings.turns):
        for step, (name, port) in enumerate(ports.items()):
            plan = _plan(port, load.calls["1kb"], Paced(settings.rate_per_s), seconds=settings.turn_s)
            outcomes[name] += bench.send(plan).outcomes
            context.display.done(2 * turn + step + 1)
    return {name: Report(found) for name, found in outcomes.items()}


def saturate(bench: Bench, name: str, load: Load, settings: Settings, context: Context) -> tuple[Report, float]:
    """(what was answered, CPU-seconds that pickers used for it)"""
    context.display.phase(f"saturation with {name} bodies, {settings.saturate_s:g} s")
    plan = _plan(
        bench.asking_port,
        load.calls[name],
        ClosedLoop(settings.concurrency[name]),
        seconds=settings.saturate_s,
    )
    before = bench.cpu_seconds()
    report = bench.send(plan)
    return report, bench.cpu_seconds() - before


def per_core(saturated: tuple[Report, float]) -> float:
    report, cpu_s = saturated
    return len(report.answered()) / cpu_s


Saturated = dict[str, tuple[Report, float]]

COMPANY = {
    "one": Layout(threads=2, apart=False),
    "peers2": Layout(pickers=2, threads=2, apart=False),
}
"""What is compared with 1 KB bodies, by the names of its metrics."""
_COMPANY = "1kb"
_COMPANY_PROMPTS = 64
"""Each is warmed up from several connections."""


def engine_of(outcome: Outcome) -> int:
    """The engine that answered: of two, one holds the prompt."""
    holder = outcome.call % ENGINES
    return holder if hit(outcome) else (holder + 1) % ENGINES


def equal_picks(outcomes: Sequence[Outcome]) -> float:
    """The share of those that went where most with the same prompt went."""
    went: Counter[tuple[int, int]] = Counter((outcome.call, engine_of(outcome)) for outcome in outcomes)
    most: Counter[int] = Counter()
    for (call, _), count in went.items():
        most[call] = max(most[call], count)
    return sum(most.values()) / len(outcomes)


def spread(outcomes: Sequence[Outcome]) -> float:
    """The busiest engine's requests ÷ the mean."""
    return max(Counter(map(engine_of, outcomes)).values()) * ENGINES / len(outcomes)


def _in_company(load: Load, settings: Settings, context: Context) -> Saturated:
    """Each layout in turn, with the smallest bodies alone."""
    load = Load({_COMPANY: load.calls[_COMPANY][:_COMPANY_PROMPTS]}, load.cases)
    settings = replace(settings, saturate_s=settings.company_s)
    out: Saturated = {}
    for name, layout in COMPANY.items():
        context.display.phase(f"two threads of Envoy, pickers: {layout.pickers}")
        with running(load, context, layout) as bench:
            warm_up(bench, load, clients=8)
            out[name] = saturate(bench, _COMPANY, load, settings, context)
    return out


def company_rows(found: Saturated) -> list[Row]:
    """Of all layouts."""
    rows: list[Row] = []
    for name, (report, cpu_s) in found.items():
        answered = report.answered()
        times = [outcome.latency_ms for outcome in answered]
        rows += [
            row(f"picker.{name}.rps_per_core.{_COMPANY}", len(answered) / cpu_s),
            row(f"picker.{name}.rps.{_COMPANY}", len(answered) / report.wall_s()),
            row(f"picker.{name}.ms.p99", percentile(times, 99)),
            row(f"picker.{name}.equal_picks", equal_picks(answered)),
            row(f"picker.{name}.spread", spread(answered)),
        ]
    return rows


def _rows(latency: dict[str, Report], saturated: Saturated, company: Saturated) -> list[Row]:
    times = {name: [outcome.latency_ms for outcome in report.answered()] for name, report in latency.items()}
    late = [outcome.late_ns / 1e6 for report in latency.values() for outcome in report.outcomes]
    reports = _reports(latency, saturated, company)
    rows: list[Row] = []
    for q in (50, 99):
        bare, asking = percentile(times["bare"], q), percentile(times["asking"], q)
        rows += [row(f"picker.added_ms.p{q}", asking - bare), row(f"picker.bare_ms.p{q}", bare)]
    for name, (report, _) in saturated.items():
        answered = report.answered()
        rows += [
            row(f"picker.rps_per_core.{name}", per_core(saturated[name])),
            row(f"picker.rps.{name}", len(answered) / report.wall_s()),
            row(f"picker.hit_rate.{name}", sum(hit(outcome) for outcome in answered) / len(answered)),
        ]
    rows += company_rows(company)
    rows.append(row("picker.send_late_ms.p99", percentile(late, 99)))
    rows.append(row("picker.errors", sum(report.errors() for report in reports)))
    return rows


def _reports(latency: dict[str, Report], *saturated: Saturated) -> list[Report]:
    return [*latency.values(), *(report for found in saturated for report, _ in found.values())]


def run(context: Context) -> list[Row]:
    settings = QUICK if context.quick else FULL
    context.display.phase("starting Envoy, the picker and 2 simulated engines")
    load = build_load(settings, PromptMaker.of_model(context.model))
    with running(load, context, Layout()) as bench:
        context.display.phase("warm-up: until every prompt is routed to an engine that holds it")
        warm_up(bench, load)
        latency = _latency(bench, load, settings, context)
        saturated = {name: saturate(bench, name, load, settings, context) for name in settings.sizes}
    company = _in_company(load, settings, context)
    for report in _reports(latency, saturated, company):
        if not report.answered():
            first = report.outcomes[0] if report.outcomes else None
            raise BenchmarkError(f"no request was answered; the first: {first}")
    return _rows(latency, saturated, company)


BENCHMARK = Benchmark(
    "picker",
    "What asking the picker costs",
    "latency added to bare Envoy, requests/s per core, one picker and two (three minutes)",
    run,
)
