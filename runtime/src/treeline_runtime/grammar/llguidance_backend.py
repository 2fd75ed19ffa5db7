"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): an Earley parser over lazy automata.

Masks are computed on demand and nearly nothing beforehand, so the compiled form is the grammar's text, after a trial.
Each step has a limit of its own.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treeline_runtime.grammar.backend import (
    FILL_THREADS,
    Compiled,
    GrammarError,
    Matcher,
    certain_text,
)
from treeline_runtime.grammar.json_schema import for_llguidance
from treeline_runtime.grammar.patterns import as_regex, whole
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.messages import Grammar

if TYPE_CHECKING:
    import torch

_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 8000,  # 40 ms where grammars are ambiguous, which grows faster than their number
    "max_items_in_row": 8192,  # each choice of a list is one
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
"""Work for a grammar or a step, in the library's steps: some 14,000 to 50,000 a millisecond."""
_SPACING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}
"""Without `\\u`, which could spell a property's name differently and so escape the property's schema."""
_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Masks have all possible tokens, also where the next text is certain."""
_TRIED_STEPS = 3
"""Threads besides the first."""
_COPIED_CHARS = 65_536
"""The longest grammar with a matcher per thread; reading it takes 10 ms."""
_STATE_BYTES = 100_000
"""A matcher's approximate size after some hundred tokens."""
_MOST_FORCING = 32_768
"""The longest grammar whose forced text is looked for, at up to a microsecond per forced character."""
_BYTES_PER_CHAR = 64
"""A matcher's size per character of its grammar: 10 to 60 measured."""


class LLGuidanceBackend:
    """Implements `GrammarBackend`, for schemas, patterns and choices."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library: Any = importlib.import_module("llguidance")
        self._size = len(vocabulary.texts)
        tokenizer = _Tokenizer(vocabulary.texts)
        # One token more than there are ends outputs in its masks: what ends one is each request's to say.
        self._tokenizer = self._library.LLTokenizer(tokenizer, n_vocab=self._size + 1, eos_token=self._size)
        self._limits = self._library.LLParserLimits(verbose_errors=False, **_LIMITS)
        self._executor = self._library.LLExecutor(FILL_THREADS)
        self._buffer = np.zeros((0, 0), dtype=np.uint32)

    def compile(self, grammar: Grammar) -> bytes:
        text = self._text(grammar)
        matcher = self._new(text)
        if not matcher.is_error():
            mask = matcher.compute_bitmask()  # too much for one step, as a thousand properties are, shows at the first
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        if len(text) <= _MOST_FORCING:
            forcing = matcher.deep_copy()
            forcing.compute_ff_bytes()
            forcing.compute_bitmask()
            if forcing.is_error():
                raise GrammarError("can never be satisfied: it would begin with a text that is too long, or endless")
        self._try_on(matcher, mask)
        return text.encode()

    def _try_on(self, matcher: Any, mask: bytes) -> None:
        """Tries the next steps, since one that takes too much work would end every output. Raises GrammarError."""
        for _ in range(_TRIED_STEPS):
            allowed = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=self._size, bitorder="little")
            if not allowed.any() or not matcher.try_consume_tokens([int(allowed.argmax())]):
                return
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                raise GrammarError(_reason(matcher.get_error()))

    def load(self, compiled: bytes) -> Compiled:
        text = compiled.decode()
        copies = FILL_THREADS if len(text) <= _COPIED_CHARS else 1
        return _Compiled([self._new(text) for _ in range(copies)], len(compiled))

    def fill(self, matchers: Sequence[Matcher], masks: torch.Tensor, rows: Sequence[int]) -> None:
        filled = self._masks(len(matchers))
        ours = [_llguidance(matcher) for matcher in matchers]
        jobs = [(matcher.handle, i) for i, matcher in enumerate(ours) if matcher.can_go_on]
        if jobs:
            self._executor.unsafe_compute_mask_ptr(jobs, filled.ctypes.data, filled.strides[0], len(matchers))
        filled[:, self._size // 32] &= ~np.uint32(1 << self._size % 32)  # its own end
        for matcher, mask in zip(ours, filled, strict=True):
            matcher.finish(mask)
        width = min(filled.shape[1], masks.shape[1])
        masks.numpy().view(np.uint32)[list(rows), :width] = filled[:, :width]

    def _masks(self, count: int) -> npt.NDArray[np.uint32]:
        """(count, words of llguidance's vocabulary, which has one token more)"""
        if len(self._buffer) < count:
            self._buffer = np.zeros((count, (self._size + 32) // 32), dtype=np.uint32)
        return self._buffer[:count]

    def _new(self, text: str) -> Any:
        return self._library.LLMatcher(self._tokenizer, text, limits=self._limits, log_level=0)

    def _text(self, grammar: Grammar) -> str:
        match grammar.kind:
            case "json":
                return f"{_OPTIONS}start: %json {_spaced(for_llguidance(grammar.source))}\n"
            case "regex":
                return f"{_OPTIONS}start: /{as_regex(whole(grammar.source))}/\n"
            case "choice":
                # one terminal: as rules they are an item each, of which a step has 2000 at most
                return f"{_OPTIONS}start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, json.loads(grammar.source)))}\n"
            case _:
                raise AssertionError(grammar.kind)


def _spaced(schema: str) -> str:
    """A schema with xgrammar's white space."""
    read = json.loads(schema)
    return json.dumps({**({"allOf": [read]} if isinstance(read, bool) else read), "x-guidance": _SPACING})


class _Tokenizer:
    """The tokenizer interface of the library. It never tokenizes texts."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, texts: list[bytes]) -> None:
        self.tokens = [*texts, b""]
        self.eos_token_id = len(texts)

    def __call__(self, text: str | bytes) -> list[int]:
        raise NotImplementedError


class _Compiled:
    def __init__(self, fresh: list[Any], length: int) -> None:
        """fresh: unused matchers. A copy shares its automaton, which one thread at a time uses; several of them fill
        masks of one grammar in parallel."""
        self._fresh = cycle(fresh)
        self._num_bytes = (length * _BYTES_PER_CHAR + _STATE_BYTES) * len(fresh)
        self._forces = length <= _MOST_FORCING

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def matcher(self, stop_ids: Sequence[int]) -> Matcher:
        return LLGuidanceMatcher(next(self._fresh).deep_copy(), tuple(stop_ids), forces=self._forces)


class LLGuidanceMatcher:
    """Implements `Matcher`. After a step that took too much it allows nothing."""

    def __init__(self, handle: Any, stop_ids: tuple[int, ...], *, forces: bool) -> None:
        """forces: whether forced text is looked for."""
        self.handle = handle
        self._forces = forces
        self._stop_ids = stop_ids
        self._ended = False

    @property
    def can_go_on(self) -> bool:
        return not self._ended and not self.handle.is_error()

    def finish(self, mask: npt.NDArray[np.uint32]) -> None:
        """Finishes a mask (words): the tokens that end the output are allowed where it may end, and nothing where
        nothing can follow."""
        if not self.can_go_on:
            mask[:] = 0
        elif self.completed:
            for id in self._stop_ids:
                mask[id // 32] |= np.uint32(1 << id % 32)

    def accept(self, token: int) -> bool:
        if not self.can_go_on:
            return False
        if token in self._stop_ids:
            self._ended = self.completed
            return self._ended
        return bool(self.handle.try_consume_tokens([token]))

    def rollback(self, count: int) -> None:
        if count and self._ended:
            self._ended = False
            count -= 1
        if count:
            self.handle.rollback(count)

    def forced(self) -> str:
        if not self._forces or not self.can_go_on:
            return ""
        return certain_text(self.handle.compute_ff_bytes())

    @property
    def completed(self) -> bool:
        return not self.handle.is_error() and bool(self.handle.is_accepting())

    @property
    def gave_up(self) -> str:
        return _reason(self.handle.get_error()) if self.handle.is_error() else ""


def _llguidance(matcher: Matcher) -> LLGuidanceMatcher:
    assert isinstance(matcher, LLGuidanceMatcher)
    return matcher


def _reason(error: str) -> str:
    """The library's message without its place in our text."""
    first = error.strip().partition("\n")[0].rpartition("failed to compile JSON schema: ")[2]
    return first[:500] or "the grammar was refused"
