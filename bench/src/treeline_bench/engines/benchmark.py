"""Benchmarks `engines` and `engines-sglang`: two real vLLM or SGLang servers behind our picker, in conversations.

Method. Two servers of one kind (on CPUs, the tiny model, one thread each), Envoy and the picker, which follows the
servers' own KV events. `traffic.py` has the load: conversations whose prompts grow, in groups that share a system
prompt, in one order for all policies. The caches of both servers together hold all conversations, one alone does not.
Policies are measured in turns, in alternating order; between two of them both servers forget, and picker and Envoy are
new.

- `hit_vs_oracle`: prompt tokens that the servers themselves report as cached (`usage.prompt_tokens_details`), by what
  `oracle.py` finds by block arithmetic over the ids that the server's `/tokenize` gives for the same messages: every
  whole block that any request sent before had too, as if both servers shared one cache that never forgets. No router
  reaches more.
- `ttft_vs_rr`: the median time to first token, by that of round robin in the same run.
- `event_ms`: from the moment that the server writes into a batch of events (`ts`, in its scheduler) to the moment when
  the picker's tree has it, by one clock; the picker tells (`epp/benchmarks/timed_picker.py`). It is measured in a load
  of its own, one request at a time. SGLang collects events before that: until its next prefill, until it is idle, or
  for 40 steps of decoding. vLLM's processes spin where they wait, here on the picker's cores: picker and witness
  go first where we may say so (real-time priority; root), or they wait for a core, at times for seconds.
  `event_wire_ms` is from the moment when the batch has come to another subscriber (`witness.py`), and `event_busy_ms`
  the same in the load above.

At the end of each measurement the picker's tree is compared with what `witness.py` counted for each server: a block too
many or too few fails the run.

Bias. Long histories and short questions suit routing by prefix; all share the machine's cores, so that what one server
computes delays the other, the picker and the client.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import msgspec

from treeline_bench.context import ROOT, Benchmark, BenchmarkError, Context
from treeline_bench.engines.oracle import Oracle
from treeline_bench.engines.server import Server
from treeline_bench.engines.sglang import Sglang
from treeline_bench.engines.traffic import Exchange, Shape, Traffic
from treeline_bench.engines.vllm import Vllm
from treeline_bench.engines.witness import Witness, prompt_start
from treeline_bench.envoy import bootstrap, envoy_binary
from treeline_bench.metrics import row
from treeline_bench.processes import child, free_ports
from treeline_bench.prompts import PromptMaker
from treeline_bench.results import Row
from treeline_bench.stats import percentile

POLICIES = ("treeline", "round_robin")
TIMED_PICKER = ROOT / "epp" / "benchmarks" / "timed_picker.py"
MODEL_NAME = "tiny"
QUIET_S = 5.0
FULL = Shape(groups=12, talks=2, turns=5, system=2048, question=64, answer=24, concurrency=4)
QUICK = Shape(groups=2, talks=2, turns=3, system=512, question=64, answer=8, concurrency=2)
CALM = Shape(groups=2, talks=5, turns=20, system=256, question=32, answer=8, concurrency=1)
QUICK_CALM = Shape(groups=1, talks=2, turns=5, system=128, question=32, answer=8, concurrency=1)
ROUNDS = 2


@dataclass
class Measured:
    """One policy's rounds. Lists have one entry a request; tokens are the server's counts."""

    cached: int = 0
    prompt: int = 0
    possible: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    event_ms: list[float] = field(default_factory=list)
    wire_ms: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt

    def take(self, exchanges: Sequence[Exchange], engine: Server) -> None:
        """Another round. Raises BenchmarkError where a request was not answered, or its prompt was another one."""
        oracle = Oracle(engine.block_tokens)
        told: list[tuple[int, int, list[int]]] = []
        for exchange in exchanges:
            record = exchange.record
            if record.error or record.cached_tokens < 0:
                raise BenchmarkError(f"a request failed: {record.error or 'no count of cached tokens'} {record.detail}")
            prompt = engine.tokens(exchange.messages)
            if len(prompt) != record.prompt_tokens:
                raise BenchmarkError(f"a prompt of {record.prompt_tokens} tokens has {len(prompt)} by /tokenize")
            whole = [*exchange.messages, {"role": "assistant", "content": exchange.answer}]
            told += [(record.sent_ns, 1, prompt), (record.done_ns, 0, engine.tokens(whole, answer_next=False))]
            self.prompt += record.prompt_tokens
            self.cached += record.cached_tokens
            self.ttft_ms.append(exchange.ttft_ms)
        for _, asked, tokens in sorted(told):
            self.possible += oracle.cached_tokens(tokens) if asked else 0
            oracle.remember(tokens)


@dataclass(frozen=True)
class Fleet:
    """The servers, and who listens to each."""

    engines: list[Server]
    witnesses: list[Witness]


@contextmanager
def fleet(kind: type[Server], shape: Shape, context: Context) -> Iterator[Fleet]:
    """Two servers that are ready; stopped at the end. Raises ChildFailed, BenchmarkError where none is installed."""
    blocks = cache_tokens(shape) // kind.block_tokens
    with ExitStack() as stack:
        ports, events, replays, loads = (free_ports(2) for _ in range(4))
        engines = [
            kind(f"{kind.engine}-{i}", ports[i], events[i], replays[i], blocks, context.model, loads[i])
            for i in range(2)
        ]
        witnesses = [stack.enter_context(Witness(engine.events_port)) for engine in engines]
        started = [
            stack.enter_context(
                child(engine.name, engine.command(shape.longest), context.folder, environment=engine.environment())
            )
            for engine in engines
        ]
        for process, engine in zip(started, engines, strict=True):
            process.wait_ready(f"{engine.url}/health", engine.start_s)
        yield Fleet(engines, witnesses)


def cache_tokens(shape: Shape) -> int:
    """Of one server: less than all conversations need, more than half of them and every system prompt do; in a quick
    run, what the requests need that run at a time."""
    return max(int(shape.footprint * 0.65), shape.concurrency * shape.longest)


@dataclass(frozen=True)
class Edge:
    """Envoy and picker."""

    port: int
    pages: str
    metrics: str
    times: Path


@contextmanager
def edge(policy: str, engines: Sequence[Server], context: Context) -> Iterator[Edge]:
    """Ready, and following the engines; stopped at the end. Raises ChildFailed."""
    folder = context.folder
    grpc, eds, metrics, pages, bare, port, admin = free_ports(7)
    times = folder / "times.jsonl"
    argv = [
        *prompt_start(),
        sys.executable,
        str(TIMED_PICKER),
        str(times),
        "--policy",
        policy,
        "--log-level",
        "warning",
    ]
    argv += ["--tokenizer", f"{MODEL_NAME}={context.model}", "--enable-debug-endpoints"]
    argv += ["--grpc-port", str(grpc), "--grpc-health-port", str(eds)]
    argv += ["--metrics-port", str(metrics), "--admin-port", str(pages)]
    for engine in engines:
        argv += ["--endpoint", f"{engine.name}={engine.address}"]
    config = bootstrap(bare_port=bare, picker_port=port, admin_port=admin, ext_proc_ports=[grpc], eds_port=eds)
    path = folder / "envoy.json"
    path.write_text(json.dumps(config))
    with ExitStack() as stack:
        picker = stack.enter_context(child("picker", argv, folder))
        found = Edge(port, f"http://127.0.0.1:{pages}", f"http://127.0.0.1:{metrics}/metrics", times)
        picker.wait_ready(f"{found.pages}/ready")
        picker.wait_until(lambda: follows(found.metrics, len(engines)), "following the engines' events", QUIET_S)
        words = [str(envoy_binary()), "--config-path", str(path), "--log-level", "warning", "--concurrency", "1"]
        envoy = stack.enter_context(child("envoy", [*words, "--disable-hot-restart"], folder))
        envoy.wait_ready(f"http://127.0.0.1:{port}/health")
        yield found


def follows(metrics: str, engines: int) -> bool:
    """Whether the picker with this page of metrics has applied all that so many engines have published."""
    page = _get(metrics).text
    states = [line.split() for line in page.splitlines() if line.startswith("treeline_epp_kv_subscriptions{")]
    return sum(float(count) for name, count in states if "live" in name or "checking" in name) == engines


def tree(edge: Edge, engine: Server) -> set[int]:
    """The blocks that the picker believes a server to hold."""
    page = _get(f"{edge.pages}/debug/tree?pod={engine.name}").json()
    return {int(block) for block in page["blocks"]}


def compare(edge: Edge, fleet: Fleet) -> None:
    """Raises BenchmarkError where the tree is not what the servers have said, `QUIET_S` after the last request."""
    for engine, witness in zip(fleet.engines, fleet.witnesses, strict=True):
        deadline = time.monotonic() + QUIET_S
        while (known := tree(edge, engine)) != (held := witness.blocks) or witness.missed:
            if time.monotonic() > deadline:
                raise BenchmarkError(
                    f"{engine.name}: {len(known - held)} blocks are in the picker's tree alone, {len(held - known)} in "
                    f"the engine alone, {len(known & held)} in both; {witness.missed} batches did not reach the witness"
                )
            time.sleep(0.05)


def _get(url: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=10) as http:
        return http.get(url).raise_for_status()


class _Applied(msgspec.Struct):
    """A line of the timed picker."""

    pod: str
    seq: int
    at: float
    delay_ms: float


def _round(policy: str, fleet: Fleet, traffic: Traffic, into: Measured, context: Context) -> None:
    for engine in fleet.engines:
        engine.forget()
    context.display.phase(f"{policy}: {traffic.shape.requests} requests", traffic.shape.requests)
    with edge(policy, fleet.engines, context) as at:
        exchanges = asyncio.run(traffic.run("127.0.0.1", at.port, context.display.done))
        compare(at, fleet)
    into.take(exchanges, fleet.engines[0])
    lines = msgspec.json.Decoder(_Applied).decode_lines(at.times.read_bytes())
    heard = {engine.name: witness.heard for engine, witness in zip(fleet.engines, fleet.witnesses, strict=True)}
    into.event_ms += [line.delay_ms for line in lines]
    into.wire_ms += [max(0.0, 1e3 * (line.at - heard[line.pod][line.seq])) for line in lines]


def rows_of(engine: str, measured: dict[str, Measured]) -> list[Row]:
    """`measured` has every policy, ours before the others, and the calm load."""
    name = f"engines.{engine}"
    calm = measured.pop("calm")
    ours, other = measured["treeline"], measured["round_robin"]
    rows = [
        row(f"{name}.hit_vs_oracle", ours.cached / ours.possible),
        row(f"{name}.ttft_vs_rr", percentile(ours.ttft_ms, 50) / percentile(other.ttft_ms, 50)),
        *(row(f"{name}.event_ms.p{q}", percentile(calm.event_ms, q)) for q in (50, 99)),
        *(row(f"{name}.event_wire_ms.p{q}", percentile(calm.wire_ms, q)) for q in (50, 99)),
        *(row(f"{name}.event_busy_ms.p{q}", percentile(ours.wire_ms, q)) for q in (50, 99)),
    ]
    for policy, found in measured.items():
        rows += [
            row(f"{name}.hit_rate.{policy}", found.hit_rate, found.possible / found.prompt),
            *(
                row(f"{name}.ttft_ms.p{q}.{policy}", percentile(found.ttft_ms, q), percentile(other.ttft_ms, q))
                for q in (50, 99)
            ),
        ]
    return rows


def run(kind: type[Server], context: Context) -> list[Row]:
    shape = QUICK if context.quick else FULL
    maker = PromptMaker.of_model(context.model)
    traffic = Traffic(shape, maker, MODEL_NAME)
    measured = {policy: Measured() for policy in POLICIES}
    context.display.phase(f"starting two {kind.installation.engine} servers")
    with fleet(kind, shape, context) as servers:
        for number in range(1 if context.quick else ROUNDS):
            for policy in POLICIES if number % 2 == 0 else reversed(POLICIES):
                _round(policy, servers, traffic, measured[policy], context)
        calm = Traffic(QUICK_CALM if context.quick else CALM, maker, MODEL_NAME)
        _round("treeline", servers, calm, measured.setdefault("calm", Measured()), context)
    return rows_of(kind.engine, measured)


def _benchmark(name: str, kind: type[Server]) -> Benchmark:
    engine, word = kind.installation.engine, kind.installation.word
    return Benchmark(
        name,
        f"Two real {engine} servers behind the picker",
        f"hits and first tokens of {engine} on CPUs, by its own events (only by name; `make {word}`)",
        partial(run, kind),
        only_by_name=True,
        versions=kind.installation.versions,
    )


BENCHMARKS = (_benchmark("engines", Vllm), _benchmark("engines-sglang", Sglang))
