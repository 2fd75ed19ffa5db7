"""Compiled programs run like others, with their own errors and lines; those that cannot be compiled are interpreted."""

from __future__ import annotations

import enum
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.lang_backend import PATIENCE_S, FakeBackend
from treeline_lang import (
    Compiled,
    ProgramError,
    Refused,
    TraceError,
    WrongArgument,
    assistant,
    function,
    gen,
    gen_int,
    select,
    separate_reasoning,
    user,
)


@function
def qa(s, question, note=""):
    """Ask one question."""
    s += user("Q: " + question)
    s += note
    s += assistant(gen("answer", max_tokens=6))
    return s["answer"]


@function
def loops(s, words):
    for word in words:
        s += word
    s += gen("x")


def test_a_compiled_program_is_run_like_any_other():
    backend = FakeBackend()
    compiled = qa.compile()
    assert isinstance(compiled, Compiled)
    assert compiled.fallback is None
    assert (compiled.__name__, compiled.__doc__) == ("qa", "Ask one question.")
    assert repr(compiled) == "<program qa(question, note='')>"
    expected = qa.run("why?", backend=backend)
    for state in (compiled.run("why?", backend=backend), compiled.bind(question="why?").run(backend=backend)):
        assert (state.text(), state.ret_value) == (expected.text(), expected.ret_value)
    states = compiled.run_batch([("a",), {"question": "b", "note": 5}], backend=backend)
    assert [state["answer"] for state in states] == [qa.run("a", backend=backend)["answer"], states[1].ret_value]
    assert "\n5ASSISTANT" in states[1].text()
    with pytest.raises(TypeError, match="missing a required argument: 'question'"):
        compiled.run(backend=backend)


Word = enum.Enum("Word", {"RED": "red"}, type=str)


class Odd(str):
    def __radd__(self, other):
        return 7

    def __str__(self):
        return "odd"


@pytest.mark.parametrize(("word", "text"), [(Word.RED, "red"), (Odd("it"), "it")])
def test_a_text_of_a_str_subclass_is_its_characters(word, text):
    @function
    def says(s, word):
        s += gen("x", max_tokens=1) + word + "!"
        s += word
        s += select("y", [word])

    expected = text + "!" + text + text
    for program in (says, says.compile(strict=True)):
        said = program.run(word=word, backend=FakeBackend()).text()
        assert said.endswith(expected)
        assert type(said) is str


def test_the_function_is_not_run_again():
    runs = []

    @function
    def counted(s, word):
        runs.append(word)
        s += word + gen("x")

    compiled = counted.compile()
    compiled.run_batch([{"word": "a"}, {"word": "b"}, {"word": "c"}], backend=FakeBackend())
    assert len(runs) == 1


def test_a_compiled_program_streams():
    state = qa.compile().run(question="why?", backend=FakeBackend(), stream=True)
    assert "".join(state.text_iter("answer")) == state["answer"]
    assert "".join(state.text_iter()) == state.text()


def test_a_program_that_cannot_be_compiled_is_interpreted_and_says_why():
    compiled = loops.compile()
    assert compiled.graph is None
    assert "test_compiled.py" in compiled.fallback
    assert "argument words is iterated over" in compiled.fallback
    assert compiled.run(words=["a", "b"], backend=FakeBackend()).text().startswith("ab")
    with pytest.raises(TraceError, match="iterated over"):
        loops.compile(strict=True)
    strict = loops.compile(strict=True, words=["a", "b"])
    assert strict.run(backend=FakeBackend(lambda *_: "!")).text() == "ab!"
    assert compiled.bind(words=["c"]).fallback == compiled.fallback


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"question": 5}, "'question' is added to a text, and it is 5"),
        ({"question": None}, "'question' is added to a text, and it is None"),
        ({"question": "a", "note": None}, "'note' is appended, and it is None"),
        ({"question": "a", "note": ["b"]}, r"'note' is appended, and it is \['b'\]"),
    ],
)
def test_arguments_that_are_no_texts_are_refused_with_the_line(arguments, reason):
    with pytest.raises(WrongArgument, match=reason) as refused:
        qa.compile().run(**arguments, backend=FakeBackend())
    assert refused.value.where.function == "qa"
    with pytest.raises(TypeError):
        qa.run(**arguments, backend=FakeBackend())


def test_a_missing_part_of_an_argument_is_named_in_the_error():
    compiled = function(lambda s, shots: s.__iadd__(shots["few"][1])).compile()
    with pytest.raises(WrongArgument, match=r"shots\['few'\]\[1\]: IndexError"):
        compiled.run(shots={"few": ["one"]}, backend=FakeBackend())


def test_an_argument_may_be_an_expression():
    @function
    def asks(s, ask):
        s += "Q" + ask
        return s.variables

    backend = FakeBackend()
    compiled = function(lambda s, ask: s.__iadd__("Q" + ask)).compile(strict=True)
    assert compiled.run(ask=gen("x"), backend=backend)["x"] == asks.run(ask=gen("x"), backend=backend)["x"]


def test_a_number_is_not_added_to_a_text_when_compiled_either():
    @function
    def adds(s):
        s += gen_int("n")
        s += s["n"]
        s += "n: " + s["n"]

    state = adds.compile().run
    with pytest.raises(ProgramError, match="'n': it is added to a text, and it is"):
        state(backend=FakeBackend()).text()
    with pytest.raises(TypeError):
        adds.run(backend=FakeBackend())


def failing():
    """Return a backend that refuses prompts with `bad` in them."""
    backend = FakeBackend()
    backend.fails = lambda request: Refused("no such thing") if "bad" in request.text else None
    return backend


@function
def forks(s, words):
    branches = s.fork(2)
    branches[0] += words[0] + gen("x")
    branches[1] += words[1] + gen("x")
    branches.join()
    s += "then" + gen("y")


@pytest.mark.parametrize("program", [forks, forks.compile(), forks.compile(passes=())])
def test_an_error_is_that_of_its_line_and_its_branch_alone(program):
    state = program.run(words=["good", "bad"], backend=failing())
    with pytest.raises(Refused, match="no such thing") as refused:
        state.get_var("y")
    assert (refused.value.where.function, refused.value.step) == ("forks", "gen('x')")
    assert refused.value.where.line == state.error().where.line


def test_an_error_that_the_body_would_read_is_raised_by_run():
    with pytest.raises(Refused):
        qa.compile().run(question="bad", backend=failing())


def test_a_program_may_call_a_compiled_one():
    backend = FakeBackend()
    compiled = qa.compile()

    @function
    def outer(s, word):
        qa_here = compiled(s, question=word).ret_value
        beside = compiled(question=qa_here)
        s += " beside: " + beside["answer"]

    expected = outer.run(word="w", backend=backend).text()
    assert outer.compile(strict=True).run(word="w", backend=backend).text() == expected
    assert expected.startswith("USER: Q: w")


def test_steps_of_other_streams_do_not_wait():
    """The second branch's call is in flight while the first one's is."""

    backend = FakeBackend()
    with backend.holding("generate"), ThreadPoolExecutor(1) as pool:
        running = pool.submit(forks.compile(passes=()).run, words=["a", "b"], backend=backend)
        backend.wait_running(2)
        backend.holds = lambda _: False
        backend.release()
        assert running.result(PATIENCE_S)["y"].strip()


def test_reasoning_is_separated_as_interpreted():
    @function
    def thinks(s, word):
        s += separate_reasoning("Q" + word + gen("x"), "qwen3")
        return [s["x"], s["x_reasoning_content"]]

    backend = FakeBackend(lambda *_: "<think>hm</think>yes")
    assert thinks.compile(strict=True).run(word="w", backend=backend).ret_value == ["yes", "hm"]
