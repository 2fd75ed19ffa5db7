"""Benchmark `routing`: the savings of prefix-aware routing on real runtimes.

Method. `treeline up` starts Envoy, the picker and 2 CPU runtimes of the tiny model with one torch thread each,
restarted for every policy. The load: 16 groups of 8 requests; a group shares 1,024 tokens, each request has 64 more and
asks for 16 (greedy, end-of-sequence ignored), in one seeded order for all policies. 4 clients send the next request
when their last is answered (a closed loop), so that no policy is overloaded and all do the same work.

A runtime caches 12,288 tokens: three quarters of the 16 shared prefixes (16,384), so they do not all fit on one; half
of them (8,192) fit on each, with 4,096 tokens for running requests, leftovers and an uneven split. A policy that
spreads groups over both runtimes must evict; one that keeps them together need not.

Hit rate = cached ÷ prompt tokens, from the runtimes' `usage`; prompt lengths are checked. An oracle computes each
shared prefix once. Time to first token is measured at the client, through Envoy.

Bias. Prefixes are long and groups equal, which suits prefix routing; the model is so small that Envoy, picker, client
and two runtimes on shared cores are a visible part of each time.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from treeline_bench.context import Benchmark, BenchmarkError, Context
from treeline_bench.metrics import row
from treeline_bench.processes import child, free_ports
from treeline_bench.prompts import PromptMaker
from treeline_bench.results import Row
from treeline_bench.serving import measure
from treeline_bench.serving.datasets import DATASETS, Shape, Words
from treeline_bench.serving.plan import Plan
from treeline_bench.serving.server import find
from treeline_bench.serving.summary import Summary

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

    @property
    def prompt(self) -> int:
        return self.prefix + self.suffix

    @property
    def requests(self) -> int:
        return self.groups * self.repeats

    @property
    def cache(self) -> int:
        """Tokens of a runtime's cache: three quarters of all shared prefixes."""
        return self.groups * self.prefix * 3 // 4

    @property
    def oracle_cached(self) -> int:
        """Cached prompt tokens if each shared prefix is computed once (whole pages only)."""
        return self.groups * (self.repeats - 1) * (self.prefix // PAGE_TOKENS * PAGE_TOKENS)

    def plan(self) -> Plan:
        """A load of `treeline bench serving`: always the same requests in the same order."""
        return Plan(
            dataset=DATASETS["generated-shared-prefix"],
            shape=Shape(
                groups=self.groups,
                prompts_per_group=self.repeats,
                prefix_len=self.prefix,
                input_len=self.suffix,
                output_len=self.output,
            ),
            seed=1,
            concurrency=self.concurrency,
            timeout_s=120.0,
            body={"temperature": 0, "ignore_eos": True},
        )


FULL = Settings()
QUICK = Settings(groups=4, repeats=3, prefix=256, suffix=32, output=4)


def up_command(settings: Settings, context: Context, policy: str) -> tuple[list[str], int]:
    """The command that starts everything, and the gateway's port."""
    port = free_ports(1, run=5 + 2 * 6)[0]
    argv = [sys.executable, "-m", "treeline", "up", str(context.model), "--port-base", str(port)]
    argv += ["--served-model-name", MODEL_NAME, "--replicas", "2", "--threads", "1", "--policy", policy]
    argv += ["--log-level", "warning"]
    argv += ["--", "--max-total-tokens", str(settings.cache), "--page-size", str(PAGE_TOKENS)]
    return argv, port


def checked(summary: Summary, settings: Settings) -> Summary:
    """Raises BenchmarkError if a runtime counted other lengths than asked for, or answered nothing."""
    found = (summary.prompt_tokens, summary.output_tokens)
    wanted = (summary.completed * settings.prompt, summary.completed * settings.output)
    if found != wanted:
        raise BenchmarkError(f"wanted {wanted} tokens (prompt, output), the runtimes counted {found}")
    if not summary.completed:
        raise BenchmarkError(f"no request was answered: {summary.examples}")
    return summary


def _run_policy(policy: str, settings: Settings, context: Context) -> Summary:
    display = context.display
    display.phase(f"{policy}: starting Envoy, the picker and 2 runtimes")
    argv, port = up_command(settings, context, policy)
    with child("treeline-up", argv, context.folder) as up:
        up.wait_until(lambda: "ready: http" in up.log_path.read_text(errors="replace"), "starting", START_S)
        server = find(policy, f"http://127.0.0.1:{port}", "", MODEL_NAME)
        texts = Words(PromptMaker.of_model(context.model))
        (measured,) = measure.run(settings.plan(), [server], texts, {}, display).measured
        return checked(measured.rounds[0], settings)


def rows_of(measured: dict[str, Summary], settings: Settings) -> list[Row]:
    """The rows of all policies; `measured` must have `random`, the reference of times."""
    baseline = measured["random"]
    total = settings.requests * settings.prompt
    rows: list[Row] = []
    for policy, found in measured.items():
        cached = found.cached_tokens or 0
        assert found.ttft_ms is not None
        assert baseline.ttft_ms is not None
        rows += [
            row(f"routing.hit_rate.{policy}", cached / found.prompt_tokens, settings.oracle_cached / total),
            row(f"routing.computed_tokens.{policy}", found.prompt_tokens - cached, total - settings.oracle_cached),
            row(f"routing.ttft_ms.p50.{policy}", found.ttft_ms.p50, baseline.ttft_ms.p50),
            row(f"routing.ttft_ms.p99.{policy}", found.ttft_ms.p99, baseline.ttft_ms.p99),
            row(f"routing.duration_s.{policy}", found.duration_s, baseline.duration_s),
            row(f"routing.errors.{policy}", found.failed),
        ]
    return rows


def run(context: Context) -> list[Row]:
    settings = QUICK if context.quick else FULL
    measured = {policy: _run_policy(policy, settings, context) for policy in POLICIES}
    return rows_of({policy: measured[policy] for policy in reversed(POLICIES)}, settings)


BENCHMARK = Benchmark(
    "routing",
    "Shared prefixes on two CPU runtimes",
    "hit rate, computed tokens, time to first token: treeline, round robin, random (minutes)",
    run,
)
