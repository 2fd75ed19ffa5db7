"""The benchmarks by name, in order."""

from __future__ import annotations

from collections.abc import Sequence

from treeline_bench import forms_sim, gie, media_sim, picker, routing, routing_sim, scripts
from treeline_bench.context import Benchmark
from treeline_bench.kubernetes import benchmark as operator
from treeline_bench.kubernetes import throttled
from treeline_bench.serving.datasets import DATASETS

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        picker.BENCHMARK,
        gie.BENCHMARK,
        routing.BENCHMARK,
        routing_sim.BENCHMARK,
        forms_sim.BENCHMARK,
        media_sim.BENCHMARK,
        *scripts.BENCHMARKS,
        operator.BENCHMARK,
        throttled.BENCHMARK,
    )
}

ON_GPU = ("speculation-llama8b", "lora-llama8b")
ELSEWHERE = ("e2e", "programs", scripts.CORPUS, *(f"serving-{name}" for name in DATASETS), *ON_GPU)
"""Further results, written by journeys on a real Kubernetes (`make e2e`), `treeline bench programs`, `treeline bench
structured --corpus DIR`, `treeline bench serving --results DIR`, and by scripts on a GPU."""


def select(names: Sequence[str]) -> list[Benchmark]:
    """Returns the named benchmarks; without names all, except those that run only by name. Raises KeyError, which lists
    the names."""
    for name in names:
        if name not in BENCHMARKS:
            raise KeyError(f"unknown benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    if names:
        return [BENCHMARKS[name] for name in names]
    return [benchmark for benchmark in BENCHMARKS.values() if not benchmark.only_by_name]
