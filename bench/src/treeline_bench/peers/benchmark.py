"""`routing-sim --peers`: our picker behind Envoy beside other real routers, over the same simulated engines.

Method. Each router in turn gets one trace and new engines: three of the default preset behind sockets (`treeline sim
serve`) in one process. The first 40 s of the trace at its rate for three engines, slowed to what two cores can serve,
with the engines' time slowed alike: they are as busy as in a simulation, while the cost of routers and sockets counts
less. Requests are streamed completions with text, sent when due by a load process of `treeline bench serving`; times
count from when a request was due. Hits are the engines' own counts (`cached_tokens` in the usage).

Ours is `treeline pick` with the engines' KV events and an Envoy of one worker; others use their policy `cache_aware`
and their defaults. The Gateway API Inference Extension's picker needs Kubernetes objects: see benchmark `gie`.

Bias. All share the machine's cores, and ours runs first. A peer is one process, ours are two. A router's own clocks
(how long it trusts a measurement, how often it evicts) are not slowed. 40 s include a cold start, and no eviction if
the trace does not fill the memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from treeline_sim.traces import TRACES, trace_named
from treeline_sim.traces.base import Trace

from treeline_bench.context import Benchmark, BenchmarkError, Context
from treeline_bench.metrics import row
from treeline_bench.peers.routers import MODEL_NAME, OURS, PEERS, engines, ours
from treeline_bench.prompts import PromptMaker
from treeline_bench.results import Row
from treeline_bench.serving.messages import Record
from treeline_bench.serving.processes import Load
from treeline_bench.stats import percentile

RESULT = "routing-peers"
ENGINES = 3
SECONDS, QUICK_SECONDS = 40.0, 3.0
LATE_MS = 20.0
TRACE = "generated-shared-prefix"
Routing = Callable[[Sequence[str]], AbstractContextManager[int]]
"""Starts a router for engines at these addresses; returns its port."""


@dataclass(frozen=True)
class Played:
    """The result of a trace with one router. `late`: requests sent over `LATE_MS` after they were due."""

    name: str
    hit_rate: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    errors: int
    late: int


def played_of(name: str, records: Sequence[Record]) -> Played:
    """Raises BenchmarkError if nothing was answered, hits are not counted, or prompts differ from those sent."""
    answered = [record for record in records if not record.error]
    if not answered:
        first = records[0]
        raise BenchmarkError(f"{name} answered none of {len(records)} requests: {first.error} {first.detail}")
    for record in answered:
        if record.cached_tokens < 0 or record.prompt_tokens != record.asked_prompt_tokens:
            counted = f"{record.prompt_tokens} tokens, {record.cached_tokens} of them cached"
            raise BenchmarkError(f"{name}: a prompt of {record.asked_prompt_tokens} tokens came back as {counted}")
    ttft_ms = [(record.tokens_ns[0] - record.due_ns) / 1e6 for record in answered]
    return Played(
        name,
        hit_rate=sum(record.cached_tokens for record in answered) / sum(record.prompt_tokens for record in answered),
        ttft_p50_ms=percentile(ttft_ms, 50),
        ttft_p90_ms=percentile(ttft_ms, 90),
        errors=len(records) - len(answered),
        late=sum(record.begun_ns - record.due_ns > LATE_MS * 1e6 for record in records),
    )


def rows_of(trace: str, mine: Played, others: Sequence[Played], endless: float) -> list[Row]:
    """Ours divided by each of the others', then all figures. A peer without hits has no ratio of hits."""
    name = f"routing.peers.{trace}"
    rows: list[Row] = []
    for other in others:
        if other.hit_rate:
            rows.append(row(f"{name}.hit_vs.{other.name}", mine.hit_rate / other.hit_rate))
        rows.append(row(f"{name}.ttft_p90_vs.{other.name}", mine.ttft_p90_ms / other.ttft_p90_ms))
    for one in (mine, *others):
        rows.append(row(f"{name}.hit_rate.{one.name}", one.hit_rate, endless))
        fields = ("ttft_p50_ms", "ttft_p90_ms", "errors", "late")
        rows += [row(f"{name}.{field}.{one.name}", getattr(one, field)) for field in fields]
    return rows


def run(programs: Mapping[str, Path], trace: Trace, context: Context) -> list[Row]:
    """The rows of one trace. `programs`: the peers' programs by name."""
    from treeline_bench.peers.script import script_of  # with the picker's room, which no other benchmark needs

    context.display.phase(f"writing {trace.name}")
    seconds = QUICK_SECONDS if context.quick else SECONDS
    script = script_of(trace, ENGINES, seconds, PromptMaker.of_model(context.model))
    count = len(script.moments)
    played: list[Played] = []
    for name, routing in _routers(programs, context):
        context.display.phase(f"{name}: {count} requests at {script.speed:.3f} of the trace's rate", count)
        with (
            engines(ENGINES, script.engine, script.speed, context) as addresses,
            routing(addresses) as port,
            Load(script.order(port, MODEL_NAME), 1, context.folder) as load,
        ):
            (report,) = load.run(lambda progress: context.display.done(progress.ended))
        if len(report.records) < count:
            raise BenchmarkError(f"{name} is gone: {report.gone or f'{len(report.records)} of {count} were sent'}")
        played.append(played_of(name, report.records))
    return rows_of(trace.name, played[0], played[1:], script.endless_hit_rate)


def _routers(programs: Mapping[str, Path], context: Context) -> Iterator[tuple[str, Routing]]:
    """Ours first."""
    yield OURS, partial(ours, context=context)
    for name, program in programs.items():
        yield name, partial(PEERS[name].running, program, context=context)


def benchmark(programs: Mapping[str, Path], trace: Trace) -> Benchmark:
    """The benchmark for these peers."""
    return Benchmark(
        RESULT,
        "Other routers on simulated engines",
        "our picker beside other routers, simulated engines in real time",
        partial(run, programs, trace),
        versions={name: PEERS[name].version for name in programs},
        command=f"routing-sim --peers {','.join(programs)} --peer-trace {trace.name}",
    )


# ---- options ------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds their group of arguments."""
    add = parser.add_argument_group("routing-sim beside other routers").add_argument
    add("--peers", metavar="P[,P2]", help=f"compare our picker with these: {', '.join(PEERS)}")
    add(
        "--peer-path",
        action="append",
        default=[],
        metavar="P=PROGRAM",
        help="a peer's program, if not on the PATH; repeatable",
    )
    add("--peer-trace", metavar="NAME", help=f"the trace to play (default: {TRACE}): {', '.join(TRACES)}")


def asked(args: argparse.Namespace) -> bool:
    """Whether peers are to be measured. Raises ValueError for options without effect."""
    if args.peers is None and (args.peer_path or args.peer_trace):
        raise ValueError("--peer-path and --peer-trace need --peers")
    return args.peers is not None


def chosen(args: argparse.Namespace, console: Console) -> Benchmark:
    """The requested benchmark; `console` shows which peers are skipped and how to install them. Raises ValueError and
    KeyError, which say what to write, BenchmarkError if no peer is installed."""
    if args.names != ["routing-sim"]:
        raise ValueError("--peers belongs to routing-sim alone: treeline bench routing-sim --peers smg")
    names = list(dict.fromkeys(name.strip() for name in args.peers.split(",")))
    paths = dict(_path(text) for text in args.peer_path)
    for name in (*names, *paths):
        if name not in PEERS:
            raise ValueError(f"unknown peer {name!r}; there are: {', '.join(PEERS)}")
    trace = trace_named(args.peer_trace or TRACE)
    programs: dict[str, Path] = {}
    for name in names:
        try:
            programs[name] = PEERS[name].find(paths)
        except BenchmarkError as error:
            console.print(f"left out: {error}", markup=False, highlight=False, soft_wrap=True)
    if not programs:
        raise BenchmarkError(f"{RESULT}: there is no peer to compare with")
    return benchmark(programs, trace)


def _path(text: str) -> tuple[str, Path]:
    name, given, path = text.partition("=")
    if not given or not path:
        raise ValueError(f"--peer-path {text}: write P=PROGRAM, as in smg=DIR/bin/smg")
    return name, Path(path)
