"""Grammars for a scheduler of a test: compiled at once in this process, and cached."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from treeline_runtime.grammar.backend import Compiled, GrammarError
from treeline_runtime.grammar.backends import Backends
from treeline_runtime.grammar.constraint import GrammarConstraint, GrammarFiller
from treeline_runtime.grammar.jump_forward import jump_forward
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.messages import Grammar
from treeline_wire.tokenizer import TokenizerBundle

from support.runtime_engine import Harness

MODEL = Path(__file__).parents[2] / "models" / "tiny"


@functools.cache
def bundle() -> TokenizerBundle:
    return TokenizerBundle.from_dir(MODEL)


@functools.cache
def vocabulary() -> Vocabulary:
    config = json.loads((MODEL / "config.json").read_text())
    ends = config["eos_token_id"]
    return Vocabulary.of(bundle(), config["vocab_size"], [ends] if isinstance(ends, int) else ends)


@functools.cache
def backend() -> Backends:
    return Backends(vocabulary())


@functools.cache
def compiled(grammar: Grammar) -> Compiled:
    return backend().load(backend().compile(grammar))


class Compiler:
    """A stand-in for `GrammarCompiler`."""

    def get(self, grammar: Grammar, *_: str | None) -> Future[Compiled]:
        future = Future[Compiled]()
        try:
            future.set_result(compiled(Grammar(grammar.kind, grammar.source)))
        except GrammarError as error:
            future.set_exception(error)
        return future

    def constraint(self, compiled: Compiled, *, stop_ids: Collection[int], after: str = "") -> GrammarConstraint:
        ends = sorted(id for id in stop_ids if not vocabulary().texts[id])
        return GrammarConstraint(
            compiled,
            GrammarFiller(backend()),
            texts=vocabulary().with_marks(),
            stop_ids=ends,
            after=after,
        )

    def forget(self, grammar: Grammar, *_: str | None) -> None:
        pass

    def close(self) -> None:
        pass


class WithGrammars(Harness):
    """The tiny model with grammars."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(MODEL, **({"load_format": "auto", "overlap_depth": 0} | settings))
        self.grammars._compiler = Compiler()  # type: ignore[assignment]
        if self.config.jump_forward or self.config.most_guesses:
            self.grammars.jump_forward = jumping()

    def step(self) -> bool:
        worked = super().step()
        for req in self._everything():
            assert 0 <= req.tree_len <= req.kv_len <= req.device_len
            assert max(len(req.tokens) - 1, req.prompt_len) >= req.kv_len
        return worked

    def said(self, rid: str) -> str:
        """Return the text of an answer, without its end token."""
        stops = vocabulary().stop_ids
        return b"".join(vocabulary().texts[id] for id in self.tokens(rid) if id not in stops).decode()


@functools.cache
def jumping() -> Any:
    return jump_forward(bundle(), vocabulary())
