"""The functions that may be programs, and programs in classes, in other processes and within themselves."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.lang_backend import FakeBackend
from treeline_lang import Function, ProgramError, RuntimeEndpoint, function, gen

COUNTS = FakeBackend(lambda prompt, *_: f"<{len(prompt.text)}>")


@function
def ask(s: Any, word: str = "why") -> str:
    s += word + gen("a")
    return word


class Teacher:
    word = "ab"

    def method(self, s: Any) -> None:
        s += self.word + gen("a")

    def __call__(self, s: Any, more: str) -> None:
        s += self.word + more + gen("a")

    @staticmethod
    @function
    def alone(s: Any) -> None:
        s += "abc" + gen("a")

    async def later(self, s: Any) -> None: ...


async def _coroutine(s: Any) -> None: ...


async def _async_generator(s: Any) -> Any:
    yield s


def _generator(s: Any) -> Any:
    yield s


def _positional(s: Any, word: str, /) -> None: ...


class _Later:
    async def __call__(self, s: Any) -> None: ...


@pytest.mark.parametrize(
    ("body", "length"),
    [
        (Teacher().method, 2),
        (functools.partial(Teacher(), more="c"), 3),
        (functools.partial(ask.body, word="abcd"), 4),
        (lambda s: Teacher().method(s), 2),
    ],
    ids=["method", "object", "partial", "lambda"],
)
def test_anything_callable_with_a_state_is_a_body(body: Callable[..., Any], length: int) -> None:
    program = function(body)
    assert program.run(backend=COUNTS)["a"] == f"<{length}>"
    assert program.compile(strict=True).run(backend=COUNTS)["a"] == f"<{length}>"
    assert program.__name__ in repr(program)


def test_a_program_may_be_a_static_method() -> None:
    assert Teacher().alone.run(backend=COUNTS)["a"] == Teacher.alone.run(backend=COUNTS)["a"] == "<3>"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (_coroutine, "_coroutine: a program is a plain def"),
        (_async_generator, "plain def"),
        (_Later(), "_Later: a program is a plain def"),
        (Teacher().later, "plain def"),
        (_generator, "_generator: a program does not yield"),
        (_positional, "without the /"),
        (Teacher.method, r"of a method: function\(self.method\)"),
        (classmethod(_generator), "takes a function"),
        (3, "takes a function, not 3"),
    ],
)
def test_an_invalid_body_is_refused_where_it_is_made_a_program(body: Any, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        function(body)


def test_a_coroutine_that_a_body_returns_is_reported() -> None:
    wrapped = function(functools.wraps(_coroutine)(lambda s: _coroutine(s)))
    with pytest.raises(TypeError, match="plain def"):
        wrapped.run(backend=COUNTS)


def test_programs_go_to_other_processes_by_their_name() -> None:
    assert pickle.loads(pickle.dumps(ask)) is ask
    assert copy.copy(ask) is copy.deepcopy(ask) is ask
    with pytest.raises(pickle.PicklingError, match="bound"):
        pickle.dumps(ask.bind(word="x"))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(function(lambda s: None))


@function
def two_halves(s: Any, begun: threading.Event, goes_on: threading.Event) -> str:
    s += "one"
    begun.set()
    assert goes_on.wait(60)
    s["late"] = 1
    s += " two" + gen("a")
    return "returned"


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda state: state.text(), "one two<7>"),
        (lambda state: state.ret_value, "returned"),
        (lambda state: "late" in state, True),
        (lambda state: "never" in state, False),
        (lambda state: state.variables, {"late": 1, "a": "<7>"}),
        (lambda state: state.error(), None),
        (lambda state: state.messages(), []),
    ],
)
def test_reading_a_program_that_runs_elsewhere_waits_for_its_body(read: Callable[[Any], Any], expected: Any) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    state = two_halves.run(begun, goes_on, stream=True, backend=COUNTS)
    assert begun.wait(60)
    later = threading.Timer(0.05, goes_on.set)  # by then it is being read, or this tests nothing
    later.start()
    assert read(state) == expected
    assert goes_on.is_set() or expected is True
    later.join()
    state.sync()


@function
def countdown(s: Any, n: int) -> None:
    s += f"{n} "
    if n:
        s += countdown(n - 1).text()


def test_programs_call_themselves() -> None:
    assert countdown.run(5, backend=COUNTS).text() == "5 4 3 2 1 0 "
    with pytest.raises(ProgramError, match="call each other"):
        countdown.run(1000, backend=COUNTS)


def test_variables_may_be_set_once_a_program_has_ended_though_nothing_is_appended() -> None:
    state = ask.run(backend=COUNTS)
    state["a"] = state["a"] + "!"
    state["mark"] = 3
    assert (state["a"], state["mark"], state.text()) == ("<3>!", 3, "why<3>")
    with pytest.raises(ProgramError, match="nothing can be appended"):
        state += "more"


def test_a_state_shows_its_text() -> None:
    state = ask.run(backend=COUNTS)
    state.sync()
    assert repr(state) == "ProgramState('why<3>')"


def test_pieces_are_followed_by_keyword() -> None:
    assert "".join(ask.run(backend=COUNTS, stream=True).text_iter(var_name="a")) == "<3>"


def test_a_method_of_the_default_backend_is_a_function_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from treeline_lang import flush_cache, get_server_info

    flushed: list[bool] = []
    backend = RuntimeEndpoint("http://127.0.0.1:1")
    monkeypatch.setattr(backend, "flush_cache", lambda: flushed.append(True))
    monkeypatch.setattr(backend, "get_server_info", lambda: {"model": "m"})
    flush_cache(backend)
    assert flushed == [True]
    assert get_server_info(backend) == {"model": "m"}


def test_a_program_keeps_its_functions_attributes() -> None:
    assert isinstance(ask, Function)
    assert (ask.__module__, ask.__qualname__) == (__name__, "ask")
