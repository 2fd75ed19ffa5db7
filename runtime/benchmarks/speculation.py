"""Measures what guessing tokens ahead saves, in one process without HTTP.

    python runtime/benchmarks/speculation.py
    python runtime/benchmarks/speculation.py --shape llama8b      # on a GPU: random weights

Prints rows of JSON. Two engines with the same settings, with and without guesses, take turns with the same random
prompts; N of them at once, 256 tokens each, greedy. A figure is the median of the rounds' ratios, without the first
round.

- `spec.ngram.speedup.bN`: seconds without guesses ÷ seconds with `--speculative-algorithm NGRAM`. The answers repeat
  themselves, as greedy answers of small models do, and must be the same with guesses and without. Random weights are
  changed for it, so that answers repeat themselves after 64 tokens.
- `spec.ngram.accept_length.bN`: tokens that a step with guesses gave a request then.
- `spec.past.speedup.bN`: the same for answers drawn at temperature 1, which do not repeat themselves, where the engine
  with guesses has given the same ones before.
- `spec.eagle3.speedup.bN`, `spec.eagle3.accept_length.bN`: the same for the tiny model's EAGLE-3 head, and for answers
  that it was trained on: counting, from numbers drawn at random.
- `spec.grammar.speedup.bN`: the first for JSON of which 30 % is forced (`structured.py`), without guesses and
  jump-forward ÷ with both. These answers differ: jumps split forced text as the tokenizer does.
- `spec.simulated80.speedup.bN`: as the first with 3 guesses of which 80 % are taken for right, whatever they are
  (`--speculative-simulate-acceptance 0.8`): the speed of a drafter that costs nothing. These answers are nonsense.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from engine import SHAPES
from structured import TOKENS, model, report, schema
from treeline_runtime import Engine, SamplingParams

BATCHES, GRAMMARS, SIMULATED = (1, 8), (1, 8, 32), (1, 16, 64)
PROMPT, ANSWER = 64, 256
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=ANSWER, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=1, max_new_tokens=ANSWER, ignore_eos=True)
JSON = SamplingParams(temperature=0.0, max_new_tokens=400, grammar=schema(30))


HEAD = Path(__file__).resolve().parents[2] / "models" / "tiny-eagle3"
COUNTED = SamplingParams(temperature=0.0, max_new_tokens=ANSWER)
Prompt = list[int] | str


def drawn(rng: random.Random) -> Prompt:
    return rng.choices(TOKENS, k=PROMPT)


def question(rng: random.Random) -> Prompt:
    first = rng.randint(1, 99)
    return f"<|im_start|>user\nCount from {first} to {first + 19}.<|im_end|>\n<|im_start|>assistant\n"


RING = 64


@contextlib.contextmanager
@torch.inference_mode()
def repeating(*engines: Engine) -> Iterator[None]:
    """Makes the next token of random weights follow from the last one alone, in rings of so many: the embedding
    outweighs what all layers add, and the head has the embedding of the token before."""
    saved = []
    for engine in engines:
        model = engine.scheduler.executor._model
        embedding, head = model.embedding, model._head.weight  # type: ignore[union-attr]
        saved += [(embedding, embedding.clone()), (head, head.clone())]
        tokens = torch.arange(len(embedding) // RING * RING, device=embedding.device)
        head[tokens // RING * RING + (tokens + 1) % RING] = embedding[tokens]
        embedding *= 1000
    yield
    for matrix, before in saved:
        matrix.copy_(before)


def answers(engine: Engine, prompts: list[Prompt], params: SamplingParams) -> tuple[float, list[list[int]]]:
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
    prompt: Callable[[random.Random], Prompt] = drawn,
    same: bool = False,
    before: bool = False,
) -> None:
    """same: whether the answers must be. before: whether the first engine has given them before."""
    rng, ratios = random.Random(batch), []
    for round_ in range(rounds + 1):
        prompts = [prompt(rng) for _ in range(batch)]
        if before:
            answers(on, prompts, params)
        found = {engine: answers(engine, prompts, params) for engine in ((on, off) if round_ % 2 else (off, on))}
        if same and found[on][1] != found[off][1]:
            raise SystemExit(f"{name}: guesses changed an answer")
        if round_:
            ratios.append(found[off][0] / found[on][0])
    report(f"spec.{name}.speedup.b{batch}", statistics.median(ratios))


def with_length(name: str, on: Engine, measured: Callable[[], None], batch: int) -> None:
    """Reports the tokens of a step with guesses, too."""
    stats = on.scheduler.stats
    drafts, right = stats.total_drafts, sum(stats.accepted_per_position)
    measured()
    length = (sum(stats.accepted_per_position) - right) / (stats.total_drafts - drafts)
    report(f"spec.{name}.accept_length.b{batch}", 1 + length)


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
                batches, is_tiny = BATCHES[:1] if args.quick else BATCHES, args.shape == "tiny"
                with contextlib.nullcontext() if is_tiny else repeating(on, off):
                    for batch in batches:
                        one = functools.partial(measure, "ngram", on, off, batch, rounds, same=True)
                        with_length("ngram", on, one, batch)
                for batch in batches:
                    measure("past", on, off, batch, rounds, DRAWN, same=is_tiny, before=True)
                for batch in GRAMMARS[:1] if args.quick else GRAMMARS:
                    measure("grammar", on, off, batch, rounds, JSON)
            if args.shape == "tiny":
                head = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(HEAD)}
                with Engine(folder, mem_fraction=0.8, **head, **settings) as on:
                    for batch in BATCHES[:1] if args.quick else BATCHES:
                        asked = functools.partial(measure, "eagle3", on, off, batch, rounds, COUNTED, prompt=question)
                        with_length("eagle3", on, functools.partial(asked, same=True), batch)
            simulated = {"speculative_simulate_acceptance": 0.8, "speculative_num_draft_tokens": 3}
            with Engine(folder, mem_fraction=0.8, **simulated, **settings) as on:
                for batch in SIMULATED[:1] if args.quick else SIMULATED:
                    measure("simulated80", on, off, batch, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
