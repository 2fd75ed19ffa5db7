"""The interface of a grammar backend: compile, accept, fill, forced text, roll back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from treeline_runtime.messages import Grammar

if TYPE_CHECKING:
    import torch


FILL_THREADS = min(max((os.cpu_count() or 1) // 2, 2), 8)
"""Threads that fill masks. For schemas of plain strings two are enough (1 ms for 64 rows); where patterns count
characters, eight on sixteen cores take a third of the time of two."""


MAX_SHORTEST = 16_384
"""The longest shortest text of a grammar, and so the longest forced text, in characters. Finding it takes up to a
microsecond a character, and the square of that in repetitions: 20 to 100 ms for this many."""


MAX_COMPILED_BYTES, MAX_BYTES_A_TOKEN = 32 << 20, 2048
"""The largest compiled grammar: the larger of a constant and a size per token of the vocabulary, by which masks grow
(strict parameters of ten ordinary tools are 48 MiB with 128,000 tokens). Reading it takes about seven times its size in
the server: an EBNF of 21 kB with hundreds of rules in a choice is 57 MB and then 388."""


class GrammarError(ValueError):
    """A grammar is refused; the message tells its author why."""


class Matcher(Protocol):
    """One output's position in a grammar, initially its beginning."""

    def accept(self, token: int) -> bool:
        """Appends a token. False: not allowed, and nothing changed. A stop token is accepted where the output may end,
        and nothing after it."""

    def rollback(self, count: int) -> None:
        """Takes back the last `count` accepted tokens."""

    def forced(self) -> str:
        """The text that must come next, as far as it is certain; "" at a choice, at the end, or inside a character."""

    @property
    def completed(self) -> bool:
        """Whether the output may end here."""

    @property
    def gave_up(self) -> str:
        """Why nothing is allowed any more, if a step took too much work; else ""."""


class Compiled(Protocol):
    """A compiled grammar. Immutable and shared by its matchers."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory."""

    def matcher(self, stop_ids: Sequence[int]) -> Matcher:
        """stop_ids: tokens that end an output; never text."""


class GrammarBackend(Protocol):
    """A library with one vocabulary."""

    def compile(self, grammar: Grammar) -> bytes:
        """The input of `load`. May take seconds and gigabytes: for confined processes. Raises GrammarError."""

    def load(self, compiled: bytes) -> Compiled:
        """Reads the result of `compile`, in any thread."""

    def fill(self, matchers: Sequence[Matcher], masks: torch.Tensor, rows: Sequence[int]) -> None:
        """Overwrites row rows[i] of masks (rows, words; int32, CPU) with the tokens allowed for matchers[i]: bit j % 32
        of word j // 32 is token j. Finished matchers allow nothing."""


def certain_text(forced: bytes) -> str:
    """The text in bytes that must come next, whose last character may be incomplete."""
    try:
        return forced.decode()
    except UnicodeDecodeError as error:
        return forced[: error.start].decode()
