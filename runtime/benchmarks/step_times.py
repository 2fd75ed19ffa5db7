"""How long an engine's steps take by what is in them: what a model of its time is fitted to (`treeline sim calibrate`).

    python runtime/benchmarks/step_times.py --model models/tiny --threads 1

Prints a row of JSON for each figure, the least of some rounds. It is CPU time of the process, all threads together:
with one thread that is what a core takes that has nothing else to do. Freed memory is kept (`MALLOC_`): whether a step
pays for thousands of page faults depends on what was allocated before it, and would be the larger part of some figures.

- `prefill.N`: milliseconds of one prompt of N tokens that nothing has cached, to its first token.
- `decode.bN.ctxC`: milliseconds of a step of N sequences of C tokens on average: N prompts are continued by a few and
  by many tokens (greedy), and the difference is divided.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

import torch
from treeline_runtime import Engine, SamplingParams

PREFILL = (64, 256, 512, 1024, 2048)
DECODE = ((1, 64), (1, 1024), (8, 64), (8, 512), (32, 64), (32, 256))
SHORT, LONG = 4, 68


def run(engine: Engine, batch: int, context: int, output: int) -> float:
    """CPU seconds for so many fresh prompts."""
    prompts = [random.choices(range(10, 1000), k=context) for _ in range(batch)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=output)
    started = time.process_time()
    engine.generate(prompts, params)
    return time.process_time() - started


def keep_memory() -> None:
    """Begin anew with an allocator that gives nothing back; it reads its settings when a process starts."""
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        kept = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="of each figure (default: 5)")
    args = parser.parse_args()
    keep_memory()
    random.seed(0)
    torch.set_num_threads(args.threads)
    engine = Engine(args.model)

    def report(metric: str, seconds: float) -> None:
        sys.stdout.write(json.dumps({"metric": metric, "value": seconds * 1e3}) + "\n")
        sys.stdout.flush()

    run(engine, 4, 64, 8)  # whatever is compiled or chosen at first use
    for tokens in PREFILL:
        report(f"prefill.{tokens}", min(run(engine, 1, tokens, 1) for _ in range(args.rounds)))
    for batch, context in DECODE:
        begin = context - (SHORT + LONG) // 2
        short = min(run(engine, batch, begin, SHORT) for _ in range(args.rounds))
        long = min(run(engine, batch, begin, LONG) for _ in range(args.rounds))
        report(f"decode.b{batch}.ctx{context}", (long - short) / (LONG - SHORT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
