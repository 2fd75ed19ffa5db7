"""Benchmark `vllm`: a batch of requests by this engine and by vLLM, on one GPU, one after the other.

Method. The room `runtime/` runs both (`runtime/benchmarks/versus_vllm.py`, which says how), for the shapes of benchmark
`engine`. vLLM is what is installed beside this engine, or in the folder that TREELINE_BENCH_VLLM names.
"""

from __future__ import annotations

import importlib.util
import os

from treeline_bench import engine, scripts
from treeline_bench.context import ROOT, Benchmark, BenchmarkError, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

WHAT = "the comparison with vLLM"
SCRIPT = ROOT / "runtime" / "benchmarks" / "versus_vllm.py"
FOLDER = "TREELINE_BENCH_VLLM"
LIMIT_S = 1800.0


def run(context: Context) -> list[Row]:
    folder = os.environ.get(FOLDER)
    if folder is None and importlib.util.find_spec("vllm") is None:
        raise BenchmarkError(f"vLLM is not installed here; {FOLDER} may name the folder of another Python's packages")
    if not engine.has_cuda():
        raise BenchmarkError("the comparison with vLLM needs a CUDA device")
    rows = []
    for shape in engine.shapes():
        context.display.phase(f"vllm: {shape}")
        args = [
            "--shape",
            shape,
            *(["--vllm-path", folder] if folder else []),
            *(["--rounds=1"] if context.quick else []),
        ]
        values = scripts.parse(scripts.printed(SCRIPT, args, WHAT, LIMIT_S), (f"offline.vs_vllm.{shape}",), WHAT)
        rows += [row(name, value) for name, value in values.items()]
    return rows


BENCHMARK = Benchmark(
    "vllm", "Beside vLLM", "a batch by this engine and by vLLM, on a GPU (only by name)", run, only_by_name=True
)
