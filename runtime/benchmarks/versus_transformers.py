"""The engine beside `transformers.generate`, on the same checkpoint, device and threads, in one run.

    python runtime/benchmarks/versus_transformers.py --model models/tiny

Prints rows of JSON, with T threads: `cpu.tokens_s.tT.bN` (output tokens a second of ours, N prompts at once, greedy),
the same of transformers as `cpu.transformers_tokens_s.tT.bN`, the median of the rounds' ratios as
`cpu.vs_transformers.tT.bN`, and the ratio of processor seconds, which a busy machine changes less, as
`cpu.vs_transformers_cpu_s.tT.bN`. A round is one run of each, in alternating order, with new prompts; the first round
is not counted.

- `bN`: prompts and outputs are of one length each, the best case of transformers. It pads nothing, and both compute the
  same number of tokens, so the ratio compares their steps.
- `mixed.bN`: prompts of 8 to 200 tokens, outputs of 16 to 128, as users send them. transformers pads prompts on the
  left to the longest, and computes every row until the longest answer has ended; only requested tokens count. Ours
  computes only those, so the ratio includes padding and batches that grow smaller.
- `prefill.N`: one prompt of N tokens, answered with one; the prompt's tokens count.

Each has its own process, and waits while the other computes: in one process two computing threads would have two OpenMP
teams, with more threads than cores (a step of ours took 1.9 times as long). Both compute in float32 and make no text.
transformers has its defaults: a dynamic cache, and attention by scaled_dot_product_attention. Its continuous batching
(`generate_batch`) is another program, and is not measured here.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from treeline_runtime import Engine, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
STREAMS = (1, 8, 32)
PROMPT, OUTPUT = 128, 128
LONG_PROMPT = 4096
MIXED_PROMPTS = (8, 200)
MIXED_SHORTEST = 16
"""Output; the longest is OUTPUT."""


@dataclass(frozen=True)
class Work:
    """Prompts that are sent at once, and how many tokens each is to be answered with."""

    prompts: list[list[int]]
    outputs: list[int]

    @classmethod
    def prefill(cls, rng: random.Random, count: int, output: int, vocabulary: range) -> Work:
        """One prompt of `count` tokens."""
        return cls([rng.choices(vocabulary, k=count)], [1])

    @classmethod
    def equal(cls, rng: random.Random, count: int, output: int, vocabulary: range) -> Work:
        return cls([rng.choices(vocabulary, k=PROMPT) for _ in range(count)], [output] * count)

    @classmethod
    def mixed(cls, rng: random.Random, count: int, output: int, vocabulary: range) -> Work:
        """`output`: of the longest."""
        lengths = [rng.randint(*MIXED_PROMPTS) for _ in range(count)]
        outputs = [rng.randint(min(MIXED_SHORTEST, output), output) for _ in range(count)]
        return cls([rng.choices(vocabulary, k=length) for length in lengths], outputs)

    @property
    def tokens(self) -> int:
        return sum(self.outputs) if max(self.outputs) > 1 else sum(map(len, self.prompts))


class Took(NamedTuple):
    """Seconds of a run: of the clock, and of the processor in the process that computed."""

    wall: float
    cpu: float


def measured(compute: Callable[[], Any]) -> tuple[Took, Any]:
    """Returns the time of a computation, and its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = compute()
    return Took(time.perf_counter() - wall, time.process_time() - cpu), result


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


def ours(engine: Engine, work: Work) -> Took:
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=output) for output in work.outputs]
    took, outputs = measured(lambda: engine.generate(work.prompts, params))
    assert [len(each.token_ids) for each in outputs] == work.outputs
    return took


@functools.cache
def load(path: Path, threads: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def theirs(path: Path, threads: int, work: Work) -> Took:
    """In a process of its own."""
    model = load(path, threads)
    width, output = max(map(len, work.prompts)), max(work.outputs)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in work.prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in work.prompts])
    lengths = {"min_new_tokens": output, "max_new_tokens": output}
    with torch.inference_mode():
        took, answer = measured(lambda: model.generate(ids, attention_mask=mask, do_sample=False, **lengths))
    assert answer.shape == (len(work.prompts), width + output)
    return took


Timed = Callable[[Work], Took]


def compare(name: str, ours: Timed, theirs: Timed, works: Iterator[Work], rounds: int) -> None:
    rates: list[tuple[float, float]] = []
    cpu_ratios: list[float] = []
    for round_ in range(rounds + 1):
        work = next(works)
        if round_ % 2:
            other = theirs(work)
            mine = ours(work)
        else:
            mine = ours(work)
            other = theirs(work)
        rates.append((work.tokens / mine.wall, work.tokens / other.wall))
        cpu_ratios.append(other.cpu / mine.cpu)
    counted = rates[1:]
    report(f"cpu.tokens_s.{name}", statistics.median(mine for mine, _ in counted))
    report(f"cpu.transformers_tokens_s.{name}", statistics.median(other for _, other in counted))
    report(f"cpu.vs_transformers.{name}", statistics.median(mine / other for mine, other in counted))
    report(f"cpu.vs_transformers_cpu_s.{name}", statistics.median(cpu_ratios[1:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch, for both (default: 1)")
    parser.add_argument("--quick", action="store_true", help="short, one round: proves that it works")
    args = parser.parse_args()
    rounds, output, streams = (1, 8, STREAMS[:2]) if args.quick else (args.rounds, OUTPUT, STREAMS)
    vocabulary = range(10, json.loads((args.model / "config.json").read_text())["vocab_size"] - 10)
    rng = random.Random(0)
    with (
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
        without_tokenizer(args.model) as folder,
        Engine(folder, device="cpu", dtype="float32", threads=args.threads) as engine,
    ):

        def in_process(work: Work) -> Took:
            return process.submit(theirs, args.model, args.threads, work).result()

        kinds = [
            ("b", Work.equal, streams),
            ("mixed.b", Work.mixed, streams[1:]),  # of one there is nothing to mix
            ("prefill.", Work.prefill, (LONG_PROMPT,)),
        ]
        for kind, make, counts in kinds:
            for count in counts:
                works = iter(functools.partial(make, rng, count, output, vocabulary), None)
                compare(f"t{args.threads}.{kind}{count}", functools.partial(ours, engine), in_process, works, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
