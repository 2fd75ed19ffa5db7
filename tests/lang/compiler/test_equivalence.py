"""A program does the same interpreted, and compiled with and without each pass."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from support.lang_backend import FakeBackend
from support.lang_scripts import ARGUMENTS, program, scripts
from treeline_lang import ProgramError, ProgramState
from treeline_lang.compiler.passes import DEFAULT_PASSES

ALIKE = [{"parallel": False}, {"hints": False}]


def observed(state: ProgramState):
    """All that a state shows, and the states that it returns."""
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
def test_the_options_of_a_run_change_nothing(script):
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
