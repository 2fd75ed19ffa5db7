"""How every dataset is described, and where its words come from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from treeline_bench.prompts import PromptMaker
from treeline_bench.serving.messages import Conversation, Piece

T = TypeVar("T")
FIRST_ID, IDS = 10, 3990
"""Token ids without a tokenizer: real vocabularies have them all, and special tokens are rarely among them."""


class DatasetError(ValueError):
    """The prompts cannot be made as asked; the message says what to change."""


class Texts(Protocol):
    """Makes pieces of prompts of an exact length."""

    def make(self, tokens: int, rng: random.Random) -> Piece:
        """A random piece of so many tokens."""


class Words:
    """Text of words that are one token each, so that lengths add up."""

    def __init__(self, maker: PromptMaker) -> None:
        self._maker = maker

    def make(self, tokens: int, rng: random.Random) -> str:
        return self._maker.text(tokens, rng)


class Ids:
    """Token ids: no tokenizer is needed, here or in the server."""

    def make(self, tokens: int, rng: random.Random) -> list[int]:
        return [FIRST_ID + rng.randrange(IDS) for _ in range(tokens)]


@dataclass(frozen=True)
class Shape:
    """What datasets can be told. None: the dataset's own default. A dataset ignores what does not concern it, and
    `check_only` says what does."""

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
    """`make` gives conversations in the order in which they are sent: the same for the same random state."""

    name: str
    summary: str
    options: frozenset[str]
    """Fields of `Shape` that mean something to it."""
    make: Callable[[Shape, Texts, random.Random], list[Conversation]]

    def check_only(self, shape: Shape) -> None:
        """Raises DatasetError for an option that would change nothing."""
        for name, value in vars(shape).items():
            if value is not None and name not in self.options:
                flag = "--" + name.replace("_", "-")
                raise DatasetError(f"{flag} means nothing to the dataset {self.name}")


def length(most: int, ratio: float, rng: random.Random) -> int:
    """Uniform from ratio × `most` (at least 1) to `most`: the field's range ratio."""
    return rng.randint(max(int(most * ratio), 1), most)


def pick(given: T | None, default: T) -> T:
    """An option, or what the dataset takes where it was not given."""
    return default if given is None else given


def joined(pieces: Sequence[Piece]) -> Piece:
    """One piece of several of a kind."""
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(piece for piece in pieces if isinstance(piece, str))
    return [token for piece in pieces if not isinstance(piece, str) for token in piece]
