"""Figures of a summary by name, over rounds, and against another server."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from treeline_bench.serving.summary import Summary

TIMES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
QUANTILES = ("mean", "p50", "p90", "p99", "max")


@dataclass(frozen=True)
class Line:
    """A figure in tables: its words, unit, and which direction is better."""

    name: str
    words: str
    unit: str
    better: Literal["lower", "higher"] | None = None
    share: bool = False


RATES = (
    Line("requests_s", "whole answers", "/s", "higher"),
    Line("prompt_tokens_s", "input", "tokens/s", "higher"),
    Line("output_tokens_s", "output", "tokens/s", "higher"),
    Line("goodput_s", "good answers", "/s", "higher"),
    Line("good_share", "good among whole", "%", "higher", share=True),
    Line("cached_share", "input from the cache", "%", "higher", share=True),
    Line("mean_concurrency", "under way, mean", ""),
    Line("errors", "failed", "requests", "lower"),
)


def figures(summary: Summary) -> dict[str, float]:
    """All figures by name: the ones of `RATES`, and `ttft_ms.p50` and so on."""
    found: dict[str, float | None] = {
        "requests_s": summary.requests_s,
        "prompt_tokens_s": summary.prompt_tokens_s,
        "output_tokens_s": summary.output_tokens_s,
        "goodput_s": summary.goodput_s,
        "good_share": summary.good / summary.completed if summary.good is not None and summary.completed else None,
        "cached_share": summary.cached_share,
        "mean_concurrency": summary.mean_concurrency,
        "errors": float(summary.failed),
    }
    times = (summary.ttft_ms, summary.itl_ms, summary.tpot_ms, summary.e2e_ms)
    for name, of in zip(TIMES, times, strict=True):
        if of is not None:
            found |= {f"{name}.{quantile}": getattr(of, quantile) for quantile in QUANTILES}
    return {name: value for name, value in found.items() if value is not None}


def medians(rounds: Sequence[Summary]) -> dict[str, float]:
    """Over the rounds with the figure."""
    all_figures = [figures(summary) for summary in rounds]
    names = dict.fromkeys(name for one in all_figures for name in one)
    return {name: statistics.median(one[name] for one in all_figures if name in one) for name in names}


def ratios(ours: Sequence[Summary], theirs: Sequence[Summary]) -> dict[str, float]:
    """Ours ÷ theirs: the median of the ratios of rounds that both have."""
    found: dict[str, list[float]] = {}
    for mine, other in zip(ours, theirs, strict=False):  # after a Ctrl-C one may have a round more
        others = figures(other)
        for name, value in figures(mine).items():
            if others.get(name):
                found.setdefault(name, []).append(value / others[name])
    return {name: statistics.median(values) for name, values in found.items()}
