"""The engine beside `transformers.generate`, on the same checkpoint, device and threads, in one run.

    python runtime/benchmarks/versus_transformers.py --model models/tiny

Prints rows of JSON: `cpu.tokens_s.bN` (output tokens a second of ours, N prompts at once, greedy), the same of
transformers as `cpu.transformers_tokens_s.bN`, and `cpu.vs_transformers.bN`, the median of the rounds' own ratios. A
round is one run of each, in alternating order, with prompts of its own; the first one is not counted. Prompts are of
one length, so transformers needs no padding, and both compute exactly as many tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from treeline_runtime import Engine, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
STREAMS = (1, 8, 32)
PROMPT, OUTPUT = 128, 128


def report(metric: str, value: float) -> None:
    sys.stdout.write(json.dumps({"metric": metric, "value": value}) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def without_tokenizer(model: Path) -> Iterator[Path]:
    """The checkpoint alone, so that our engine makes no text either."""
    with tempfile.TemporaryDirectory() as name:
        for path in (model / "config.json", *model.glob("*.safetensors"), *model.glob("*.safetensors.index.json")):
            (Path(name) / path.name).symlink_to(path.resolve())
        yield Path(name)


def ours(engine: Engine, prompts: list[list[int]], output: int) -> float:
    """Seconds."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=output)
    started = time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds = time.perf_counter() - started
    assert all(len(each.token_ids) == output for each in outputs)
    return seconds


def theirs(model: Any, prompts: list[list[int]], output: int) -> float:
    """Seconds."""
    ids = torch.tensor(prompts)
    started = time.perf_counter()
    with torch.inference_mode():
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=output, max_new_tokens=output
        )
    seconds = time.perf_counter() - started
    assert answer.shape == (len(prompts), len(prompts[0]) + output)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch, for both (default: torch's own)")
    parser.add_argument("--quick", action="store_true", help="short, one round: proves that it works")
    args = parser.parse_args()
    rounds, output, streams = (1, 8, STREAMS[:2]) if args.quick else (args.rounds, OUTPUT, STREAMS)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    vocabulary = model.config.vocab_size
    rng = random.Random(0)
    with without_tokenizer(args.model) as folder, Engine(folder, device="cpu", dtype="float32") as engine:
        for count in streams:
            times: list[tuple[float, float]] = []
            for round_ in range(rounds + 1):
                prompts = [rng.choices(range(10, vocabulary - 10), k=PROMPT) for _ in range(count)]
                if round_ % 2:
                    other = theirs(model, prompts, output)
                    times.append((ours(engine, prompts, output), other))
                else:
                    mine = ours(engine, prompts, output)
                    times.append((mine, theirs(model, prompts, output)))
            counted = times[1:]
            for name, at in (("tokens_s", 0), ("transformers_tokens_s", 1)):
                report(f"cpu.{name}.b{count}", statistics.median(count * output / each[at] for each in counted))
            report(f"cpu.vs_transformers.b{count}", statistics.median(other / mine for mine, other in counted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
