"""xgrammar, and llguidance for the schemas that have keywords which xgrammar would ignore."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from treeline_runtime.grammar.backend import Compiled, GrammarBackend, Matcher
from treeline_runtime.grammar.json_schema import UnsupportedError
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.grammar.xgrammar_backend import XGrammarBackend, XGrammarMatcher
from treeline_runtime.messages import Grammar

if TYPE_CHECKING:
    import torch


class AutoBackend:
    """Implements `GrammarBackend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._first = XGrammarBackend(vocabulary)

    @cached_property
    def _second(self) -> GrammarBackend:
        from treeline_runtime.grammar.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(self._vocabulary)

    def compile(self, grammar: Grammar) -> bytes:
        try:
            return b"1" + self._first.compile(grammar)
        except UnsupportedError:
            if grammar.kind == "structural_tag":
                raise
            return b"2" + self._second.compile(grammar)

    def load(self, compiled: bytes) -> Compiled:
        return (self._first if compiled[:1] == b"1" else self._second).load(compiled[1:])

    def fill(self, matchers: Sequence[Matcher], masks: torch.Tensor, rows: Sequence[int]) -> None:
        first = [i for i, matcher in enumerate(matchers) if isinstance(matcher, XGrammarMatcher)]
        second = [i for i, matcher in enumerate(matchers) if not isinstance(matcher, XGrammarMatcher)]
        if first:
            self._first.fill([matchers[i] for i in first], masks, [rows[i] for i in first])
        if second:
            self._second.fill([matchers[i] for i in second], masks, [rows[i] for i in second])
