"""The metrics of `treeline bench programs`."""

from __future__ import annotations

from treeline_bench.metric import EXPECTED, Metric

PAPER = "SGLang's paper"

METRICS: dict[str, Metric] = {
    "programs.hit_vs_optimal": Metric(
        "share",
        "prompt tokens that the server had cached, by what the best of all caches would have had, of a workload",
        "higher",
        0.96,
        f"{PAPER}: the mean",
        headline=False,
    ),
    "programs.hit_vs_optimal.min": Metric(
        "share",
        "prompt tokens that the server had cached, by what the best of all caches would have had: the least of eleven "
        "workloads of programs",
        "higher",
        0.96,
        f"{PAPER}: the mean",
    ),
    "programs.throughput_full_over_none": Metric(
        "×",
        "programs a second, by those with neither cache nor parallel branches, of a workload",
        "higher",
        headline=False,
    ),
    "programs.throughput_full_over_none.geomean": Metric(
        "×",
        "programs a second, by those with neither cache nor parallel branches: geometric mean of eleven workloads",
        "higher",
        3.0,
        EXPECTED,
    ),
    "programs.latency_full_over_none": Metric(
        "times",
        "time of a program that runs alone, by that with neither cache nor parallel branches",
        "lower",
        headline=False,
    ),
    "programs.api_speculation_call_ratio": Metric(
        "×",
        "calls of a black box for three fields of a text, by those with speculation: the worse of chats and "
        "completions",
        "higher",
        3.0,
        f"{PAPER}: about three times cheaper",
    ),
    "programs.api_speculation_call_ratio.chats": Metric("×", "the same of chats", "higher", headline=False),
    "programs.api_speculation_call_ratio.completions": Metric("×", "the same of completions", "higher", headline=False),
    "programs.throughput": Metric(
        "programs/s",
        "a batch of a workload under an ablation",
        "higher",
        source="neither cache nor parallel branches, same run",
        beside="none",
        headline=False,
    ),
    "programs.hit_rate": Metric(
        "share",
        "prompt tokens that the server had cached",
        "higher",
        source="the radix tree of all that was sent",
        beside="optimum",
        headline=False,
    ),
}
