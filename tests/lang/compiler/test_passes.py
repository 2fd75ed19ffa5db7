"""What each pass does to a graph, says of it, and makes of a run."""

from __future__ import annotations

import asyncio

import pytest
from support.echo_backend import EchoBackend, echo
from treeline_lang import assistant, background, function, gen, select, user
from treeline_lang.compiler.nodes import Argument, Fork, Hole
from treeline_lang.compiler.passes import DEFAULT_PASSES, hint_forks, move_constants
from treeline_lang.expressions import RoleBegin, Text


def forks_of(graph):
    return [step for stream in graph.streams for step in stream.steps if isinstance(step, Fork)]


# ---- code movement --------------------------------------------------------------------------------------------------


@function
def expert(s, question, mood):
    s += "Start. "
    with s.any_order():
        s += "Question: " + question + "\n"
        s += "Act as an expert.\n"
        s += "Mood: " + mood + "\n"
        s += "Be short.\n"
    s += gen("answer", max_tokens=6)


def test_constants_come_first_where_the_order_is_free():
    backend = EchoBackend()
    plain = "Start. Question: Q\nAct as an expert.\nMood: M\nBe short.\n"
    moved = "Start. Act as an expert.\nBe short.\nQuestion: Q\nMood: M\n"
    arguments = {"question": "Q", "mood": "M", "backend": backend}
    assert expert.run(**arguments).text() == plain + echo(plain)
    assert expert.compile(passes=[move_constants]).run(**arguments).text() == moved + echo(moved)
    assert expert.compile(passes=()).run(**arguments).text() == plain + echo(plain)


def test_the_report_is_a_diff_of_the_prompt():
    _, report = move_constants(expert.trace())
    where, *diff = report.lines
    assert where.startswith("test_passes.py:")
    assert diff == [
        "--- before",
        "+++ after",
        "@@ -1,4 +1,4 @@",
        "+Act as an expert.",
        "+Be short.",
        " Question: {question}",
        "-Act as an expert.",
        " Mood: {mood}",
        "-Be short.",
    ]


def test_nothing_outside_of_the_region_moves_and_nothing_is_lost():
    graph = expert.trace()
    moved, _ = move_constants(graph)
    before, after = graph.streams[0].steps, moved.streams[0].steps
    assert (after[:2], after[-2:]) == (before[:2], before[-2:])
    assert sorted(map(repr, after)) == sorted(map(repr, before))
    assert move_constants(moved)[0] == moved


def test_variables_come_last():
    @function
    def reads(s, word):
        s += gen("x")
        with s.user(), s.any_order():
            s += "x: " + s["x"]
            s += "word: " + word
            s += "constant"

    moved, _ = move_constants(reads.trace())
    assert [step.parts[0] for step in moved.streams[0].steps[3:6]] == [Text("constant"), Text("word: "), Text("x: ")]


@pytest.mark.parametrize(
    ("act", "obstacle"),
    [
        (lambda s: s.__iadd__(gen("x")), "<gen>"),
        (lambda s: s.__iadd__(user("x")), "<user>"),
        (lambda s: s.set_var("x", 1), "a setvar"),
        (lambda s: s.fork(2), "a fork"),
    ],
)
def test_a_region_with_more_than_texts_is_left_alone(act, obstacle):
    @function
    def mixed(s, word):
        with s.any_order():
            s += word
            act(s)
            s += "constant"

    graph = mixed.trace()
    moved, report = move_constants(graph)
    assert moved == graph
    assert report.lines[0].endswith(f"left alone, as it holds {obstacle}")


def test_programs_without_regions_are_as_they_were():
    graph = function(lambda s, word: s.__iadd__(word + "x")).trace()
    assert move_constants(graph) == (graph, move_constants(graph)[1])
    assert str(move_constants(graph)[1]) == "code movement:\n  nothing to do"


# ---- fork hints -----------------------------------------------------------------------------------------------------


@function
def judge(s, essay):
    s += user("Essay: " + essay)
    forks = s.fork(3)
    for fork, aspect in zip(forks, ["clarity", "clarification", "cleverness"], strict=True):
        fork += user("Judge by " + aspect)
        fork += assistant(gen("verdict", max_tokens=6))
    forks.join()
    s += "Together: " + s["verdict"][0] + gen("score", max_tokens=3)


def test_what_all_branches_begin_with_joins_the_hint():
    graph, report = hint_forks(judge.trace())
    (fork,) = forks_of(graph)
    assert fork.hint == (RoleBegin("user"), Text("Judge by cl"))
    assert fork.ahead
    (line,) = report.lines
    assert line.endswith("in judge: 3 branches do not wait for their hint, with '<user>Judge by cl'")
    assert line.startswith(f"test_passes.py:{fork.where.line} ")


def test_arguments_join_the_hint_as_far_as_all_have_them():
    @function
    def asks(s, word):
        branches = s.fork(2)
        branches += "Word: " + word
        branches += lambda index: f", {index}"
        branches += gen("x")

    graph, _ = hint_forks(asks.trace())
    assert forks_of(graph)[0].hint == (Text("Word: "), Hole(Argument("word"), text=True), Text(", "))
    backend = EchoBackend()
    asks.compile(passes=[hint_forks]).run(word="w", backend=backend).sync()
    assert backend.warmed == ["Word: w, "]


def test_branches_wait_for_the_hint_with_their_first_call_and_not_before():
    class Slow(EchoBackend):
        def __init__(self):
            super().__init__()
            self.cached = asyncio.Event()
            self.reached = asyncio.Event()

        async def warm(self, prompt, call, children=1):
            self.reached.set()
            await self.cached.wait()
            await super().warm(prompt, call, children)

        async def release(self):
            await self.reached.wait()
            self.cached.set()

    @function
    def waits(s):
        s += "shared "
        branches = s.fork(2)
        branches += "constant "
        branches += lambda index: gen(f"x{index}", max_tokens=4)
        return branches[0]

    backend = Slow()
    state = waits.compile(strict=True, passes=[hint_forks]).run(backend=backend)
    pieces = state.ret_value.text_iter()
    seen = next(pieces)
    while seen != "shared constant ":
        seen += next(pieces)
    assert backend.asked == []
    background.call(backend.release())
    assert state.ret_value["x0"] == echo("shared constant ", 0, 4)
    assert backend.events[0] == ("warm", "shared constant ")


def test_no_hint_is_sent_where_hints_are_off():
    backend = EchoBackend()
    judge.compile().run(essay="E", backend=backend, hints=False).sync()
    assert backend.warmed == []


# ---- all of them ----------------------------------------------------------------------------------------------------


@function
def mixed(s, word):
    branches = s.fork(5)
    branches[0] += "a" + gen("x", max_tokens=3)
    branches[1] += "b" + select("x", ["yes", "no"])
    branches[2] += "c" + gen("x", n=2)
    branches[3] += "no call"
    branches[4] += word + "e" + gen("x", max_tokens=3) + gen("y", max_tokens=3)
    branches.join()
    s += "end" + gen("z", max_tokens=3)


def test_passes_leave_the_graph_that_they_are_given():
    graph = mixed.trace()
    again = mixed.trace()
    for one in DEFAULT_PASSES:
        one(graph)
    assert graph == again
