"""Benchmark `routing`: what prefix-aware routing saves on real runtimes.

Method. `treeline up` starts Envoy, the picker and 2 CPU runtimes of the tiny model with one torch thread each, afresh
for every policy. The load: 16 groups of 8 requests; the requests of a group share 1,024 tokens and have 64 of their
own, and ask for 16 tokens (greedy, end-of-sequence ignored). They come in one order, shuffled with a fixed seed, the
same for all policies. Arrivals are a closed loop of bounded concurrency: 4 clients, each sending the next request of
the list when its last was answered, so that no policy is driven into overload and all do the same work.

The cache of a runtime is 12,288 tokens: three quarters of the 16 shared prefixes (16,384 tokens), so that they do not
all fit on one runtime; half of them (8,192) fit on each, with 4,096 tokens to spare for running requests, for what
requests leave behind, and for an uneven split. A policy that spreads a group over both runtimes must therefore evict;
one that keeps it together need not.

Hit rate = cached ÷ prompt tokens, both from the runtimes' `usage`; prompt lengths are checked against what was built.
An oracle computes each shared prefix once. Time to first token is taken at the client, through Envoy.

Bias. Prefixes are long compared with what is unique and every group has the same size, which suits routing by prefix;
the model is so small that Envoy, picker, client and two runtimes sharing the machine's cores are a visible part of
each time.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass

import msgspec

from treeline_bench.client.messages import Call, ClosedLoop, Plan, Report
from treeline_bench.client.process import run_client
from treeline_bench.context import Benchmark, BenchmarkError, Context
from treeline_bench.metrics import row
from treeline_bench.processes import child, free_ports
from treeline_bench.prompts import PromptMaker
from treeline_bench.results import Row
from treeline_bench.stats import percentile

# The baselines first: rows of the others are compared with random's.
POLICIES = ("random", "round_robin", "treeline")
MODEL_NAME = "tiny"
PAGE_TOKENS = 16
START_S = 180.0


@dataclass(frozen=True)
class Settings:
    """Lengths in tokens."""

    groups: int = 16
    repeats: int = 8
    prefix: int = 1024
    suffix: int = 64
    output: int = 16
    concurrency: int = 4
    seed: int = 1

    @property
    def prompt(self) -> int:
        return self.prefix + self.suffix

    @property
    def requests(self) -> int:
        return self.groups * self.repeats

    @property
    def cache(self) -> int:
        """Of one runtime: three quarters of all shared prefixes."""
        return self.groups * self.prefix * 3 // 4

    @property
    def oracle_cached(self) -> int:
        """Prompt tokens from the cache when each shared prefix is computed once (whole pages only)."""
        return self.groups * (self.repeats - 1) * (self.prefix // PAGE_TOKENS * PAGE_TOKENS)


FULL = Settings()
QUICK = Settings(groups=4, repeats=3, prefix=256, suffix=32, output=4)


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, int] | None = None

    @property
    def cached(self) -> int:
        return (self.prompt_tokens_details or {}).get("cached_tokens", 0)


class _Chunk(msgspec.Struct):
    usage: _Usage | None = None
    error: dict[str, object] | None = None


@dataclass(frozen=True)
class Measured:
    """One policy's figures. Only requests with a complete answer count as answered."""

    prompt_tokens: int
    cached_tokens: int
    ttft_ms: list[float]
    errors: int
    duration_s: float


def build_calls(settings: Settings, maker: PromptMaker) -> list[Call]:
    """The requests in the order in which they are sent: the same for the same seed."""
    rng = random.Random(settings.seed)
    prefixes = [maker.text(settings.prefix, rng) for _ in range(settings.groups)]
    prompts = [
        maker.with_shared_prefix(prefix, settings.suffix, rng) for prefix in prefixes for _ in range(settings.repeats)
    ]
    rng.shuffle(prompts)
    return [Call("/v1/completions", json.dumps(_body(settings, prompt)).encode()) for prompt in prompts]


def _body(settings: Settings, prompt: str) -> dict[str, object]:
    return {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": settings.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def usage_of(body: bytes) -> _Usage | None:
    """The usage that a stream ended with; None when it did not end as it should."""
    usage: _Usage | None = None
    finished = False
    for line in body.splitlines():
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            finished = True
            continue
        chunk = msgspec.json.decode(data, type=_Chunk)
        if chunk.error is not None:
            return None
        usage = chunk.usage or usage
    return usage if finished else None


def measure(report: Report, settings: Settings) -> Measured:
    """Raises BenchmarkError when a runtime counted other lengths than were asked for."""
    complete = [(outcome, usage) for outcome in report.answered() if (usage := usage_of(outcome.body)) is not None]
    for _, usage in complete:
        found, wanted = (usage.prompt_tokens, usage.completion_tokens), (settings.prompt, settings.output)
        if found != wanted:
            raise BenchmarkError(f"wanted {wanted} tokens (prompt, output), a runtime counted {found}")
    return Measured(
        prompt_tokens=sum(usage.prompt_tokens for _, usage in complete),
        cached_tokens=sum(usage.cached for _, usage in complete),
        ttft_ms=[outcome.first_ms for outcome, _ in complete],
        errors=len(report.outcomes) - len(complete),
        duration_s=report.wall_s(),
    )


def up_command(settings: Settings, context: Context, policy: str) -> tuple[list[str], int]:
    """The command that starts everything, and the gateway's port."""
    names = (
        "port",
        "runtime-port",
        "runtime-metrics-port",
        "runtime-admin-port",
        "events-port",
        "replay-port",
        "load-port",
        "ext-proc-port",
        "eds-port",
        "metrics-port",
        "picker-admin-port",
    )
    ports = dict(zip(names, free_ports(len(names), run=2), strict=True))
    argv = [sys.executable, "-m", "treeline", "up", "--model", str(context.model)]
    argv += ["--served-model-name", MODEL_NAME, "--replicas", "2", "--threads", "1", "--policy", policy]
    argv += ["--log-level", "warning"]
    for name, port in ports.items():
        argv += [f"--{name}", str(port)]
    argv += ["--", "--max-total-tokens", str(settings.cache), "--page-size", str(PAGE_TOKENS)]
    return argv, ports["port"]


def _run_policy(policy: str, settings: Settings, calls: list[Call], context: Context) -> Measured:
    display = context.display
    display.phase(f"{policy}: starting Envoy, the picker and 2 runtimes")
    argv, port = up_command(settings, context, policy)
    with child("treeline-up", argv, context.folder) as up:
        up.wait_until(lambda: "ready: http" in up.log_path.read_text(errors="replace"), "starting", START_S)
        display.phase(f"{policy}: {settings.requests} requests", settings.requests)
        plan = Plan(
            "127.0.0.1",
            port,
            calls,
            ClosedLoop(settings.concurrency),
            count=len(calls),
            timeout_s=120.0,
            keep_bodies=True,
        )
        report = run_client(plan, context.folder, progress=display.done)
    return measure(report, settings)


def rows_of(measured: dict[str, Measured], settings: Settings) -> list[Row]:
    """Rows of all policies; `measured` must have `random`, which is what times are compared with."""
    baseline = measured["random"]
    total = settings.requests * settings.prompt
    rows: list[Row] = []
    for policy, found in measured.items():
        rate = found.cached_tokens / found.prompt_tokens if found.prompt_tokens else 0.0
        computed = found.prompt_tokens - found.cached_tokens
        rows += [
            row(f"routing.hit_rate.{policy}", rate, settings.oracle_cached / total),
            row(f"routing.computed_tokens.{policy}", computed, total - settings.oracle_cached),
            *(
                row(
                    f"routing.ttft_ms.p{q}.{policy}",
                    percentile(found.ttft_ms, q),
                    percentile(baseline.ttft_ms, q),
                )
                for q in (50, 99)
            ),
            row(f"routing.duration_s.{policy}", found.duration_s, baseline.duration_s),
            row(f"routing.errors.{policy}", found.errors),
        ]
    return rows


def run(context: Context) -> list[Row]:
    settings = QUICK if context.quick else FULL
    calls = build_calls(settings, PromptMaker.of_model(context.model))
    measured = {policy: _run_policy(policy, settings, calls, context) for policy in POLICIES}
    for policy, found in measured.items():
        if not found.ttft_ms:
            raise BenchmarkError(f"{policy}: no request was answered")
    return rows_of({policy: measured[policy] for policy in reversed(POLICIES)}, settings)


BENCHMARK = Benchmark(
    "routing",
    "Shared prefixes on two CPU runtimes",
    "hit rate, computed tokens, time to first token: treeline, round robin, random (minutes)",
    run,
)
