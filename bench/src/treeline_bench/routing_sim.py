"""Benchmark `routing-sim`: the picker's policies on simulated engines, beside all-knowing routers.

Method. Eight simulated engines of Llama-3.1-8B on an H200 (`model/presets.py`: the times of its hardware's limits),
each trace of `traces/` once for each policy, in simulated time: the picker's own core decides, fed with events and load
2 ms old. Open-loop arrivals at a rate that the fleet bears when it routes well; half of the requests that the trace has
by itself. Then the same with four pickers, which tell each other what they have in flight (`treeline_epp.peers`, a
datagram takes half a millisecond), one KV batch and one datagram in a hundred lost, one engine and one picker restarted
in the middle: for our policy, the oracles, and the two others whose first tokens came soonest before.

The reference of hit rates is the better of two oracles that see every cache and queue: one picks the endpoint with the
earliest first token, the other the one with most cached, however long its queue, which is not always worth it. The
reference of times is the best other policy.

Bias. Networks and proxies cost nearly nothing here, texts are random (only the trace's prefixes are shared), and the
picker knows output lengths as `max_tokens`. Other seeds move most ratios by some hundredths, and by tenths where few
requests decide the 90th percentile: where about one in sixteen computes its prefix, or one prefix has most of the load.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treeline_sim.figures import Compared, Figures, compare, endless_hit_rate
from treeline_sim.routers import ORACLES
from treeline_sim.simulation import Faults
from treeline_sim.traces import TRACES

from treeline_bench.context import Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

if TYPE_CHECKING:
    from treeline_sim.run import Plan

QUICK_REQUESTS = 60
SHARE = 2
"""Divides the requests of a trace: all traces and policies take some twenty minutes."""
RIVALS = 2
"""Other policies that also run with faults: the fastest without."""
OTHERS = ("cache_aware", "least_load", "power_of_two", "prefix_hash", "consistent_hashing", "round_robin", "random")
"""The picker's other policies that need only a request's prompt."""


def run(context: Context) -> list[Row]:
    """Rows of all traces."""
    from treeline_sim.run import Plan  # with the picker's room, which only this benchmark needs

    rows: list[Row] = []
    for trace in TRACES.values():
        plan = Plan(trace, requests=QUICK_REQUESTS if context.quick else trace.requests // SHARE)
        lasts = plan.requests / trace.rate
        faults = Faults(event_loss=0.01, engines=((0, lasts / 3),), routers=((0, lasts / 2),))
        endless = endless_hit_rate(plan.generate(), plan.engine.block_size)
        names = _policies()
        well = _all(context, plan, names, trace.name)
        badly = _all(context, replace(plan, pickers=4, faults=faults), _rivals(well), f"{trace.name}, with faults")
        rows += rows_of(trace.name, well, badly, endless)
    return rows


def _policies() -> list[str]:
    """All compared policies, ours first."""
    from treeline_sim.picker_core import DEFAULT_POLICY
    from treeline_sim.run import known_policies

    known = known_policies()
    return [DEFAULT_POLICY, *(name for name in OTHERS if name in known), *ORACLES]


def _rivals(well: list[Figures]) -> list[str]:
    """Ours, its fastest rivals, and the oracles."""
    others = sorted((one for one in well[1:] if one.policy not in ORACLES), key=lambda one: one.ttft_p90_ms)
    return [well[0].policy, *(one.policy for one in others[:RIVALS]), *ORACLES]


def _all(context: Context, plan: Plan, names: list[str], title: str) -> list[Figures]:
    from treeline_sim.run import simulate

    found = []
    for name in names:
        context.display.phase(f"{title}: {name}", plan.total)
        found.append(simulate(plan, name, context.display.done))
    return found


def rows_of(trace: str, well: list[Figures], badly: list[Figures], endless: float) -> list[Row]:
    """Rows of one trace. The first policy is ours."""
    name = f"routing.{trace}"
    rows = [*_ratios(name, compare(well)[0]), *_ratios(f"{name}.faults", compare(badly)[0])]
    for one in well:
        rows += [
            row(f"{name}.hit_rate.{one.policy}", one.hit_rate, endless),
            *(
                row(f"{name}.{field}.{one.policy}", getattr(one, field))
                for field in ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "output_tokens_s", "load_cov", "errors")
            ),
        ]
    return rows


def _ratios(name: str, ours: Compared) -> list[Row]:
    return [
        row(f"{name}.hit_vs_oracle", ours.hit_vs_oracle or 0.0),
        row(f"{name}.ttft_p90_vs_best", ours.ttft_p90_vs_best or 0.0),
    ]


BENCHMARK = Benchmark(
    "routing-sim",
    "Routing on simulated engines",
    "the picker's policies and oracles on twelve traces, simulated engines (twenty minutes)",
    run,
)
