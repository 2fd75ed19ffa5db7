"""Code movement: its effect on a graph, its report, and its effect on a run."""

from __future__ import annotations

import pytest
from support.lang_backend import FakeBackend
from treeline_lang import function, gen, user
from treeline_lang.compiler.passes import move_constants
from treeline_lang.expressions import Text


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
    backend = FakeBackend(lambda prompt, *_: prompt.text[::-1])
    plain = "Start. Question: Q\nAct as an expert.\nMood: M\nBe short.\n"
    moved = "Start. Act as an expert.\nBe short.\nQuestion: Q\nMood: M\n"
    arguments = {"question": "Q", "mood": "M", "backend": backend}
    assert expert.run(**arguments).text() == plain + plain[::-1]
    assert expert.compile(passes=[move_constants]).run(**arguments).text() == moved + moved[::-1]
    assert expert.compile(passes=()).run(**arguments).text() == plain + plain[::-1]


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


def test_only_texts_of_the_region_move_and_none_is_lost():
    graph = expert.trace()
    moved, _ = move_constants(graph)
    assert graph == expert.trace(), "the graph that it is given is as it was"
    before, after = graph.of(0), moved.of(0)
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
    assert [step.parts[0] for step in moved.of(0)[3:6]] == [Text("constant"), Text("word: "), Text("x: ")]


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


def test_programs_without_regions_are_unchanged():
    graph = function(lambda s, word: s.__iadd__(word + "x")).trace()
    assert move_constants(graph) == (graph, move_constants(graph)[1])
    assert str(move_constants(graph)[1]) == "code movement:\n  nothing to do"
