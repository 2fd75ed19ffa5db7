"""What a metric is, and the families of those that differ by a name: of other engines, and of simulated traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from treeline_bench.sim.traces import TRACES


@dataclass(frozen=True)
class Metric:
    """What a figure means. `reference` is None where it is measured beside the value; `source`: where it is from."""

    unit: str
    meaning: str
    better: Literal["lower", "higher"]
    reference: float | None = None
    source: str = ""
    beside: str = ""
    """What was measured beside it, in a word."""
    headline: bool = True
    """Shown in the README's summary."""


EXPECTED = "expected on 2 cores"


def of_engine(engine: str) -> dict[str, Metric]:
    """Those of two servers of an engine that is not ours."""
    name = f"engines.{engine.lower()}"
    return {
        f"{name}.hit_vs_oracle": Metric(
            "share",
            f"prompt tokens that two {engine} servers had cached, by what one endless cache of both would have had",
            "higher",
            0.95,
            EXPECTED,
        ),
        f"{name}.ttft_vs_rr": Metric(
            "times", "time to first token of the same, median, by that of round robin", "lower", 0.5, EXPECTED
        ),
        f"{name}.event_ms.p50": Metric(
            "ms",
            f"a batch of {engine}'s KV events from its making to the picker's tree, median",
            "lower",
            headline=False,
        ),
        f"{name}.event_ms.p99": Metric("ms", "the same at the 99th percentile", "lower", 20.0, EXPECTED),
        f"{name}.event_wire_ms": Metric(
            "ms", "the same from the moment when another subscriber has it", "lower", headline=False
        ),
        f"{name}.event_busy_ms": Metric(
            "ms", "the latter while the servers compute long prompts on the picker's cores", "lower", headline=False
        ),
        f"{name}.hit_rate": Metric(
            "share",
            f"prompt tokens that {engine} had cached, by its own count",
            "higher",
            source="an endless cache of all servers",
            beside="oracle",
            headline=False,
        ),
        f"{name}.ttft_ms": Metric(
            "ms",
            "time to first token",
            "lower",
            source="round robin, same run",
            beside="round robin",
            headline=False,
        ),
    }


def simulated() -> dict[str, Metric]:
    """Those of `routing-sim`, for each trace."""
    bound = "the bound that was set"
    plain: dict[str, tuple[str, str, Literal["lower", "higher"]]] = {
        **{f"ttft_p{q}_ms": ("ms", f"time to first token, percentile {q}", "lower") for q in (50, 90, 99)},
        "output_tokens_s": ("tokens/s", "of all endpoints", "higher"),
        "load_cov": ("share", "spread of requests over endpoints: deviation ÷ mean", "lower"),
        "errors": ("requests", "without a whole answer", "lower"),
    }
    found: dict[str, Metric] = {}
    for trace in TRACES:
        name = f"routing.{trace}"
        hits = "hit rate of the picker's default policy on simulated engines, by that of the better oracle"
        faults = " with 4 pickers, 1 % of events and of their words lost, an engine and a picker restarted"
        waits = "time to first token, 90th percentile, by the best other policy's"
        found |= {
            f"{name}.hit_vs_oracle": Metric("share", f"{hits}, trace {trace}", "higher", 0.98, bound),
            f"{name}.ttft_p90_vs_best": Metric("times", f"{waits}, trace {trace}", "lower", 1.05, bound),
            f"{name}.faults.hit_vs_oracle": Metric("share", f"the same{faults}", "higher", 0.93, bound, headline=False),
            f"{name}.faults.ttft_p90_vs_best": Metric(
                "times", f"the same{faults}", "lower", 1.05, bound, headline=False
            ),
            f"{name}.hit_rate": Metric(
                "share",
                "prompt tokens from a cache",
                "higher",
                source="one endless cache of all endpoints",
                beside="endless",
                headline=False,
            ),
        }
        found |= {f"{name}.{what}": Metric(*described, headline=False) for what, described in plain.items()}
    return found


def beside_peers() -> dict[str, Metric]:
    """Those of `routing-sim --peers`, for each trace; the tail is a router's name."""
    same = "the other router, same run"
    found: dict[str, Metric] = {}
    for trace in TRACES:
        name = f"routing.peers.{trace}"
        of = f"trace {trace}, simulated engines behind sockets"
        found |= {
            f"{name}.hit_vs": Metric(
                "times", f"our hit rate by that of another router, {of}", "higher", 1.0, same, headline=False
            ),
            f"{name}.ttft_p90_vs": Metric(
                "times",
                f"our time to first token by that of another router, 90th percentile, {of}",
                "lower",
                1.0,
                same,
                headline=False,
            ),
            f"{name}.hit_rate": Metric(
                "share",
                "prompt tokens from a cache, as the engines count them",
                "higher",
                source="one endless cache of all engines",
                beside="endless",
                headline=False,
            ),
            f"{name}.ttft_p50_ms": Metric("ms", "time to first token, median", "lower", headline=False),
            f"{name}.ttft_p90_ms": Metric("ms", "the same, 90th percentile", "lower", headline=False),
            f"{name}.errors": Metric("requests", "without a whole answer", "lower", headline=False),
            f"{name}.late": Metric("requests", "sent over 20 ms after they were due", "lower", headline=False),
        }
    return found
