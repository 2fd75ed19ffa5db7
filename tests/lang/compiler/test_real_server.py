"""Compiled programs against a real server: the same words as interpreted."""

from __future__ import annotations

import pytest
from treeline_lang import (
    assistant,
    function,
    gen,
    gen_int,
    select,
    system,
    user,
)
from treeline_lang.compiler.passes import DEFAULT_PASSES


@function
def judge(s, essay, rules=("Be brief.",)):
    s += system("You judge essays. " + rules[0])
    s += user("Essay: " + essay)
    forks = s.fork(3)
    for fork, aspect in zip(forks, ("style", "facts", "length"), strict=True):
        fork += assistant("On " + aspect + ": " + gen("verdict", max_tokens=8))
    forks.join()
    with s.user():
        s += "All: " + s["verdict"][0] + "|" + s["verdict"][2]
    with s.assistant(), s.var_scope("all"):
        s += select("grade", ["good", "bad", essay]) + gen_int("points", max_tokens=4)
    return {"grade": s["grade"], "verdicts": s["verdict"]}


@function
def chain(s, word):
    s += "The " + word
    branches = s.fork(2)
    branches += lambda index: (" is", " was")[index] + gen("x", max_tokens=5)
    inner = branches[1].fork(2)
    inner += gen("deep", max_tokens=3)
    inner.join("concate_and_append")
    branches.join("concate_and_append")
    with s.copy() as copied:
        copied += gen("end", max_tokens=3, n=2)
    return s["end"][0][1]


def told(state):
    return state.text(), state.messages(), list(state.variables.items()), state.ret_value


@pytest.mark.parametrize(("program", "argument"), [(judge, {"essay": "Cats sleep."}), (chain, {"word": "sun"})])
def test_the_same_words_interpreted_and_compiled(backend, program, argument):
    expected = told(program.run(**argument, backend=backend, temperature=0))
    for passes in ((), DEFAULT_PASSES):
        compiled = program.compile(strict=True, passes=passes)
        assert told(compiled.run(**argument, backend=backend, temperature=0)) == expected
