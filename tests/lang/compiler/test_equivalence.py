"""A program does the same interpreted, and compiled with and without each pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.lang_backend import FakeBackend
from treeline_lang import Function, ProgramError, ProgramState, function, gen, gen_int, select
from treeline_lang.compiler.passes import DEFAULT_PASSES

Script = list[tuple[Any, ...]]
NAMES = ("a", "b", "c")
ROLES = ("system", "user", "assistant")
ARGUMENTS = {"word": "argument", "count": 7, "items": {"list": ["first", "second"]}}

names = st.sampled_from(NAMES)
words = st.text("xyz {\n", min_size=1, max_size=5)
flat = st.one_of(
    st.tuples(st.just("text"), words),
    st.tuples(st.just("argument"), st.sampled_from(["word", "count", "first", "sum"])),
    st.tuples(st.just("gen"), names, st.sampled_from([None, 1, 2])),
    st.tuples(st.just("int"), names),
    st.tuples(st.just("select"), names, st.lists(words, min_size=1, max_size=2), st.booleans()),
    st.tuples(st.just("read"), names, st.booleans()),
    st.tuples(st.just("sibling"), st.booleans()),
    st.tuples(st.just("set"), names, st.sampled_from(["constant", "argument", "variable", "text"])),
)


def _nested(scripts: st.SearchStrategy[Script]) -> st.SearchStrategy[tuple[Any, ...]]:
    modes = st.sampled_from(["gather_variable", "concate_and_append", None])
    return st.one_of(
        st.tuples(st.just("role"), st.sampled_from(ROLES), scripts),
        st.tuples(st.just("scope"), names, scripts),
        st.tuples(st.just("fork"), st.lists(scripts, min_size=1, max_size=3), modes),
        st.tuples(st.just("all"), st.integers(1, 3), scripts),
        st.tuples(st.just("copy"), scripts),
        st.tuples(st.just("inline"), scripts),
        st.tuples(st.just("beside"), scripts),
    )


def _scripts(depth: int) -> st.SearchStrategy[Script]:
    ops = flat if depth == 0 else st.one_of(flat, flat, _nested(_scripts(depth - 1)))
    return st.lists(ops, max_size=5)


scripts = _scripts(3)


def program(script: Script) -> Function:
    def body(s: ProgramState, word: str, count: int, items: dict[str, list[str]]) -> Any:
        arguments = {"word": word, "count": count, "items": items, "depth": 0, "loose": [], "siblings": []}
        act(s, script, arguments, turn=False)
        known = {name: s[name] for name in NAMES if name in s}
        return {**known, "word": word, "second": (items["list"][1],), "states": arguments["loose"]}

    return function(body)


def act(s: ProgramState, script: Script, arguments: dict[str, Any], *, turn: bool) -> None:
    """Run a script on a state. turn: a turn is open."""
    for op, *rest in script:
        if op in _FLAT:
            _FLAT[op](s, arguments, *rest)
        else:
            _act_nested(s, op, rest, arguments, turn)


def _argument(s: ProgramState, arguments: dict[str, Any], kind: str) -> None:
    match kind:
        case "first":
            s += arguments["items"]["list"][0]
        case "sum":
            s += "<" + arguments["word"] + "|" + arguments["items"]["list"][1] + ">" + gen("a", max_tokens=3)
        case _:
            s += arguments[kind]


def _read(s: ProgramState, _: dict[str, Any], name: str, joined: bool) -> None:
    value = _value(s, name)
    if value is not None and not joined:
        s += value
    elif value is not None and name == "a":
        s += "[" + value + "]"


def _value(s: ProgramState, name: str) -> Any:
    """Return a variable's value, the first of nested lists. `a` is never a number."""
    if name not in s:
        return None
    value = s[name]
    while isinstance(value, list):
        value = value[0] if value else None
    return value


def _set(s: ProgramState, arguments: dict[str, Any], name: str, kind: str) -> None:
    match kind:
        case "constant":
            s.set_var(name, "constant")
        case "argument":
            s.set_var(name, arguments["items"]["list"][0])
        case "variable" if "a" in s:
            s.set_var(name, _value(s, "a"))
        case "text" if "a" in s:
            s[name] = arguments["word"] + "-" + _value(s, "a")
        case _:
            pass


def _sibling(s: ProgramState, arguments: dict[str, Any], kept: bool) -> None:
    """Read a variable of an earlier branch of the same fork, and keep or append it."""
    for sibling in arguments["siblings"][:1]:
        value = _value(sibling, "a")
        if value is not None and kept:
            s.set_var("c", value)
        elif value is not None:
            s += "sibling: " + value


def _select(s: ProgramState, arguments: dict[str, Any], name: str, choices: list[str], more: bool) -> None:
    known = [arguments["word"], "+" + arguments["word"]] if more else []
    s += select(name, [*choices, *known])


def _int(s: ProgramState, _: dict[str, Any], name: str) -> None:
    if name != "a":
        s += gen_int(name)


_FLAT: dict[str, Callable[..., None]] = {
    "text": lambda s, _, text: s.__iadd__(text),
    "argument": _argument,
    "gen": lambda s, _, name, n: s.__iadd__("Q" + gen(name, max_tokens=5, n=n) + "!"),
    "int": _int,
    "select": _select,
    "read": _read,
    "set": _set,
    "sibling": _sibling,
}


def _act_nested(s: ProgramState, op: str, rest: list[Any], arguments: dict[str, Any], turn: bool) -> None:
    match op, *rest:
        case "role", role, inner:
            if turn:
                act(s, inner, arguments, turn=True)
            else:
                with getattr(s, role)():
                    act(s, inner, arguments, turn=True)
        case "scope", name, inner:
            depth = arguments["depth"] + 1
            with s.var_scope(f"scope {name} {depth}"):
                act(s, inner, {**arguments, "depth": depth}, turn=turn)
        case "fork", branches, mode:
            group = s.fork(len(branches))
            for index, (branch, inner) in enumerate(zip(group, branches, strict=True)):
                act(branch, inner, {**arguments, "siblings": list(group)[:index]}, turn=turn)
            if mode is not None:
                group.join(mode)
            else:
                arguments["loose"] += group
        case "all", count, inner:
            group = s.fork(count)
            group += lambda index: f"branch {index % 2} of "
            group += arguments["word"]
            for branch in group:
                act(branch, inner, arguments, turn=turn)
            group.join()
        case "copy", inner:
            with s.copy() as copied:
                act(copied, inner, arguments, turn=turn)
        case "inline", inner:
            other = function(lambda s, word: act(s, inner, {**arguments, "word": word}, turn=turn))
            other(s, word=arguments["word"])
        case "beside", inner:
            s += _beside(inner, arguments)(word=arguments["word"] + "!", temperature=0.5)["end"]


def _beside(script: Script, arguments: dict[str, Any]) -> Function:
    @function
    def other(s: ProgramState, word: str) -> None:
        act(s, script, {**arguments, "word": word}, turn=False)
        s += gen("end", max_tokens=4)

    return other


ALIKE = [{"parallel": False}, {"hints": False}]


def observed(state: ProgramState):
    """Return everything observable of a state and of the states that it returns."""
    returned = dict(state.ret_value) if isinstance(state.ret_value, dict) else {}
    loose = [observed(one) for one in returned.pop("states", [])]
    names = list(state._stream.variables)
    metas = {name: state.get_meta_info(name) for name in names}
    return state.text(), state.messages(), list(state.variables.items()), metas, returned, loose


def outcome(one, **options):
    backend = FakeBackend()
    try:
        state = one.run(**ARGUMENTS, backend=backend, temperature=0.25, **options)
        return observed(state), sorted(
            (one.kind, one.text, repr(one.sampling), one.choices) for one in backend.requests if one.kind != "warm"
        )
    except ProgramError as error:
        return type(error), error.reason, error.where


@given(scripts)
@settings(max_examples=40)
@example(
    [("fork", [[("gen", "a", 2)], [("int", "b")], []], "gather_variable"), ("read", "a", True), ("read", "b", False)]
)
@example([("role", "user", [("all", 3, [("select", "c", ["x"], True)]), ("read", "c", False)]), ("beside", [])])
@example([("scope", "a", [("fork", [[("gen", "a", None)]] * 2, "concate_and_append")]), ("set", "b", "text")])
def test_interpreted_and_compiled(script):
    """Every program that these scripts make can be traced, so each is compared."""
    original = program(script)
    expected = outcome(original)
    assert not isinstance(expected[0], type), expected
    for passes in ((), DEFAULT_PASSES):
        assert outcome(original.compile(passes=passes, strict=True)) == expected


@given(scripts)
@settings(max_examples=15)
def test_options_of_a_run_do_not_change_its_result(script):
    original = program(script)
    compiled = original.compile(strict=True)
    expected = outcome(original)
    for options in ALIKE:
        assert outcome(compiled, **options) == expected


def test_a_constant_argument_is_the_same_as_a_given_one():
    script = [("argument", "sum"), ("gen", "a", None), ("set", "b", "text")]
    compiled = program(script).compile(strict=True, word=ARGUMENTS["word"])
    rest = {name: value for name, value in ARGUMENTS.items() if name != "word"}
    backend = FakeBackend()
    assert compiled.run(**rest, backend=backend, temperature=0.25).text() == outcome(program(script))[0][0]
    with pytest.raises(TypeError, match="word"):
        compiled.run(**ARGUMENTS, backend=backend)
