"""EBNF and structural tags by xgrammar (https://github.com/mlc-ai/xgrammar), with precomputed masks."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treeline_runtime.grammar.backend import (
    FILL_THREADS,
    MAX_BYTES_A_TOKEN,
    MAX_COMPILED_BYTES,
    Compiled,
    GrammarError,
    Matcher,
    certain_text,
)
from treeline_runtime.grammar.satisfiable import Kind, check_satisfiable
from treeline_runtime.grammar.structural_tags import for_xgrammar_tags
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.grammar.xgrammar_library import load as load_library
from treeline_runtime.messages import Grammar

if TYPE_CHECKING:
    import torch

MAX_THREADS = 8
_STEP_SECONDS = 0.1
"""The longest step of a matcher. In an endlessly ambiguous grammar (repetitions of repetitions of what may be empty)
each step takes several times as long as the one before, and blocks all requests."""
_ROW_SECONDS = 0.01
"""The longest step per row of a batch: many reasonable steps together may take long."""
_TRIED_STEPS = 4
"""Steps tried at compilation; an output that becomes slow later is ended."""


class XGrammarBackend:
    """Implements `GrammarBackend`, for EBNF and structural tags."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library: Any = load_library()
        self._threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._size = len(vocabulary.texts)
        text = self._tokenizer_info(vocabulary, vocabulary.texts)
        marked = self._tokenizer_info(vocabulary, vocabulary.with_marks()) if vocabulary.marks else text
        self._infos = {False: text, True: marked}
        """By whether special tokens are part of the vocabulary."""

    def compile(self, grammar: Grammar) -> bytes:
        compiler = self._library.GrammarCompiler(
            self._infos[grammar.kind == "structural_tag"], max_threads=self._threads, cache_enabled=False
        )
        try:
            rules = mended(self._rules(grammar).serialize_json())
            check_satisfiable(rules)
            compiled = compiler.compile_grammar(self._library.Grammar.deserialize_json(rules))
            self._try_out(XGrammarMatcher(self._library.GrammarMatcher(compiled)))
        except GrammarError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            if "bad_alloc" in str(error):
                raise MemoryError from None
            raise GrammarError(_reason(error)) from None
        written = _MARKED[grammar.kind == "structural_tag"] + compiled.serialize_json().encode()
        most = max(MAX_COMPILED_BYTES, MAX_BYTES_A_TOKEN * self._size)
        if len(written) > most:
            raise GrammarError(
                f"the grammar is too large: it is compiled to {len(written) >> 20} MiB, {most >> 20} are "
                "the most; use fewer rules, or fewer choices between them"
            )
        return written

    def load(self, compiled: bytes) -> Compiled:
        info = self._infos[compiled[:1] == _MARKED[True]]
        loaded = self._library.CompiledGrammar.deserialize_json(compiled[1:].decode(), info)
        return _Compiled(self._library, loaded, len(compiled))

    def fill(self, matchers: Sequence[Matcher], masks: torch.Tensor, rows: Sequence[int]) -> None:
        open_ones, places = [], []
        for matcher, row in zip(matchers, rows, strict=True):
            assert isinstance(matcher, XGrammarMatcher)
            if matcher.can_go_on:
                open_ones.append(matcher)
                places.append(row)
            else:
                masks[row] = 0
        if len(open_ones) > 1:
            began = time.monotonic()
            self._batch.batch_fill_next_token_bitmask([one.handle for one in open_ones], masks, places)
            if time.monotonic() - began < _STEP_SECONDS + _ROW_SECONDS * len(open_ones):
                return
        for one, place in zip(open_ones, places, strict=True):  # which is it that takes so long?
            if not one.fill(masks, place):
                masks[place] = 0

    def _try_out(self, matcher: XGrammarMatcher) -> None:
        """Raises GrammarError if the first steps take too long."""
        mask = np.zeros((1, (self._size + 31) // 32), dtype=np.int32)
        draw = random.Random(1)
        for _ in range(_TRIED_STEPS):
            if matcher.can_go_on and matcher.fill(mask, 0):
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little")[: self._size])
                if len(allowed):
                    matcher.accept(int(allowed[draw.randrange(len(allowed))]))
            if matcher.slow:
                raise GrammarError(
                    f"the grammar is too ambiguous: a token of it takes more than {1000 * _STEP_SECONDS:.0f} ms; "
                    "do not repeat what is itself repeated any number of times"
                )

    @functools.cached_property
    def _batch(self) -> Any:
        return self._library.BatchGrammarMatcher(FILL_THREADS)

    def _tokenizer_info(self, vocabulary: Vocabulary, texts: list[bytes]) -> Any:
        library = self._library
        return library.TokenizerInfo(
            texts, library.VocabType.RAW, vocab_size=len(texts), stop_token_ids=list(vocabulary.stop_ids)
        )

    def _rules(self, grammar: Grammar) -> Any:
        if grammar.kind == "ebnf":
            return self._library.Grammar.from_ebnf(grammar.source)
        return self._library.Grammar.from_structural_tag(for_xgrammar_tags(grammar.source))


_MARKED = {False: b"t", True: b"m"}
"""Prefix of compiled bytes: whether they are for the vocabulary with special tokens."""


class _Compiled:
    def __init__(self, library: Any, compiled: Any, length: int) -> None:
        """length: of the serialised form."""
        self._library = library
        self._compiled = compiled
        self._length = length

    @property
    def num_bytes(self) -> int:
        """Approximated by the serialised length; the library's own count leaves out the rules' objects."""
        return max(int(self._compiled.memory_size_bytes), self._length)

    def matcher(self, stop_ids: Sequence[int]) -> Matcher:
        return XGrammarMatcher(self._library.GrammarMatcher(self._compiled, override_stop_tokens=list(stop_ids)))


class XGrammarMatcher:
    """Implements `Matcher`. After a step that took too long it allows nothing."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.slow = False

    @property
    def can_go_on(self) -> bool:
        return not self.slow and not self.handle.is_terminated()

    def fill(self, masks: Any, row: int) -> bool:
        """False: it took too long."""
        began = time.thread_time()
        self.handle.fill_next_token_bitmask(masks, row)
        return self._in_time(began)

    def accept(self, token: int) -> bool:
        if self.slow:
            return False
        began = time.thread_time()
        accepted = bool(self.handle.accept_token(token))
        self._in_time(began)
        return accepted

    def _in_time(self, began: float) -> bool:
        self.slow = self.slow or time.thread_time() - began > _STEP_SECONDS
        return not self.slow

    def rollback(self, count: int) -> None:
        self.handle.rollback(count)

    def forced(self) -> str:
        if not self.can_go_on:
            return ""
        try:
            return str(self.handle.find_jump_forward_string())
        except UnicodeDecodeError as error:  # the forced bytes begin or end inside a character
            return certain_text(error.object)

    @property
    def completed(self) -> bool:
        return not self.slow and bool(self.handle.is_completed())

    @property
    def gave_up(self) -> str:
        return f"one took more than {1000 * _STEP_SECONDS:.0f} ms" if self.slow else ""


def _reason(error: Exception) -> str:
    """The library's message without time and source position."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ", "", str(error)).strip()
    text = re.sub(r"^Check failed: \(.*?\) is false: ", "", text)
    return text.splitlines()[-1 if text.startswith("Traceback") else 0][:500] if text else type(error).__name__


_SURROGATES = [0xD800, 0xDFFF]
_BOUNDED_CHARACTER = [1, 34, 34, 92, 92, 13, 13, 10, 10]
_JSON_CHARACTER = [1, 0, 31, 34, 34, 92, 92]


def mended(serialized: str) -> str:
    """Rules (`Grammar.serialize_json()`) without characters that no text can have.

    The library's negated classes include surrogates, which are not UTF-8; its strings with a length include control
    characters, which JSON must escape. The classes are rewritten; expressions refer to each other by number, so only
    the table of their positions changes.
    """
    grammar = json.loads(serialized)
    data: list[int] = grammar["grammar_expr_data"]
    new: list[int] = []
    starts: list[int] = []
    for start in grammar["grammar_expr_indptr"]:
        kind, length = data[start], data[start + 1]
        numbers = data[start + 2 : start + 2 + length]
        if kind in (Kind.CLASS, Kind.CLASS_STAR) and numbers[0]:
            numbers = (_JSON_CHARACTER if numbers == _BOUNDED_CHARACTER else numbers) + _SURROGATES
        starts.append(len(new))
        new += [kind, len(numbers), *numbers]
    return json.dumps({**grammar, "grammar_expr_data": new, "grammar_expr_indptr": starts})
