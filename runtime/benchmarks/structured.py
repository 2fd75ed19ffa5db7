"""What structured output costs, and what jump-forward saves, in one process without HTTP.

    python runtime/benchmarks/structured.py
    python runtime/benchmarks/structured.py --shape llama8b      # on a GPU: random weights

Prints rows of JSON:

- `structured.jump_forward_speedup.sS.bN`: N prompts at once answered by JSON of eight members, of whose text S % is
  forced (names and punctuation; the values are letters, so many that all answers are equally long): seconds without
  jump-forward by seconds with it. Two engines of the same settings in turn, greedy, other prompts in each round; the
  median of the rounds' own ratios; the first round is not counted. `structured.jump_forward_speedup` is the smallest of
  these medians. Without jump-forward a model may say the same text in more tokens than its tokenizer would make
  of it, which small models and random weights do: `structured.tokens.…` says how many answers had, with and without.
- `structured.forced_share.sS`: of the tokens with jump-forward, those that were not sampled.
- `structured.tpot_ratio.b64`: a decode step of 64 requests that all have a grammar (any printable text, so nothing is
  forced), by one of 64 free requests: answers of 16 and of 112 tokens, the difference by 96; median of the rounds.
- `structured.cached_schema_ttft_ms`: milliseconds to the first token with a schema that is compiled already, less that
  without one, medians of requests in turn.
- `structured.jump_us`: microseconds on the scheduler's thread to tokenize the end of a sequence and forced text anew
  that were never seen before; `structured.mask_us.b64`: to fill the masks of 64 requests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from engine import COMMON, SHAPES
from treeline_runtime import Engine, SamplingParams
from treeline_runtime.grammar.jump_forward import jump_forward
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.grammar.xgrammar_backend import XGrammarBackend
from treeline_runtime.messages import Grammar
from treeline_wire.tokenizer import TokenizerBundle

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny"
TOKENS = range(300, 4000)
"""Of prompts."""
BATCHES = (1, 8, 32)
MEMBERS = 8
PROMPT = 64
NAMES = {
    30: (("name", "city", "unit", "kind", "lane", "bank", "plan", "mode"), 26),
    50: (tuple(f"{one}_description" for one in ("user", "item", "site", "road", "tool", "task", "page", "team")), 23),
    70: (
        tuple(f"the_{one}_of_the_last_order" for one in ("name", "city", "unit", "kind", "day", "bill", "tax", "id")),
        14,
    ),
}
"""Percent of forced text → names of the members, letters of each value."""
PRINTABLE = Grammar("regex", "[ -~]+")


def report(metric: str, value: float) -> None:
    sys.stdout.write(json.dumps({"metric": metric, "value": value}) + "\n")
    sys.stdout.flush()


def schema(percent: int) -> Grammar:
    names, letters = NAMES[percent]
    member = {"type": "string", "pattern": f"^[a-z]{{{letters}}}$"}
    source = {"type": "object", "properties": dict.fromkeys(names, member), "required": list(names)}
    return Grammar("json", json.dumps(source | {"additionalProperties": False}))


@contextlib.contextmanager
def model(shape: str) -> Iterator[tuple[Path, str]]:
    """→ folder, load format. Other shapes than the tiny model have its tokenizer and random weights."""
    if shape == "tiny":
        yield TINY, "auto"
        return
    with tempfile.TemporaryDirectory() as name:
        ends = {"eos_token_id": json.loads((TINY / "config.json").read_text())["eos_token_id"]}
        (Path(name) / "config.json").write_text(json.dumps(SHAPES[shape] | COMMON | ends))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / file, name)
        yield Path(name), "dummy"


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    return [rng.choices(TOKENS, k=PROMPT) for _ in range(count)]


def seconds(engine: Engine, asked: list[list[int]], params: SamplingParams) -> tuple[float, int]:
    """→ seconds, tokens"""
    started = time.perf_counter()
    outputs = engine.generate(asked, params, progress=False)
    return time.perf_counter() - started, sum(len(output.token_ids) for output in outputs)


def measure_jumps(on: Engine, off: Engine, rng: random.Random, batches: tuple[int, ...], rounds: int) -> None:
    medians = []
    for percent in NAMES:
        params = SamplingParams(temperature=0.0, max_new_tokens=1000, grammar=schema(percent))
        stats = on.scheduler.stats
        forced_before, tokens_on, tokens_off, answers = stats.total_forced_tokens, 0, 0, 0
        for batch in batches:
            ratios = []
            for round_ in range(rounds + 1):
                asked = prompts(rng, batch)
                first, second = (on, off) if round_ % 2 else (off, on)
                times = {first: seconds(first, asked, params), second: seconds(second, asked, params)}
                tokens_on, tokens_off = tokens_on + times[on][1], tokens_off + times[off][1]
                answers += batch
                if round_:
                    ratios.append(times[off][0] / times[on][0])
            medians.append(statistics.median(ratios))
            report(f"structured.jump_forward_speedup.s{percent}.b{batch}", medians[-1])
        report(f"structured.forced_share.s{percent}", (stats.total_forced_tokens - forced_before) / tokens_on)
        report(f"structured.tokens.s{percent}.with", tokens_on / answers)
        report(f"structured.tokens.s{percent}.without", tokens_off / answers)
    report("structured.jump_forward_speedup", min(medians))


def measure_steps(engine: Engine, rng: random.Random, batch: int, rounds: int) -> None:
    """Milliseconds of a decode step, free and constrained."""
    kinds: dict[str, list[float]] = {"free": [], "constrained": []}
    for round_ in range(rounds + 1):
        for kind in sorted(kinds, reverse=bool(round_ % 2)):
            took = []
            for length in (16, 112):
                grammar = PRINTABLE if kind == "constrained" else None
                params = SamplingParams(
                    temperature=0.0, max_new_tokens=length, min_new_tokens=length, ignore_eos=True, grammar=grammar
                )
                took.append(seconds(engine, prompts(rng, batch), params)[0])
            if round_:
                kinds[kind].append(1000 * (took[1] - took[0]) / 96)
    for kind, each in kinds.items():
        report(f"structured.tpot_ms.{kind}.b{batch}", statistics.median(each))
    ratios = [a / b for a, b in zip(kinds["constrained"], kinds["free"], strict=True)]
    report(f"structured.tpot_ratio.b{batch}", statistics.median(ratios))


def measure_first_token(engine: Engine, rng: random.Random, count: int) -> None:
    waits: dict[bool, list[float]] = {False: [], True: []}
    for i in range(count + 2):
        for with_schema in (False, True) if i % 2 else (True, False):
            params = SamplingParams(
                temperature=0.0, max_new_tokens=1, ignore_eos=True, grammar=PRINTABLE if with_schema else None
            )
            took, _ = seconds(engine, prompts(rng, 1), params)
            if i >= 2:
                waits[with_schema].append(1000 * took)
    report("structured.cached_schema_ttft_ms", statistics.median(waits[True]) - statistics.median(waits[False]))


def measure_scheduler(folder: Path, rng: random.Random, count: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    bundle = TokenizerBundle.from_dir(folder)
    ends = config["eos_token_id"]
    vocabulary = Vocabulary.of(bundle, config["vocab_size"], [ends] if isinstance(ends, int) else ends)
    forward = jump_forward(bundle, vocabulary)
    sequences = [rng.choices(TOKENS, k=PROMPT) for _ in range(count)]
    started = time.perf_counter()
    for sequence in sequences:
        forward.jump(sequence, PROMPT, '", "the_age_in_years": ')
    report("structured.jump_us", 1e6 * (time.perf_counter() - started) / count)
    backend = XGrammarBackend(vocabulary)
    compiled = backend.load(backend.compile(schema(50)))
    matchers = [compiled.matcher(sorted(vocabulary.stop_ids)) for _ in range(64)]
    masks = torch.zeros(64, -(-config["vocab_size"] // 32), dtype=torch.int32)
    took = []
    for _ in range(50):
        started = time.perf_counter()
        backend.fill(matchers, masks, range(64))
        took.append(1e6 * (time.perf_counter() - started))
    report("structured.mask_us.b64", statistics.median(took))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["tiny", *(shape for shape in SHAPES if shape != "tiny")], default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch (default: torch's own)")
    parser.add_argument("--quick", action="store_true", help="short, one round: proves that it works")
    args = parser.parse_args()
    rounds, batches, many = (1, BATCHES[:1], 4) if args.quick else (args.rounds, BATCHES, 64)
    rng = random.Random(0)
    with model(args.shape) as (folder, load_format):
        settings = {"load_format": load_format, "threads": args.threads, "context_length": 2048, "mem_fraction": 0.4}
        with (
            Engine(folder, jump_forward="on", **settings) as on,
            Engine(folder, jump_forward="off", **(settings | {"mem_fraction": 0.8})) as off,
        ):
            measure_jumps(on, off, rng, batches, rounds)
            measure_steps(on, rng, many, rounds)
            measure_first_token(on, rng, 4 if args.quick else 60)
        measure_scheduler(folder, rng, 20 if args.quick else 500)
    return 0


if __name__ == "__main__":
    sys.exit(main())
