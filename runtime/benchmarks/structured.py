"""Measures the cost of structured output, and the savings of jump-forward, in one process without HTTP.

    python runtime/benchmarks/structured.py
    python runtime/benchmarks/structured.py --shape llama8b      # on a GPU: random weights

Prints rows of JSON:

- `structured.jump_forward_speedup.sS.bN`: N prompts at once answered by JSON of eight members, of whose text S % is
  forced (names and punctuation; the values are letters, and all answers are equally long): seconds without jump-forward
  ÷ seconds with it. Two engines with the same settings take turns, greedy, with new prompts in each round. The figure
  is the median of the rounds' ratios, without the first round. `structured.jump_forward_speedup` is the smallest of
  these medians. Without jump-forward a model may write the same text in more tokens than its tokenizer would; small
  models and random weights do. `structured.tokens.…` are the tokens of answers, with and without.
- `structured.jump_forward_steps.sS.bN`: sampling steps without jump-forward ÷ steps with it: the limit of the speedup,
  if every step costs the same. Of N answers the one with most steps counts.
- `structured.forced_share.sS`: the share of tokens that were not sampled, with jump-forward.
- `structured.tpot_ratio.b64`: a decode step of 64 requests, each with its own schema (a list of people with five
  members each; without jump-forward), ÷ a step of 64 free requests. A step is the difference of answers of 16 and of
  144 tokens ÷ 128; the figure is the median of the rounds. `structured.mask_ms.b64.p50` and `.p999`: the time in these
  steps in which the scheduler's thread fills the masks and starts their copy.
- `structured.cached_schema_ttft_ms`: milliseconds to the first token with a compiled schema, minus the same without a
  schema; medians of alternating requests.
- `structured.jump_us`: microseconds on the scheduler's thread to tokenize the end of a sequence with forced text that
  is not in a cache.

Shapes other than the tiny model's get a byte-level tokenizer, trained on Python's own library to at most their
vocabulary (20 s; `--tokenizer` takes an existing one).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from engine import COMMON, SHAPES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from treeline_runtime import Engine, SamplingParams
from treeline_runtime.grammar.jump_forward import jump_forward
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.messages import Grammar
from treeline_runtime.sampling import Constraint, Masks
from treeline_wire.tokenizer import TokenizerBundle

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny"
TOKENS = range(300, 4000)
"""Token ids of prompts."""
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


def report(metric: str, value: float) -> None:
    sys.stdout.write(json.dumps({"metric": metric, "value": value}) + "\n")
    sys.stdout.flush()


def schema(percent: int) -> Grammar:
    names, letters = NAMES[percent]
    member = {"type": "string", "pattern": f"^[a-z]{{{letters}}}$"}
    source = {"type": "object", "properties": dict.fromkeys(names, member), "required": list(names)}
    return Grammar("json", json.dumps(source | {"additionalProperties": False}))


def people(number: int) -> Grammar:
    """More of them than an answer here has room for; `number` makes the schema another one."""
    members = {
        f"name{number}": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", f"blue{number}"]}},
        "score": {"type": "number"},
        "active": {"type": "boolean"},
    }
    person = {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
    listed = {"type": "array", "items": person, "minItems": 200}
    return Grammar("json", json.dumps({"type": "object", "properties": {"people": listed}, "required": ["people"]}))


@contextlib.contextmanager
def model(shape: str, tokenizer: Path | None) -> Iterator[tuple[Path, str]]:
    """→ folder, load format. Other shapes than the tiny model have random weights."""
    if shape == "tiny":
        yield TINY, "auto"
        return
    with tempfile.TemporaryDirectory() as name:
        config = SHAPES[shape] | COMMON
        (Path(name) / "config.json").write_text(json.dumps(config))
        if tokenizer is None:
            text_tokenizer(config["vocab_size"]).save(str(Path(name) / "tokenizer.json"))
        else:
            shutil.copy(tokenizer, Path(name) / "tokenizer.json")
        yield Path(name), "dummy"


def text_tokenizer(size: int) -> Tokenizer:
    """Trains a tokenizer of at most `size` tokens on the sources of Python's library; its second token ends outputs."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = (path.read_text(errors="replace") for path in sources if "site-packages" not in path.parts)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    return [rng.choices(TOKENS, k=PROMPT) for _ in range(count)]


def seconds(engine: Engine, asked: list[list[int]], params: SamplingParams | list[SamplingParams]) -> tuple[float, int]:
    """→ seconds, tokens"""
    started = time.perf_counter()
    outputs = engine.generate(asked, params)
    return time.perf_counter() - started, sum(len(output.token_ids) for output in outputs)


def measure_jumps(on: Engine, off: Engine, rng: random.Random, batches: tuple[int, ...], rounds: int) -> None:
    medians = []
    for percent in NAMES:
        params = SamplingParams(temperature=0.0, max_new_tokens=1000, grammar=schema(percent))
        stats = on.scheduler.stats
        forced_before, tokens_on, tokens_off, answers = stats.total_forced_tokens, 0, 0, 0
        for batch in batches:
            ratios, steps = [], {on: 0, off: 0}
            for round_ in range(rounds + 1):
                asked = prompts(rng, batch)
                times = dict[Engine, tuple[float, int]]()
                for engine in (on, off) if round_ % 2 else (off, on):
                    filled: list[float] = []
                    with timed_masks(filled):
                        times[engine] = seconds(engine, asked, params)
                    steps[engine] += len(filled)
                tokens_on, tokens_off = tokens_on + times[on][1], tokens_off + times[off][1]
                answers += batch
                if round_:
                    ratios.append(times[off][0] / times[on][0])
            medians.append(statistics.median(ratios))
            report(f"structured.jump_forward_speedup.s{percent}.b{batch}", medians[-1])
            report(f"structured.jump_forward_steps.s{percent}.b{batch}", steps[off] / steps[on])
        report(f"structured.forced_share.s{percent}", (stats.total_forced_tokens - forced_before) / tokens_on)
        report(f"structured.tokens.s{percent}.with", tokens_on / answers)
        report(f"structured.tokens.s{percent}.without", tokens_off / answers)
    report("structured.jump_forward_speedup", min(medians))


def measure_steps(engine: Engine, rng: random.Random, batch: int, rounds: int) -> None:
    """Milliseconds of a decode step, free and constrained. Nothing may jump."""
    kinds: dict[str, list[float]] = {"free": [], "constrained": []}
    filled: list[float] = []
    with timed_masks(filled):
        for round_ in range(rounds + 1):
            for kind in sorted(kinds, reverse=bool(round_ % 2)):
                took = []
                for length in (16, 144):
                    params = [
                        SamplingParams(
                            temperature=0.0,
                            max_new_tokens=length,
                            ignore_eos=True,
                            grammar=people(i) if kind == "constrained" else None,
                        )
                        for i in range(batch)
                    ]
                    took.append(seconds(engine, prompts(rng, batch), params)[0])
                if round_:
                    kinds[kind].append(1000 * (took[1] - took[0]) / 128)
                else:
                    filled.clear()
    for kind, each in kinds.items():
        report(f"structured.tpot_ms.{kind}.b{batch}", statistics.median(each))
    ratios = [a / b for a, b in zip(kinds["constrained"], kinds["free"], strict=True)]
    report(f"structured.tpot_ratio.b{batch}", statistics.median(ratios))
    filled.sort()
    for name, share in (("p50", 0.5), ("p999", 0.999)):
        report(f"structured.mask_ms.b{batch}.{name}", 1000 * filled[int(share * (len(filled) - 1))])


@contextlib.contextmanager
def timed_masks(into: list[float]) -> Iterator[None]:
    """Seconds of each call of `Masks.fill`."""
    fill = Masks.fill

    def timed(
        self: Masks, constraints: Sequence[Constraint], drafts: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, dict[int, str]]:
        started = time.perf_counter()
        found = fill(self, constraints, drafts)
        into.append(time.perf_counter() - started)
        return found

    with mock.patch.object(Masks, "fill", timed):
        yield


def measure_first_token(engine: Engine, rng: random.Random, count: int) -> None:
    waits: dict[bool, list[float]] = {False: [], True: []}
    for i in range(count + 2):
        for with_schema in (False, True) if i % 2 else (True, False):
            params = SamplingParams(
                temperature=0.0, max_new_tokens=1, ignore_eos=True, grammar=people(0) if with_schema else None
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["tiny", *(shape for shape in SHAPES if shape != "tiny")], default="tiny")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json of another shape than tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch (default: torch's own)")
    parser.add_argument("--quick", action="store_true", help="short, one round: proves that it works")
    args = parser.parse_args()
    rounds, batches, many = (1, BATCHES[:1], 4) if args.quick else (args.rounds, BATCHES, 64)
    rng = random.Random(0)
    with model(args.shape, args.tokenizer) as (folder, load_format):
        settings = {"load_format": load_format, "threads": args.threads, "context_length": 2048, "mem_fraction": 0.4}
        with (
            Engine(folder, **settings) as on,
            Engine(folder, jump_forward=False, **(settings | {"mem_fraction": 0.8})) as off,
        ):
            measure_jumps(on, off, rng, batches, rounds)
            measure_steps(off, rng, many, rounds)
            measure_first_token(off, rng, 4 if args.quick else 60)
        measure_scheduler(folder, rng, 20 if args.quick else 500)
    return 0


if __name__ == "__main__":
    sys.exit(main())
