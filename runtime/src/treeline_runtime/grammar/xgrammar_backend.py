"""Grammars by xgrammar (https://github.com/mlc-ai/xgrammar): a pushdown automaton with masks computed beforehand."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treeline_runtime.grammar.backend import Compiled, GrammarError, Matcher, certain_text
from treeline_runtime.grammar.mended import mended
from treeline_runtime.grammar.patterns import as_ebnf, whole
from treeline_runtime.grammar.satisfiable import check_satisfiable
from treeline_runtime.grammar.schema_support import for_xgrammar
from treeline_runtime.grammar.structural_tags import for_xgrammar_tags
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.grammar.xgrammar_library import load as load_library
from treeline_runtime.messages import Grammar

if TYPE_CHECKING:
    import torch

MAX_THREADS = 8


class XGrammarBackend:
    """Implements `GrammarBackend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library: Any = load_library()
        self._threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._text = self._tokenizer_info(vocabulary, vocabulary.texts)
        self._marked = self._tokenizer_info(vocabulary, vocabulary.with_marks()) if vocabulary.marks else self._text

    def compile(self, grammar: Grammar) -> bytes:
        compiler = self._library.GrammarCompiler(
            self._info(grammar.kind == "structural_tag"), max_threads=self._threads, cache_enabled=False
        )
        try:
            rules = mended(self._rules(grammar).serialize_json())
            check_satisfiable(rules)
            compiled = compiler.compile_grammar(self._library.Grammar.deserialize_json(rules))
        except GrammarError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(_reason(error)) from None
        return _MARKED[grammar.kind == "structural_tag"] + compiled.serialize_json().encode()

    def load(self, compiled: bytes) -> Compiled:
        info = self._info(compiled[:1] == _MARKED[True])
        loaded = self._library.CompiledGrammar.deserialize_json(compiled[1:].decode(), info)
        return _Compiled(self._library, loaded, len(compiled))

    def fill(self, matchers: Sequence[Matcher], masks: torch.Tensor, rows: Sequence[int]) -> None:
        open_ones, places = [], []
        for matcher, row in zip(matchers, rows, strict=True):
            assert isinstance(matcher, XGrammarMatcher)
            if matcher.handle.is_terminated():
                masks[row] = 0
            else:
                open_ones.append(matcher.handle)
                places.append(row)
        if len(open_ones) == 1:
            open_ones[0].fill_next_token_bitmask(masks, places[0])
        elif open_ones:
            self._batch.batch_fill_next_token_bitmask(open_ones, masks, places)

    @functools.cached_property
    def _batch(self) -> Any:
        """With threads of its own."""
        return self._library.BatchGrammarMatcher(self._threads)

    def _tokenizer_info(self, vocabulary: Vocabulary, texts: list[bytes]) -> Any:
        library = self._library
        return library.TokenizerInfo(
            texts, library.VocabType.RAW, vocab_size=len(texts), stop_token_ids=list(vocabulary.stop_ids)
        )

    def _info(self, marked: bool) -> Any:
        return self._marked if marked else self._text

    def _rules(self, grammar: Grammar) -> Any:
        parsed = self._library.Grammar
        match grammar.kind:
            case "json":
                return parsed.from_json_schema(for_xgrammar(grammar.source), any_whitespace=False)
            case "regex":
                return parsed.from_ebnf(f"root ::= {as_ebnf(whole(grammar.source))}")
            case "ebnf":
                return parsed.from_ebnf(grammar.source)
            case "structural_tag":
                return parsed.from_structural_tag(for_xgrammar_tags(grammar.source))
            case "choice":
                texts = [{"type": "const_string", "value": text} for text in json.loads(grammar.source)]
                return parsed.from_structural_tag(
                    {"type": "structural_tag", "format": {"type": "or", "elements": texts}}
                )


_MARKED = {False: b"t", True: b"m"}
"""What compiled bytes begin with: whether they are for the vocabulary with special tokens."""


class _Compiled:
    def __init__(self, library: Any, compiled: Any, length: int) -> None:
        """length: of what it was read from."""
        self._library = library
        self._compiled = compiled
        self._length = length

    @property
    def num_bytes(self) -> int:
        """What it takes of the heap is about its length when serialised; the library leaves out the rules' objects."""
        return max(int(self._compiled.memory_size_bytes), self._length)

    def matcher(self, stop_ids: Sequence[int]) -> Matcher:
        return XGrammarMatcher(self._library.GrammarMatcher(self._compiled, override_stop_tokens=list(stop_ids)))


class XGrammarMatcher:
    """Implements `Matcher`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def accept(self, token: int) -> bool:
        return bool(self.handle.accept_token(token))

    def rollback(self, count: int) -> None:
        self.handle.rollback(count)

    def forced(self) -> str:
        if self.handle.is_terminated():
            return ""
        try:
            return str(self.handle.find_jump_forward_string())
        except UnicodeDecodeError as error:  # what is certain begins or ends within a character
            return certain_text(error.object)

    @property
    def completed(self) -> bool:
        return bool(self.handle.is_completed())


def parse_ebnf(source: str) -> str:
    """The rules, as the library serialises them. Raises GrammarError."""
    try:
        return str(load_library().Grammar.from_ebnf(source).serialize_json())
    except RuntimeError as error:
        raise GrammarError(_reason(error)) from None


def _reason(error: Exception) -> str:
    """What the library says, without the time and place in its source that it puts before."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ", "", str(error)).strip()
    text = re.sub(r"^Check failed: \(.*?\) is false: ", "", text)
    return text.splitlines()[-1 if text.startswith("Traceback") else 0][:500] if text else type(error).__name__
