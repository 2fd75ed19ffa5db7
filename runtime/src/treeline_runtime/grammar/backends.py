"""Two libraries behind the interface, one for each kind of grammar.

llguidance compiles schemas, patterns and choices: it intersects schemas, knows most keywords, and needs little
compilation. Its lexer takes the longest word; for a grammar of characters each character would have to be a word, and
each step would walk the whole vocabulary.

xgrammar compiles grammars and structural tags: it is exact there and precomputes masks. In tags it supports fewer
schema keywords than llguidance.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from treeline_runtime.grammar.backend import Compiled, GrammarBackend, Matcher
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.messages import Grammar

if TYPE_CHECKING:
    import torch

_EXACT = frozenset(["ebnf", "structural_tag"])
_LLGUIDANCE, _XGRAMMAR = b"l", b"x"
"""Prefix of compiled bytes."""


def load_libraries() -> None:
    """Imports both, which a confined process cannot do later."""
    import llguidance  # noqa: F401

    from treeline_runtime.grammar import llguidance_backend, xgrammar_backend  # noqa: F401
    from treeline_runtime.grammar.xgrammar_library import load

    load()


class Backends:
    """Implements `GrammarBackend`. Each library reads the vocabulary on first use."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @cached_property
    def _llguidance(self) -> GrammarBackend:
        from treeline_runtime.grammar.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(self._vocabulary)

    @cached_property
    def _xgrammar(self) -> GrammarBackend:
        from treeline_runtime.grammar.xgrammar_backend import XGrammarBackend

        return XGrammarBackend(self._vocabulary)

    def compile(self, grammar: Grammar) -> bytes:
        if grammar.kind in _EXACT:
            return _XGRAMMAR + self._xgrammar.compile(grammar)
        return _LLGUIDANCE + self._llguidance.compile(grammar)

    def load(self, compiled: bytes) -> Compiled:
        backend = self._llguidance if compiled[:1] == _LLGUIDANCE else self._xgrammar
        return backend.load(compiled[1:])

    def fill(self, matchers: Sequence[Matcher], masks: torch.Tensor, rows: Sequence[int]) -> None:
        from treeline_runtime.grammar.llguidance_backend import LLGuidanceMatcher

        is_lazy = [isinstance(matcher, LLGuidanceMatcher) for matcher in matchers]
        for lazy in (True, False):
            chosen = [i for i, is_one in enumerate(is_lazy) if is_one is lazy]
            if chosen:
                backend = self._llguidance if lazy else self._xgrammar
                backend.fill([matchers[i] for i in chosen], masks, [rows[i] for i in chosen])
