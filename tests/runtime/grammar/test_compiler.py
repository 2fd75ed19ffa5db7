"""Grammars are compiled once, elsewhere, and within limits."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from treeline_runtime.confined.child import ProcessLimits
from treeline_runtime.confined.frames import send_frame
from treeline_runtime.confined.pool import PoolClosedError
from treeline_runtime.confined.process import ConfinedProcess
from treeline_runtime.grammar.backend import Compiled, GrammarError
from treeline_runtime.grammar.compiler import CompileLimits, GrammarBusyError, GrammarCompiler
from treeline_runtime.grammar.llguidance_backend import LLGuidanceMatcher
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.grammar.vocabulary_process import read_vocabulary
from treeline_runtime.grammar.worker import Answer, Order
from treeline_runtime.grammar.xgrammar_backend import XGrammarMatcher
from treeline_runtime.messages import Grammar
from treeline_wire.tokenizer import BundleError, TokenizerBundle

TINY = Path(__file__).parents[3] / "models" / "tiny"
STOPS = (4095, 4093)
SLOW = json.dumps({"anyOf": [{"type": "string", "pattern": f"^([a-z]{{1,{n}}}x){{1,99}}$"} for n in range(60, 99)]})
"""Takes seconds with any vocabulary."""
ENDLESS = json.dumps({"anyOf": [{"type": "string", "pattern": f"^([a-z]{{1,{n}}}x){{1,999}}$"} for n in range(60, 99)]})
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
        backend = more.pop("backend", "xgrammar")
        limits = CompileLimits(**more)
        made.append(GrammarCompiler(backend, vocabulary, on_done=on_done, limits=limits, clock=clock))
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
    pids = compiler._workers.pids()
    assert "cannot be read: ValidationError" in refused(compiler.get(Grammar("nonsense", "")))  # type: ignore[arg-type]
    assert len(refused(compiler.get(Grammar("json", json.dumps({"$ref": "#/" + "a" * 10_000}))))) == 1000
    assert compiler._workers.pids() == pids


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


LATE = Grammar("regex", "((a{1,99}){1,99}){1,99}")
"""Neither backend can follow it for long."""


def test_what_an_output_has_outgrown_is_compiled_otherwise_and_then_refused_for_a_while(
    new_compiler: NewCompiler,
) -> None:
    clock = Clock()
    compiler = new_compiler(backend="auto", clock=clock)
    first = compiler.get(LATE).result(60)
    assert isinstance(first.matcher(STOPS), LLGuidanceMatcher)
    compiler.outgrown(Grammar("regex", LATE.source, after="</think>"), first, "too much")
    second = compiler.get(LATE).result(60)
    assert isinstance(second.matcher(STOPS), XGrammarMatcher)
    compiler.outgrown(LATE, first, "another output that was under way")
    assert compiler.get(LATE).result(0) is second
    compiler.outgrown(LATE, second, "too much, too")
    assert refused(compiler.get(LATE)) == "too much, too"
    assert compiler.num_bytes == 0
    clock.now = 61.0
    assert isinstance(compiler.get(LATE).result(60).matcher(STOPS), LLGuidanceMatcher)


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance", "auto"])
def test_what_can_be_compiled_in_no_other_way_is_refused_for_what_it_was_outgrown_by(
    new_compiler: NewCompiler, backend: str
) -> None:
    compiler = new_compiler(backend=backend, waiting=2)
    for text in "abc":
        grammar = Grammar("regex", text)
        if backend == "auto":
            grammar = Grammar("structural_tag", json.dumps({"format": {"type": "const_string", "value": text}}))
        compiler.outgrown(grammar, compiler.get(grammar).result(60), f"too much: {grammar.source}")
        assert refused(compiler.get(grammar)) == f"too much: {grammar.source}"
        assert compiler.get(grammar).done()
    compiler._settle()
    assert len(compiler._tried) == 2, "what was refused longest ago is forgotten"
    assert not compiler._outgrown


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


def test_what_nobody_waits_for_any_more_is_not_compiled_and_takes_no_place(new_compiler: NewCompiler) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    asked = list[Grammar]()

    def ask(order: Order, _: object) -> bytearray:
        asked.append(order.grammar)
        begun.release()
        go_on.wait(60)
        return bytearray([Answer.REFUSED])

    compiler = new_compiler(workers=1, waiting=3)
    compiler._ask = ask  # type: ignore[method-assign]
    under_way, left, kept = (compiler.get(integers(most)) for most in (1, 2, 3))
    assert begun.acquire(timeout=60)
    compiler.forget(integers(1))
    compiler.forget(Grammar("json", integers(2).source, after="</think>"))
    compiler.forget(integers(9))
    assert left.cancelled()
    later = compiler.get(integers(4))
    assert compiler.get(integers(5)).done(), "the places are taken"
    compiler.forget(integers(4))
    again = compiler.get(integers(2))
    go_on.set()
    for future in (under_way, kept, again):
        assert refused(future) == ""
    assert later.cancelled()
    assert asked == [integers(1), integers(3), integers(2)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends with its request")
def test_a_process_ends_with_the_thread_that_started_it_whatever_it_does() -> None:
    found = list[ConfinedProcess]()

    def start() -> None:
        limits = ProcessLimits(60.0, 2 << 30, threads=True, ends_with_thread=True)
        process = ConfinedProcess("treeline_runtime.grammar.worker", limits, "xgrammar")
        found.append(process)
        process.ask(msgspec.msgpack.encode(vocabulary()))
        send_frame(process._socket, msgspec.msgpack.encode(Grammar("json", ENDLESS)))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    (process,) = found
    try:
        assert process._process.wait(5) == -signal.SIGKILL
    finally:
        process.end()


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
    compiler._ask = lambda *_: bytearray([Answer.REFUSED])  # type: ignore[method-assign]
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
    (pid,) = compiler._workers.pids()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert compiler.get(integers(2)).result(60)


def test_a_process_that_is_killed_is_no_fault_of_a_request(new_compiler: NewCompiler) -> None:
    """Whether or not it has been noticed that it is gone."""
    compiler = new_compiler(workers=1)
    for most in range(1, 6):
        assert compiler.get(integers(most)).result(60)
        (pid,) = compiler._workers.pids()
        os.kill(pid, signal.SIGKILL)
    assert compiler.get(integers(9)).result(60)


def test_closing_ends_the_processes(new_compiler: NewCompiler) -> None:
    compiler = new_compiler(workers=1)
    assert compiler.get(integers(1)).result(60)
    (pid,) = compiler._workers.pids()
    slow = compiler.get(Grammar("json", SLOW))
    compiler.close()
    with pytest.raises((GrammarError, PoolClosedError, CancelledError)):
        slow.result(60)
    assert not Path(f"/proc/{pid}").exists()


def test_what_is_warm_is_read_and_started_once_and_the_first_grammar_finds_it() -> None:
    calls = list[str]()

    def read() -> Vocabulary:
        calls.append("read")
        return vocabulary()

    compiler = GrammarCompiler("auto", read, on_done=lambda: None, prepare=lambda _: calls.append("prepared"))
    try:
        compiler.warm(lambda: True).result(60)
        assert calls == ["read", "prepared"]
        assert compiler._loaded is not None
        assert {"_llguidance", "_xgrammar"} <= vars(compiler._loaded.backend).keys(), "their tables are made"
        pids = compiler._workers.pids()
        assert compiler.get(integers(1)).result(60)
        assert compiler._workers.pids() == pids
        assert calls == ["read", "prepared"]
    finally:
        compiler.close()


def test_where_nothing_may_be_held_up_the_rest_waits_for_the_first_grammar() -> None:
    calls = list[str]()
    compiler = GrammarCompiler("auto", vocabulary, on_done=lambda: None, prepare=lambda _: calls.append("prepared"))
    try:
        compiler.warm(lambda: False).result(60)
        assert compiler._loaded is not None
        assert not {"_llguidance", "_xgrammar"} & vars(compiler._loaded.backend).keys()
        assert calls == []
        assert len(compiler._workers.pids()) == 1, "the process has read the vocabulary"
        assert compiler.get(integers(1)).result(60)
        assert compiler.get(integers(2)).result(60)
        assert calls == ["prepared"]
    finally:
        compiler.close()


def test_a_server_that_cannot_follow_grammars_is_not_warmed_and_says_why_when_asked() -> None:
    def none() -> Vocabulary:
        raise GrammarError("this server cannot follow grammars: no tokenizer")

    compiler = GrammarCompiler("auto", none, on_done=lambda: None)
    try:
        compiler.warm(lambda: True).result(60)
        assert not compiler._workers.pids()
        assert "no tokenizer" in refused(compiler.get(integers(1)))
    finally:
        compiler.close()


def test_a_vocabulary_is_the_same_when_another_process_reads_it() -> None:
    bundle = TokenizerBundle.from_dir(TINY)
    assert read_vocabulary(bundle, 4200, STOPS) == Vocabulary.of(bundle, 4200, STOPS)
    with pytest.raises(BundleError):
        read_vocabulary(TokenizerBundle.build("{}"), 4200, STOPS)
