"""Grammars are compiled once, elsewhere, and within limits."""

from __future__ import annotations

import json
import os
import signal
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest
from treeline_runtime.config import ConfigError
from treeline_runtime.grammar.backend import Compiled, GrammarError
from treeline_runtime.grammar.compiler import CompileLimits, GrammarBusyError, GrammarCompiler
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.grammar.worker import Answer
from treeline_runtime.messages import Grammar
from treeline_wire.tokenizer import TokenizerBundle

TINY = Path(__file__).parents[3] / "models" / "tiny"
STOPS = (4095, 4093)
SLOW = json.dumps({"anyOf": [{"type": "string", "pattern": f"^([a-z]{{1,{n}}}x){{1,99}}$"} for n in range(60, 99)]})
"""Takes seconds with any vocabulary."""
NewCompiler = Callable[..., GrammarCompiler]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def vocabulary() -> Vocabulary:
    return Vocabulary.of(TokenizerBundle.from_dir(TINY), 4096, STOPS)


@pytest.fixture
def new_compiler() -> Iterator[NewCompiler]:
    made = list[GrammarCompiler]()

    def new(on_done: Callable[[], None] = lambda: None, **more: Any) -> GrammarCompiler:
        clock = more.pop("clock", Clock())
        limits = CompileLimits(**more)
        made.append(GrammarCompiler("xgrammar", vocabulary, on_done=on_done, limits=limits, clock=clock))
        return made[-1]

    yield new
    for compiler in made:
        compiler.close()


def integers(most: int) -> Grammar:
    return Grammar("json", json.dumps({"type": "integer", "minimum": 0, "maximum": most}))


def refused(future: Future[Compiled]) -> str:
    with pytest.raises(GrammarError) as raised:
        future.result(60)
    return str(raised.value)


def test_a_grammar_is_compiled_once_whoever_asks_and_wherever_it_begins(new_compiler: NewCompiler) -> None:
    done = threading.Semaphore(0)
    compiler = new_compiler(done.release)
    first = compiler.get(integers(5))
    assert compiler.get(integers(5)) is first, "it is under way"
    assert compiler.get(Grammar("json", integers(5).source, after="</think>")) is first
    assert compiler.get(integers(6)) is not first
    for future in (first, compiler.get(integers(6))):
        assert future.result(60).num_bytes > 0
    assert done.acquire(timeout=60)
    assert done.acquire(timeout=60)
    assert compiler.get(integers(5)) is first, "it is kept"
    assert not done.acquire(blocking=False), "nothing else was compiled"


def test_what_is_wrong_with_a_grammar_is_said_and_remembered(new_compiler: NewCompiler) -> None:
    compiler = new_compiler()
    bad = Grammar("json", '{"type": "integer", "minimum": 2, "maximum": 1}')
    first = compiler.get(bad)
    assert refused(first) == "can never be satisfied: the bounds leave no number at /"
    assert compiler.get(bad) is first


def test_what_fails_in_a_way_that_nobody_thought_of_is_refused_and_its_process_lives(new_compiler: NewCompiler) -> None:
    compiler = new_compiler(workers=1)
    assert compiler.get(integers(1)).result(60)
    (process,) = compiler._workers._idle
    assert "cannot be read: ValidationError" in refused(compiler.get(Grammar("nonsense", "")))  # type: ignore[arg-type]
    assert len(refused(compiler.get(Grammar("json", json.dumps({"$ref": "#/" + "a" * 10_000}))))) == 1000
    assert compiler._workers._idle == [process]
    assert process.alive()


def test_a_grammar_beyond_the_limits_is_stopped_and_tried_again_later(new_compiler: NewCompiler) -> None:
    clock = Clock()
    compiler = new_compiler(seconds=0.25, workers=1, clock=clock)
    assert compiler.get(integers(1)).result(60)
    expected = "the grammar needs more than 0.25 s or 2048 MiB to be compiled: make it smaller"
    assert refused(compiler.get(Grammar("json", SLOW))) == expected
    assert compiler.get(integers(2)).result(60), "another process serves the next one"
    again = compiler.get(Grammar("json", SLOW))
    assert again.done(), "it is not tried now"
    assert refused(again) == expected
    clock.now = 61.0
    assert not compiler.get(Grammar("json", SLOW)).done(), "it is tried again"


def test_memory_is_limited_too(new_compiler: NewCompiler) -> None:
    compiler = new_compiler(memory_bytes=32 << 20, workers=1)
    assert "32 MiB" in refused(compiler.get(Grammar("regex", "(a{1,300}b{1,300}){1,300}")))


def test_so_many_wait_and_no_more(new_compiler: NewCompiler) -> None:
    compiler = new_compiler(waiting=2, workers=1, seconds=0.5)
    futures = [compiler.get(Grammar("json", SLOW)), compiler.get(integers(1))]
    with pytest.raises(GrammarBusyError, match="try again later"):
        compiler.get(integers(2)).result(0)
    refused(futures[0])
    assert futures[1].result(60)
    assert compiler.get(integers(2)).result(60)


def test_what_was_not_wanted_for_longest_is_forgotten(new_compiler: NewCompiler) -> None:
    compiler = new_compiler()
    size = compiler.get(integers(7)).result(60).num_bytes
    room = 3 * (size + 3200)
    compiler = new_compiler(cache_bytes=room)
    futures = {}
    for most in (1, 2, 3):
        futures[most] = compiler.get(integers(most))
        futures[most].result(60)
    compiler.get(integers(1))
    compiler.get(integers(4)).result(60)
    compiler.get(integers(5)).result(60)
    assert compiler.get(integers(1)) is futures[1]
    assert compiler.get(integers(2)) is not futures[2]
    assert compiler.num_bytes <= room


def test_refusals_take_as_much_as_is_said_and_none_is_looked_at_for_another(new_compiler: NewCompiler) -> None:
    """Many thousands are kept: the bound is on what they take, and the scheduler's thread does not go through them."""
    compiler = new_compiler(cache_bytes=100_000, waiting=100)
    compiler._workers.ask = lambda *_: bytearray([Answer.REFUSED])  # type: ignore[method-assign]
    refused(compiler.get(Grammar("regex", "0")))  # the vocabulary is there
    tracemalloc.start()
    for i in range(1, 1000):
        compiler.get(Grammar("regex", str(i))).exception(60)
    compiler._settle()
    kept = len(compiler._sizes)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 10 < kept < 100
    assert taken < compiler.num_bytes <= 100_000
    compiler._sizes = _NeverSummed(compiler._sizes)
    assert refused(compiler.get(Grammar("regex", "999"))) == ""


class _NeverSummed(dict[Grammar, int]):
    def values(self) -> Any:
        raise AssertionError("all sizes were looked at")

    __iter__ = items = values


def test_what_refused_a_grammar_keeps_nothing_of_those_who_asked(new_compiler: NewCompiler) -> None:
    compiler = new_compiler()
    bad = Grammar("regex", "(a")
    error = compiler.get(bad).exception(60)
    compiler._settle()
    assert error is not None
    assert error.__traceback__ is None


def test_a_process_that_dies_is_replaced(new_compiler: NewCompiler) -> None:
    compiler = new_compiler(workers=1)
    assert compiler.get(integers(1)).result(60)
    (process,) = compiler._workers._idle
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert compiler.get(integers(2)).result(60)


def test_a_process_that_is_killed_is_no_fault_of_a_request(new_compiler: NewCompiler) -> None:
    """Whether or not it has been noticed that it is gone."""
    compiler = new_compiler(workers=1)
    for most in range(1, 6):
        assert compiler.get(integers(most)).result(60)
        (process,) = compiler._workers._idle
        os.kill(process.pid, signal.SIGKILL)
    assert compiler.get(integers(9)).result(60)


def test_closing_ends_the_processes(new_compiler: NewCompiler) -> None:
    compiler = new_compiler(workers=1)
    assert compiler.get(integers(1)).result(60)
    (process,) = compiler._workers._idle
    slow = compiler.get(Grammar("json", SLOW))
    compiler.close()
    with pytest.raises((GrammarError, OSError, CancelledError)):
        slow.result(60)
    assert not process.alive()


def test_unknown_backends_are_named(new_compiler: NewCompiler) -> None:
    compiler = GrammarCompiler("outlines", vocabulary, on_done=lambda: None)
    with pytest.raises(ConfigError, match="'outlines': use auto, xgrammar"):
        compiler.get(integers(1)).result(60)
    compiler.close()
