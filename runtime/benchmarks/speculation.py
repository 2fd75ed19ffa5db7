"""Measures what guessing tokens ahead saves, in one process without HTTP.

    python runtime/benchmarks/speculation.py
    python runtime/benchmarks/speculation.py --shape llama8b      # on a GPU: random weights

Prints rows of JSON. Two engines with the same settings, with and without guesses, take turns with the same random
prompts; N of them at once, 256 tokens each, greedy. A figure is the median of the rounds' ratios, without the first
round.

- `spec.ngram.speedup.bN`: seconds without guesses ÷ seconds with `--speculative-algorithm NGRAM`. The answers repeat
  themselves, as greedy answers of small models and random weights do; they must be the same with guesses and without.
- `spec.ngram.accept_length.bN`: tokens that a step with guesses gave a request then.
- `spec.past.speedup.bN`: the same for answers drawn at temperature 1, which do not repeat themselves, where the engine
  with guesses has given the same ones before.
- `spec.grammar.speedup.bN`: the same for JSON of which 30 % is forced (`structured.py`), without guesses and
  jump-forward ÷ with both. These answers differ: jumps split forced text as the tokenizer does.
- `spec.simulated80.speedup.bN`: as the first with 3 guesses of which 80 % are taken for right, whatever they are
  (`--speculative-simulate-acceptance 0.8`): the speed of a drafter that costs nothing. These answers are nonsense.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import Any

from engine import SHAPES
from structured import TOKENS, model, report, schema
from treeline_runtime import Engine, SamplingParams

BATCHES, GRAMMARS, SIMULATED = (1, 8), (1, 8, 32), (1, 16, 64)
PROMPT, ANSWER = 64, 256
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=ANSWER, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=1, max_new_tokens=ANSWER, ignore_eos=True)
JSON = SamplingParams(temperature=0.0, max_new_tokens=400, grammar=schema(30))


def answers(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """→ seconds, tokens"""
    started = time.perf_counter()
    outputs = engine.generate(prompts, params)
    return time.perf_counter() - started, [output.token_ids for output in outputs]


def measure(
    name: str,
    on: Engine,
    off: Engine,
    batch: int,
    rounds: int,
    params: SamplingParams = GREEDY,
    *,
    same: bool = False,
    before: bool = False,
) -> None:
    """same: whether the answers must be. before: whether the first engine has given them before."""
    rng, ratios = random.Random(batch), []
    for round_ in range(rounds + 1):
        prompts = [rng.choices(TOKENS, k=PROMPT) for _ in range(batch)]
        if before:
            answers(on, prompts, params)
        found = {engine: answers(engine, prompts, params) for engine in ((on, off) if round_ % 2 else (off, on))}
        if same and found[on][1] != found[off][1]:
            raise SystemExit(f"{name}: guesses changed an answer")
        if round_:
            ratios.append(found[off][0] / found[on][0])
    report(f"spec.{name}.speedup.b{batch}", statistics.median(ratios))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["tiny", *(shape for shape in SHAPES if shape != "tiny")], default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch (default: torch's own)")
    parser.add_argument("--quick", action="store_true", help="short, one round: proves that it works")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    with model(args.shape, None) as (folder, load_format):
        settings: dict[str, Any] = {"load_format": load_format, "threads": args.threads, "context_length": 512}
        # the memory of a GPU is shared: each of the two takes half of what the one before left
        with Engine(folder, jump_forward=False, mem_fraction=0.4, **settings) as off:
            with Engine(folder, speculative_algorithm="NGRAM", mem_fraction=0.8, **settings) as on:
                for batch in BATCHES[:1] if args.quick else BATCHES:
                    stats = on.scheduler.stats
                    drafts, right = stats.total_drafts, sum(stats.accepted_per_position)
                    measure("ngram", on, off, batch, rounds, same=args.shape == "tiny")
                    length = (sum(stats.accepted_per_position) - right) / (stats.total_drafts - drafts)
                    report(f"spec.ngram.accept_length.b{batch}", 1 + length)
                    measure("past", on, off, batch, rounds, DRAWN, same=args.shape == "tiny", before=True)
                for batch in GRAMMARS[:1] if args.quick else GRAMMARS:
                    measure("grammar", on, off, batch, rounds, JSON)
            simulated = {"speculative_simulate_acceptance": 0.8, "speculative_num_draft_tokens": 3}
            with Engine(folder, mem_fraction=0.8, **simulated, **settings) as on:
                for batch in SIMULATED[:1] if args.quick else SIMULATED:
                    measure("simulated80", on, off, batch, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
