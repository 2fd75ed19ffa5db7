"""Benchmark `forms-sim`: what the picker's choice of a form for each request brings, on simulated engines.

Method. Eight engines as in `routing-sim`; figures are means of three seeds. *ours*: some of them compute prompts for
the others, where the picker finds that worth it (docs/disaggregation.md). *always*: every prompt is computed so. Both
have the number of such engines with which their requests are shortest. *never*: all eight serve whole requests. The
reference is the better one of *always* and *never*.

Bias. That of `routing-sim`. Pages take 20 µs for a token, and those of a prompt's last step travel after it is
computed, the others before. Roles stay: *never* has more
engines for prompts and for answers, and *always* disturbs no answer.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from treeline_sim.figures import Figures
from treeline_sim.routers import TraceRequest
from treeline_sim.traces import TRACES
from treeline_sim.traces.base import Draw, Trace, merged
from treeline_sim.traces.sessions import TOKEN_S

from treeline_bench.context import Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

SEEDS = (1, 2, 3)
COMPARED = {"ttft_p90": "ttft_p90_ms", "itl_p99": "itl_p99_ms", "request": "request_s"}


def documents(share: float, draw: Draw) -> Iterator[TraceRequest]:
    """Chats of 50 to 1,000 tokens, 100 to 800 out; this share of the requests has 6k to 32k and 50 to 400 out."""
    for at in draw.arrivals():
        long = draw.rng.random() < share
        prompt, most = draw.text(draw.log_between(*((6000, 32_000) if long else (50, 1000)))), 400 if long else 800
        yield draw.request(at, prompt, draw.log_between(most // 8, most))


def conversations(draw: Draw) -> Iterator[TraceRequest]:
    """Chats of 3 to 10 turns of 30 to 500 tokens, 100 to 800 out; a fifth of them begin with 6k to 32k."""
    systems = [draw.text(draw.log_between(200, 2000)) for _ in range(20)]

    def chat(at: float) -> Iterator[TraceRequest]:
        text = draw.rng.choice(systems)
        if draw.rng.random() < 0.2:
            text = text.extended(draw.log_between(6000, 32_000), draw.rng)
        for _ in range(draw.between(3, 10)):
            request = draw.request(at, text.extended(draw.log_between(30, 500), draw.rng), draw.log_between(100, 800))
            yield request
            text, at = request.whole, at + TOKEN_S * request.output_tokens + draw.rng.expovariate(1 / 5.0)

    return merged((at, chat(at)) for at in draw.arrivals(draw.rate / 6.5))


MIXES = (
    (Trace("documents-5", "one request in twenty is long", 80.0, 1500, partial(documents, 0.05)), 2, 4),
    (Trace("documents-20", "one request in five is long", 32.0, 1500, partial(documents, 0.2)), 3, 4),
    (Trace("conversations", "a fifth of the chats is about a document", 120.0, 1500, conversations), 1, 3),
    (TRACES["code-agent"], 1, 3),
)
"""Traces, and how many of the eight engines compute prompts for *ours*, and for *always*."""


def run(context: Context) -> list[Row]:
    """Rows of all traces."""
    from treeline_sim.run import Plan, simulate  # with the picker's room, as in `routing_sim`
    from treeline_sim.simulation import Sharing

    rows: list[Row] = []
    for trace, some, most in MIXES:
        found: dict[str, list[Figures]] = {}
        policies = {"ours": Sharing(some), "never": Sharing(), "always": Sharing(most, always=True)}
        for policy, sharing in policies.items():
            context.display.phase(f"{trace.name}: {policy}")
            plans = [Plan(trace, seed=seed, requests=40 if context.quick else 1500, sharing=sharing) for seed in SEEDS]
            found[policy] = [simulate(plan, "predicted_ttft") for plan in plans]
        rows += rows_of(trace.name, found)
    return rows


def rows_of(trace: str, found: Mapping[str, Sequence[Figures]]) -> list[Row]:
    """Rows of one trace, from the figures of *ours*, *never* and *always* by seed."""
    ratios, rows = list[Row](), list[Row]()
    for name, field in COMPARED.items():
        by = {policy: statistics.fmean(getattr(one, field) for one in each) for policy, each in found.items()}
        ratios.append(row(f"forms.{name}_vs_best.{trace}", by["ours"] / min(by["never"], by["always"])))
        rows += [row(f"forms.{field}.{trace}.{policy}", value) for policy, value in by.items()]
    counts = sum((Counter(one.forms) for one in found["ours"]), Counter[str]())
    return ratios + rows + [row(f"forms.{form}.{trace}", counts[form]) for form in ("apart", "pull")]


BENCHMARK = Benchmark(
    "forms-sim", "Forms of requests on simulated engines", "whole, apart or as the picker chooses", run
)
