"""What a grammar backend does: five verbs on a vocabulary (compile, accept, fill, forced text, roll back)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from treeline_runtime.messages import Grammar

if TYPE_CHECKING:
    import torch


FILL_THREADS = min(max((os.cpu_count() or 1) // 2, 2), 8)
"""That fill masks. For schemas of plain strings two do (a millisecond's work for 64 rows, however many threads there
are); where patterns count characters, eight on sixteen cores take a third of the time that two take."""


MAX_SHORTEST = 16_384
"""Characters of the shortest text of a grammar, and so of what it can force at once. To find what is forced takes up to
a microsecond a character, and in repetitions the square of that: 20 ms to 100 ms for as many."""


MAX_COMPILED_BYTES, MAX_BYTES_A_TOKEN = 32 << 20, 2048
"""Of what one grammar is compiled to, the larger one; the second for each token of the vocabulary, by which masks
grow: strict parameters of ten ordinary tools are 48 MiB with 128,000 tokens. While the server reads it, it takes about
seven times as much of its memory: an EBNF of 21 kB, of some hundred rules as one choice, is 57 MB and then 388."""


class GrammarError(ValueError):
    """What is wrong with a grammar; the text is for its author."""


class Matcher(Protocol):
    """The place in a grammar that one output has come to. Starts at its beginning."""

    def accept(self, token: int) -> bool:
        """The output is longer by this token. False: it may not be, and nothing has changed. A stop token is accepted
        where the output may end; nothing is afterwards."""

    def rollback(self, count: int) -> None:
        """The last `count` accepted tokens were never there."""

    def forced(self) -> str:
        """The text that must come next, as far as it is certain; "" where there is a choice, or the end, or where the
        output stands within a character."""

    @property
    def completed(self) -> bool:
        """The output may end here."""

    @property
    def gave_up(self) -> str:
        """Why it allows nothing any more, where a step took too much work; "" where none did."""


class Compiled(Protocol):
    """A grammar that is ready. Immutable; its matchers share it."""

    @property
    def num_bytes(self) -> int:
        """What it takes of the memory, about."""

    def matcher(self, stop_ids: Sequence[int]) -> Matcher:
        """stop_ids: the tokens that end an output; they are never text."""


class GrammarBackend(Protocol):
    """One library, for one vocabulary."""

    def compile(self, grammar: Grammar) -> bytes:
        """What `load` takes. May take seconds and gigabytes: it is called in a confined process. Raises
        GrammarError."""

    def load(self, compiled: bytes) -> Compiled:
        """What `compile` has made. Called in any thread."""

    def fill(self, matchers: Sequence[Matcher], masks: torch.Tensor, rows: Sequence[int]) -> None:
        """masks (rows, words) int32 on the CPU: overwrite row rows[i] with the tokens that matchers[i] may go on with:
        bit j % 32 of word j // 32 is token j. Matchers that are at their end allow nothing."""


def certain_text(forced: bytes) -> str:
    """What is text of the bytes that must come next. A character may be certain but for its last bytes."""
    try:
        return forced.decode()
    except UnicodeDecodeError as error:
        return forced[: error.start].decode()
