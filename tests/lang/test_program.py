"""Programs and batches of them: arguments, sampling, order, threads, and the progress shown."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lang_backend import FakeBackend
from treeline_lang import Unsupported, function, gen, set_default_backend, user
from treeline_lang.batch import Progress, thread_count


@function
def ask(s: Any, question: str, times: int = 1, *, temperature: float = 0.5) -> int:
    """Ask a question."""
    for _ in range(times):
        s += f"{question} {temperature}" + gen("a")
    return times


@function
def judge(s, essay):  # type: ignore[no-untyped-def]
    s += essay


@function
def anything(s: Any, **given: Any) -> Any:
    return given


def test_arguments_are_the_functions_and_the_rest_is_sampling() -> None:
    backend = FakeBackend()
    state = ask.run("why", times=2, temperature=0.25, top_p=0.5, stop="x", max_new_tokens=7, backend=backend)
    state.sync()
    sampling = backend.requests[0].sampling
    assert backend.requests[0].text == "why 0.25", "a parameter of the function comes first"
    assert (sampling.temperature, sampling.top_p, sampling.stop, sampling.max_tokens) == (None, 0.5, ("x",), 7)
    assert state.ret_value == 2
    assert anything.run(a=1, backend=backend).ret_value == {"a": 1}
    assert (ask.__name__, ask.__doc__, repr(judge)) == ("ask", "Ask a question.", "<program judge(essay)>")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: ask.run(backend=FakeBackend()), "ask.*missing a required argument: 'question'"),
        (lambda: ask.run("a", heat=1, backend=FakeBackend()), "ask.*unexpected keyword argument 'heat'"),
        (lambda: ask.run("a", top_p=7, backend=FakeBackend()), "top_p is between"),
        (lambda: ask.bind(nothing=1), "has no parameter 'nothing'"),
        (lambda: ask.run_batch([3], backend=FakeBackend()), "a mapping of arguments or a tuple"),
        (lambda: ask.run_batch([{}], backend=FakeBackend()), "missing a required argument"),
        (lambda: ask.run_batch([("a",)], num_threads=0, backend=FakeBackend()), "num_threads"),
        (lambda: ask.run_batch([("a",)], order="random", backend=FakeBackend()), "order is one of dfs, given"),
        (lambda: function(lambda: None), "the first parameter of a program is its state"),
        (lambda: function(num_api_spec_tokens=0)(lambda s: None), "num_api_spec_tokens is at least 1"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(wrong: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        wrong()


def test_bound_arguments_are_given_once_and_for_all() -> None:
    backend = FakeBackend()
    bound = ask.bind(question="why").bind(times=2)
    assert bound.run(backend=backend).ret_value == 2
    assert bound.run(times=3, backend=backend).ret_value == 3
    assert [state.ret_value for state in bound.run_batch([{}, {"times": 1}], backend=backend)] == [2, 1]
    assert {request.text.split()[0] for request in backend.requests} == {"why"}


def test_a_default_backend_runs_programs_without_one() -> None:
    set_default_backend(None)
    with pytest.raises(Unsupported, match="no backend: give run"):
        ask.run("a")
    backend = FakeBackend()
    set_default_backend(backend)
    try:
        assert ask.run("a")["a"]
        assert ask("a")["a"], "outside of a program a call is a run"
    finally:
        set_default_backend(None)
    with backend:
        pass
    assert backend.closed == 1


def test_a_call_with_the_state_goes_on_with_its_text() -> None:
    @function
    def outer(s: Any) -> None:
        s += "begin "
        inner = ask(s, "why", times=2)
        assert inner is s
        assert s.ret_value == 2

    backend = FakeBackend()
    assert outer.run(backend=backend).text().startswith("begin why 0.5")
    assert len({request.call.session for request in backend.requests}) == 1


def test_a_parallel_programs_sampling_overrides_the_runs() -> None:
    @function
    def outer(s: Any) -> None:
        s += user(ask("why", top_p=0.25)["a"])

    backend = FakeBackend()
    outer.run(top_p=0.5, top_k=3, backend=backend).sync()
    assert (backend.requests[0].sampling.top_p, backend.requests[0].sampling.top_k) == (0.25, 3)


# ---- batches ----------------------------------------------------------------------------------------------------


def test_two_thousand_programs_end_in_order_within_the_concurrency_limit() -> None:
    backend = FakeBackend(lambda prompt, *_: prompt.text)
    items = [{"question": f"question {i}"} for i in range(2000)]
    before = threading.active_count()
    states = ask.run_batch(items, backend=backend, num_threads=32)
    assert [state["a"] for state in states] == [f"question {i} 0.5" for i in range(2000)]
    assert backend.most <= 32
    assert threading.active_count() <= before + 33
    assert ask.run_batch([], backend=backend) == []


def test_items_run_at_the_same_time_and_the_first_does_not_wait_for_the_last() -> None:
    backend = FakeBackend()
    batch = ask.run_batch([(str(i),) for i in range(12)], backend=backend, num_threads=12, generator_style=True)
    backend.holds = lambda request: not request.text.startswith("0 ")
    assert next(batch)["a"]
    backend.wait_running(11)
    backend.holds = lambda _: False
    backend.release()
    assert len(list(batch)) == 11


def test_common_arguments_of_items_are_given_once() -> None:
    backend = FakeBackend()
    states = ask.run_batch([{"times": 1}, {"times": 2}], question="why", max_new_tokens=3, backend=backend)
    assert [state.ret_value for state in states] == [1, 2]
    assert {request.sampling.max_tokens for request in backend.asked("generate")} == {3}


def test_failures_of_some_items_leave_the_others() -> None:
    backend = FakeBackend()
    backend.fails = lambda request: RuntimeError("odd") if request.text[0] in "13" else None
    states = ask.run_batch([(str(i),) for i in range(4)], backend=backend)
    assert [state.error() is None for state in states] == [True, False, True, False]
    assert "gen('a'): RuntimeError: odd" in str(states[1].error())


@given(st.one_of(st.integers(1, 1000), st.just("auto")), st.integers(1, 5000))
def test_there_are_no_more_threads_than_items(asked: Any, items: int) -> None:
    assert 1 <= thread_count(asked, items) <= min(items, 1000 if asked != "auto" else items)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_line_that_ends_with_all_that_ended(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    shown = io.StringIO()
    shown.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", shown)
    with Progress(3, "judge", shown=True) as progress:
        for _ in range(3):
            progress.advance()
    lines = shown.getvalue().split("\r")
    assert lines[-1].startswith("judge: 3/3, ")
    assert lines[-1].endswith("s\n")
    assert (len(lines) > 1) == terminal
    shown.truncate(0)
    with Progress(3, "judge", shown=False) as progress:
        progress.advance()
    assert shown.getvalue() == ""
    ask.run_batch([("a",)], backend=FakeBackend(), progress_bar=True)
    assert "ask: 1/1" in shown.getvalue()
