"""The compiler is warmed, so that the first grammar does not wait."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

import pytest
from treeline_runtime.grammar.backend import Compiled, GrammarError
from treeline_runtime.grammar.compiler import GrammarCompiler
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.messages import Grammar
from treeline_wire.tokenizer import TokenizerBundle

TINY = Path(__file__).parents[3] / "models" / "tiny"
STOPS = (4095, 4093)


def vocabulary() -> Vocabulary:
    return Vocabulary.of(TokenizerBundle.from_dir(TINY), 4096, STOPS)


def integers(most: int) -> Grammar:
    return Grammar("json", json.dumps({"type": "integer", "minimum": 0, "maximum": most}))


def refused(future: Future[Compiled]) -> str:
    with pytest.raises(GrammarError) as raised:
        future.result(60)
    return str(raised.value)


def test_warming_happens_once_and_serves_the_first_grammar() -> None:
    calls = list[str]()

    def read() -> Vocabulary:
        calls.append("read")
        return vocabulary()

    compiler = GrammarCompiler(read, on_done=lambda: None, prepare=lambda _: calls.append("prepared"))
    try:
        compiler.warm().result(60)
        assert calls == ["read", "prepared"]
        assert compiler._loaded is not None
        assert {"_llguidance", "_xgrammar"} <= vars(compiler._loaded.backend).keys(), "their tables are made"
        pids = compiler._workers.pids()
        assert compiler.get(integers(1)).result(60)
        assert compiler._workers.pids() == pids
        assert calls == ["read", "prepared"]
    finally:
        compiler.close()


def test_a_server_without_grammar_support_is_not_warmed_and_gives_the_reason() -> None:
    def none() -> Vocabulary:
        raise GrammarError("this server does not support grammars: no tokenizer")

    compiler = GrammarCompiler(none, on_done=lambda: None)
    try:
        compiler.warm().result(60)
        assert not compiler._workers.pids()
        assert "no tokenizer" in refused(compiler.get(integers(1)))
    finally:
        compiler.close()
