"""Grammars are compiled once, in other processes, and within limits."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from treeline_runtime.confined.child import ProcessLimits, send_frame
from treeline_runtime.confined.pool import PoolClosedError
from treeline_runtime.confined.process import ConfinedProcess, Killed
from treeline_runtime.grammar.backend import Compiled, GrammarError
from treeline_runtime.grammar.compiler import CompileLimits, GrammarBudgetError, GrammarBusyError, GrammarCompiler
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.grammar.worker import Answer
from treeline_runtime.messages import Grammar
from treeline_wire.tokenizer import TokenizerBundle

TINY = Path(__file__).parents[3] / "models" / "tiny"
STOPS = (4095, 4093)
SLOW, ENDLESS = (
    Grammar("ebnf", "root ::= " + " | ".join(f'([a-z]{{1,{n}}} "x"){{1,{most}}}' for n in range(60, 99)))
    for most in (99, 999)
)
"""Grammars that take seconds with any vocabulary."""
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
        limits = CompileLimits(**({"seconds": 60.0} | more))
        made.append(GrammarCompiler(vocabulary, on_done=on_done, limits=limits, clock=clock))
        return made[-1]

    yield new
    for compiler in made:
        compiler.close()


class Held:
    """Compilers whose processes answer when the test allows; every answer is a refusal without a message."""

    def __init__(self, new: NewCompiler) -> None:
        self._new = new
        self._changed = threading.Condition()
        self._answers = dict[Grammar, Callable[[], None] | None]()
        self._free = 0
        self.begun = list[Grammar]()
        """Grammars being compiled."""
        self.asked = list[Grammar]()
        """Grammars in the order in which they began."""

    def new(self, **more: Any) -> GrammarCompiler:
        compiler = self._new(**more)
        compiler._ask = self._ask  # type: ignore[method-assign]
        return compiler

    def wait_for(self, count: int) -> None:
        """Wait until `count` grammars are being compiled."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) == count, 60), self.begun

    def go_on(self, count: int) -> None:
        """Let `count` more compilations finish, in any order."""
        with self._changed:
            self._free += count
            self._changed.notify_all()

    def answer(self, grammar: Grammar, error: Exception | None = None) -> None:
        def end() -> None:
            if error is not None:
                raise error

        self._tell(grammar, end)

    def late(self, grammar: Grammar) -> None:
        """End the grammar's first try. Returns when the compiler knows."""
        self._tell(grammar, None)

    def _tell(self, grammar: Grammar, what: Callable[[], None] | None) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: grammar in self.begun, 60), self.begun
            self._answers[grammar] = what
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: grammar not in self._answers, 60)

    def _ask(self, grammar: Grammar, _: object, on_late: Callable[[], None] | None = None) -> bytearray:
        if on_late is None:  # a process is made ready
            return bytearray([Answer.REFUSED])
        with self._changed:
            self.begun.append(grammar)
            self.asked.append(grammar)
            self._changed.notify_all()
            try:
                while True:
                    assert self._changed.wait_for(lambda: self._free or grammar in self._answers, 60)
                    if grammar not in self._answers:
                        self._free -= 1
                        return bytearray([Answer.REFUSED])
                    what = self._answers.pop(grammar)
                    if what is None:
                        on_late()
                        self._changed.notify_all()
                    else:
                        what()
                        return bytearray([Answer.REFUSED])
            finally:
                self.begun.remove(grammar)
                self._changed.notify_all()


@pytest.fixture
def held(new_compiler: NewCompiler) -> Held:
    return Held(new_compiler)


def integers(most: int) -> Grammar:
    return Grammar("json", json.dumps({"type": "integer", "minimum": 0, "maximum": most}))


def refused(future: Future[Compiled]) -> str:
    with pytest.raises(GrammarError) as raised:
        future.result(60)
    return str(raised.value)


def test_a_grammar_is_compiled_once_for_all_requests_and_markers(new_compiler: NewCompiler) -> None:
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


def test_the_error_of_a_grammar_is_reported_and_remembered(new_compiler: NewCompiler) -> None:
    compiler = new_compiler()
    bad = Grammar("json", '{"type": "integer", "minimum": 2, "maximum": 1}')
    first = compiler.get(bad)
    assert refused(first) == "can never be satisfied: the bounds leave no number at /"
    assert compiler.get(bad) is first


def test_an_unexpected_failure_is_a_refusal_and_the_process_survives(new_compiler: NewCompiler) -> None:
    compiler = new_compiler(workers=1)
    assert compiler.get(integers(1)).result(60)
    pids = compiler._workers.pids()
    assert "cannot be read: ValidationError" in refused(compiler.get(Grammar("nonsense", "")))  # type: ignore[arg-type]
    assert len(refused(compiler.get(Grammar("json", json.dumps({"$ref": "#/" + "a" * 10_000}))))) == 1000
    assert compiler._workers.pids() == pids


@pytest.mark.deep
def test_a_grammar_beyond_the_limits_is_stopped_and_retried_later(new_compiler: NewCompiler) -> None:
    clock = Clock()
    compiler = new_compiler(seconds=3.0, workers=1, clock=clock)
    assert compiler.get(integers(1)).result(60)
    expected = "the grammar needs more than 3 s or 2048 MiB to be compiled: make it smaller"
    assert refused(compiler.get(ENDLESS)) == expected
    assert compiler.get(integers(2)).result(60), "another process serves the next one"
    again = compiler.get(ENDLESS)
    assert again.done(), "it is not tried now"
    assert refused(again) == expected
    clock.now = 61.0
    assert not compiler.get(ENDLESS).done(), "it is tried again"


def test_a_grammar_that_became_too_costly_is_refused_for_a_while(new_compiler: NewCompiler) -> None:
    clock = Clock()
    compiler = new_compiler(clock=clock, waiting=2)
    for kind, source in (("regex", "a"), ("ebnf", 'root ::= "a"'), ("regex", "b")):
        grammar = Grammar(kind, source)  # type: ignore[arg-type]
        compiled = compiler.get(grammar).result(60)
        compiler.outgrown(Grammar(grammar.kind, source, after="</think>"), compiled, f"too much: {source}")
        compiler.outgrown(grammar, compiled, "another output that was under way")
        assert compiler.get(grammar).done()
        assert refused(compiler.get(grammar)) == f"too much: {source}"
    assert compiler.num_bytes == 0
    assert len(compiler._tried) == 2, "what was refused longest ago is forgotten"
    clock.now = 61.0
    assert compiler.get(Grammar("regex", "b")).result(60)


def test_memory_is_limited_too(new_compiler: NewCompiler) -> None:
    compiler = new_compiler(memory_bytes=32 << 20, workers=1)
    assert "32 MiB" in refused(compiler.get(Grammar("ebnf", 'root ::= ("a"{1,300} "b"{1,300}){1,300}')))


def test_the_number_of_waiting_grammars_is_bounded(held: Held) -> None:
    compiler = held.new(waiting=2, workers=1)
    under_way = compiler.get(integers(0), client="a")
    held.wait_for(1)
    kept, last = compiler.get(integers(1), client="a"), compiler.get(integers(2), client="a")
    with pytest.raises(GrammarBusyError, match="try again later"):
        compiler.get(integers(3), client="a").result(0)
    other = compiler.get(integers(4), client="b")
    with pytest.raises(GrammarBusyError, match="try again later"):
        last.result(0)
    held.go_on(3)
    for future in (under_way, kept, other):
        assert refused(future) == ""
    again = compiler.get(integers(2), client="a")
    held.go_on(1)
    assert refused(again) == ""


def test_clients_take_turns(held: Held) -> None:
    compiler = held.new(workers=1)
    futures = [compiler.get(integers(most), client="a") for most in range(5)]
    held.wait_for(1)
    futures += [compiler.get(integers(most), client=client) for most, client in ((10, "b"), (11, "b"), (20, None))]
    held.go_on(8)
    for future in futures:
        refused(future)
    assert held.asked == [integers(most) for most in (0, 1, 10, 20, 2, 11, 3, 4)]


def test_a_slow_grammar_waits_for_a_long_try_and_others_pass(held: Held) -> None:
    compiler = held.new(workers=2)
    slow = [compiler.get(integers(most), client="a") for most in range(4)]
    held.wait_for(2)
    held.late(integers(0))
    held.late(integers(1))
    held.wait_for(1)
    assert held.begun == [integers(0)], "the other one has no worker, nor has what its client sent after it"
    for most in range(10, 20):
        quick = compiler.get(integers(most), client="b")
        held.answer(integers(most))
        refused(quick)
    assert not any(future.done() for future in slow)
    held.answer(integers(0))
    held.wait_for(2)
    assert {*held.begun} == {integers(1), integers(2)}, "it begins again, and another first try"
    held.late(integers(1))
    held.go_on(3)
    for future in slow:
        refused(future)


def test_a_client_without_seconds_left_is_refused_until_some_have_passed(held: Held) -> None:
    """Asking for other grammars does not help it."""
    clock = Clock()
    compiler = held.new(workers=1, clock=clock, client_seconds=30.0, client_seconds_back=0.5)
    first = compiler.get(integers(0), client="a")
    held.wait_for(1)
    others = [compiler.get(integers(most), client=client) for most, client in ((1, "a"), (2, "a"), (3, "b"))]
    held.late(integers(0))
    clock.now = 40.0
    held.answer(integers(0))
    refused(first)
    for future in (others[0], others[1], compiler.get(integers(4), client="a")):
        with pytest.raises(GrammarBudgetError, match="try again in 20 s"):
            future.result(60)
    assert compiler.get(integers(0), client="a") is first, "it is kept"
    held.answer(integers(3))
    refused(others[2])
    clock.now = 61.0
    later = compiler.get(integers(1), client="a")
    held.answer(integers(1))
    assert refused(later) == ""
    assert compiler._used.owed("a") == 29.5, "what is quick costs nothing"


def test_grammars_of_one_namespace_make_no_other_faster(held: Held) -> None:
    compiler = held.new(workers=1)
    first = compiler.get(integers(0), "a")
    held.answer(integers(0))
    assert refused(first) == ""
    assert compiler.get(integers(0), "a") is first
    for namespace in ("b", None):
        other = compiler.get(integers(0), namespace)
        assert not other.done()
        held.answer(integers(0))
        refused(other)
    assert len(held.asked) == 3


def test_a_temporary_refusal_holds_only_for_its_namespace(held: Held) -> None:
    compiler = held.new(workers=1)
    future = compiler.get(integers(0), "a")
    held.answer(integers(0), Killed("late"))
    assert "make it smaller" in refused(future)
    assert compiler.get(integers(0), "a").done()
    other = compiler.get(integers(0), "b")
    assert not other.done()
    held.answer(integers(0))
    refused(other)


@pytest.mark.deep
def test_a_small_grammar_is_ready_before_a_hostile_clients(
    new_compiler: NewCompiler,
) -> None:
    """It runs with real processes."""
    finished = list[str]()
    compiler = new_compiler(first_try_seconds=0.05, clock=time.monotonic, client_seconds=1e9)
    assert compiler.get(integers(0)).result(60)
    hostile = [Grammar("ebnf", SLOW.source + " " * n) for n in range(20)]
    futures = [compiler.get(grammar, "hostile", "hostile") for grammar in hostile]
    while not compiler._num_long:
        assert not futures[-1].done()
    small = compiler.get(integers(1), "other", "other")
    for name, future in (("small", small), *((f"hostile {n}", future) for n, future in enumerate(futures))):
        future.add_done_callback(lambda _, name=name: finished.append(name))  # type: ignore[misc]
    assert small.result(60)
    assert len(finished) < len(hostile) // 2, finished


def test_abandoned_grammars_are_not_compiled_and_free_their_place(new_compiler: NewCompiler) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    asked = list[Grammar]()

    def ask(grammar: Grammar, *_: object) -> bytearray:
        asked.append(grammar)
        begun.release()
        go_on.wait(60)
        return bytearray([Answer.REFUSED])

    compiler = new_compiler(workers=1, waiting=2)
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
def test_a_process_ends_with_the_thread_that_started_it() -> None:
    found = list[ConfinedProcess]()

    def start() -> None:
        limits = ProcessLimits(60.0, 2 << 30, threads=True, ends_with_thread=True)
        process = ConfinedProcess("treeline_runtime.grammar.worker", limits)
        found.append(process)
        process.wait_ready()
        process.ask(msgspec.msgpack.encode(vocabulary()))
        send_frame(process._socket, msgspec.msgpack.encode(ENDLESS))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    (process,) = found
    try:
        assert process._process.wait(60) == -signal.SIGKILL
    finally:
        process.end()


def test_the_least_recently_used_grammar_is_forgotten(new_compiler: NewCompiler) -> None:
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


def test_refused_grammars_count_in_the_cache_per_namespace(new_compiler: NewCompiler) -> None:
    """Many thousands are kept: the bound is on their bytes, and the scheduler's thread does not walk through them."""
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


def test_a_refused_grammar_keeps_no_requests_alive(new_compiler: NewCompiler) -> None:
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


@pytest.mark.deep
def test_a_process_that_is_killed_is_no_fault_of_a_request(new_compiler: NewCompiler) -> None:
    """It holds whether or not the death has been noticed."""
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
    slow = compiler.get(SLOW)
    compiler.close()
    with pytest.raises((GrammarError, PoolClosedError, CancelledError)):
        slow.result(60)
    assert not Path(f"/proc/{pid}").exists()
