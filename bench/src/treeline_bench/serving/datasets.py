"""Datasets: the shape of prompts, and the source of their words."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from treeline_bench.prompts import PromptMaker
from treeline_bench.serving.messages import Conversation, Piece, Turn

T = TypeVar("T")
FIRST_ID, IDS = 10, 3990
"""Token ids without a tokenizer: real vocabularies have them all, and they are rarely special tokens."""

MEAN_IN, MEAN_OUT = 161.31, 337.99
SIGMA_IN, SIGMA_OUT = 1.2, 0.9
FEWEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048


class DatasetError(ValueError):
    """The prompts cannot be made; the message says what to change."""


class Texts(Protocol):
    """Makes pieces of prompts of exact length."""

    def make(self, tokens: int, rng: random.Random) -> Piece:
        """A random piece of so many tokens."""


class Words:
    """Words of one token each, so that lengths add up."""

    def __init__(self, maker: PromptMaker) -> None:
        self._maker = maker

    def make(self, tokens: int, rng: random.Random) -> str:
        return self._maker.text(tokens, rng)


class Ids:
    """Token ids, without a tokenizer here or in the server."""

    def make(self, tokens: int, rng: random.Random) -> list[int]:
        return [FIRST_ID + rng.randrange(IDS) for _ in range(tokens)]


@dataclass(frozen=True)
class Shape:
    """Options of datasets. None: the dataset's default. A dataset ignores options that it does not use; `check_only`
    refuses them."""

    num_prompts: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float | None = None
    groups: int | None = None
    prompts_per_group: int | None = None
    prefix_len: int | None = None
    turns: int | None = None


@dataclass(frozen=True)
class Dataset:
    """`make` yields conversations in order: the same for the same random state."""

    name: str
    summary: str
    options: frozenset[str]
    """The fields of `Shape` that it uses."""
    make: Callable[[Shape, Texts, random.Random], list[Conversation]]

    def check_only(self, shape: Shape) -> None:
        """Raises DatasetError for an option without effect."""
        for name, value in vars(shape).items():
            if value is not None and name not in self.options:
                flag = "--" + name.replace("_", "-")
                raise DatasetError(f"{flag} means nothing to the dataset {self.name}")


def length(most: int, ratio: float, rng: random.Random) -> int:
    """Uniform from ratio × `most` (at least 1) to `most` (the range ratio)."""
    return rng.randint(max(int(most * ratio), 1), most)


def pick(given: T | None, default: T) -> T:
    """An option, or the dataset's default."""
    return default if given is None else given


def joined(pieces: Sequence[Piece]) -> Piece:
    """Joins pieces of one kind."""
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(piece for piece in pieces if isinstance(piece, str))
    return [token for piece in pieces if not isinstance(piece, str) for token in piece]


def _random(shape: Shape, texts: Texts, rng: random.Random) -> list[Conversation]:
    """SGLang's defaults: 1,000 prompts, 1,024 in and out, range ratio 0, so from 1 token on."""
    ratio = pick(shape.range_ratio, 0.0)
    found = []
    for _ in range(pick(shape.num_prompts, 1000)):
        tokens = length(pick(shape.input_len, 1024), ratio, rng)
        output = length(pick(shape.output_len, 1024), ratio, rng)
        found.append(Conversation([Turn(texts.make(tokens, rng), tokens, output)]))
    return found


def _sharegpt(shape: Shape, texts: Texts, rng: random.Random) -> list[Conversation]:
    """Lengths like ShareGPT's, from two log-normal distributions with the means in the paper of PagedAttention (Kwon et
    al., 2023, figure 11) and long tails. The usual filters apply: no fewer than 4 tokens, no prompts over 1,024, nor
    over 2,048 together."""
    count = pick(shape.num_prompts, 1000)
    found: list[Conversation] = []
    while len(found) < count:
        tokens, output = _drawn(MEAN_IN, SIGMA_IN, rng), _drawn(MEAN_OUT, SIGMA_OUT, rng)
        if _kept(tokens, output):
            found.append(Conversation([Turn(texts.make(tokens, rng), tokens, output)]))
    return found


def _drawn(mean: float, sigma: float, rng: random.Random) -> int:
    return round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))


def _kept(tokens: int, output: int) -> bool:
    return min(tokens, output) >= FEWEST and tokens <= LONGEST_PROMPT and tokens + output <= LONGEST


def _shared_prefix(shape: Shape, texts: Texts, rng: random.Random) -> list[Conversation]:
    """SGLang's defaults: 64 groups × 16 prompts, 2,048 shared and 128 own tokens, 256 out, all lengths as they are."""
    groups, ratio = pick(shape.groups, 64), pick(shape.range_ratio, 1.0)
    count = groups * pick(shape.prompts_per_group, 16)
    prefixes = []
    for _ in range(groups):
        tokens = length(pick(shape.prefix_len, 2048), ratio, rng)
        prefixes.append((texts.make(tokens, rng), tokens))
    found = []
    for index in range(count):
        prefix, prefix_tokens = prefixes[index * groups // count]
        tokens = length(pick(shape.input_len, 128), ratio, rng)
        output = length(pick(shape.output_len, 256), ratio, rng)
        piece = joined([prefix, texts.make(tokens, rng)])
        found.append(Conversation([Turn(piece, prefix_tokens + tokens, output)]))
    rng.shuffle(found)
    return found


def _multi_turn(shape: Shape, texts: Texts, rng: random.Random) -> list[Conversation]:
    """SGLang's multi-turn cache benchmark: 256 conversations of 5 turns, 512 tokens in and 64 out a turn."""
    ratio = pick(shape.range_ratio, 1.0)
    found = []
    for _ in range(pick(shape.num_prompts, 256)):
        turns = []
        for _ in range(pick(shape.turns, 5)):
            tokens = length(pick(shape.input_len, 512), ratio, rng)
            output = length(pick(shape.output_len, 64), ratio, rng)
            turns.append(Turn(texts.make(tokens, rng), tokens, output))
        found.append(Conversation(turns))
    return found


DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            "random",
            "prompts that share nothing; lengths from range ratio × length to length (1024 in, 1024 out, ratio 0)",
            frozenset({"num_prompts", "input_len", "output_len", "range_ratio"}),
            _random,
        ),
        Dataset(
            "sharegpt",
            "short questions with long tails (means 161 in, 338 out)",
            frozenset({"num_prompts"}),
            _sharegpt,
        ),
        Dataset(
            "generated-shared-prefix",
            "groups that share a system prompt (64 groups × 16 prompts, 2048 shared + 128 own tokens, 256 out)",
            frozenset({"groups", "prompts_per_group", "prefix_len", "input_len", "output_len", "range_ratio"}),
            _shared_prefix,
        ),
        Dataset(
            "multi-turn",
            "conversations whose turns contain the answers so far (256 of 5 turns, 512 in and 64 out a turn)",
            frozenset({"num_prompts", "turns", "input_len", "output_len", "range_ratio"}),
            _multi_turn,
        ),
    )
}
