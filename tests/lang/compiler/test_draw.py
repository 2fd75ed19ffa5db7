"""Pictures of programs: well formed, with everything in them, nothing over anything else."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

from hypothesis import given, settings
from support.lang_scripts import program, scripts
from treeline_lang import assistant, function, gen, gen_int, select, user
from treeline_lang.compiler.draw import outline, shorten

SVG = "{http://www.w3.org/2000/svg}"


@function
def thought(s, question, shots):
    s += user("Question: " + question + "\nExamples & <hints>: " + shots["few"][0] + "x" * 500)
    plans = s.fork(2)
    for number, plan in enumerate(plans):
        plan += f"Plan {number}: " + gen("plan", max_tokens=64)
        steps = plan.fork(2)
        steps += "Step: " + gen("step", max_tokens=32)
        steps.join("concate_and_append")
        plan += "Score: " + gen_int("score")
    plans.join()
    s += assistant("Best of " + s["plan"][0] + ": " + select("best", ["first", "second"]))
    with s.copy() as copied:
        copied += "Check: " + gen("check", n=2)
    s.set_var("kept", s["plan"])
    return {"best": s["best"]}


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    root = ET.fromstring(svg)
    return [
        tuple(float(one.get(name)) for name in ("x", "y", "width", "height"))
        for one in root.iter(f"{SVG}rect")
        if one.get("class")
    ]


def overlap(one, other) -> bool:
    return all(one[i] < other[i] + other[i + 2] and other[i] < one[i] + one[i + 2] for i in (0, 1))


def test_a_picture_has_every_step_and_line_and_is_escaped():
    svg = thought.compile(strict=True).graph.draw()
    shown = "".join(ET.fromstring(svg).itertext())
    for text in (
        "thought(question, shots)",
        "stream 7",
        "{shots['few'][0]}",
        "gen plan, 64 tokens",
        "fork 2",
        "score, int",
    ):
        assert text in shown
    assert "Examples & <hints>" in shown
    assert "returns {'best': best}" in svg
    assert len(re.findall('class="fork"', svg)) == 7
    assert len(re.findall('class="join"', svg)) == 7
    assert len(re.findall('class="reads"', svg)) == 3
    assert max(len(text) for text in re.findall(r'<text class="line"[^>]*>([^<]*)<', svg)) < 80


def test_a_name_does_not_look_like_another_line():
    graph = function(lambda s: s.__iadd__(gen("a\nstream 9, begins by itself\x1b[2J"))).trace()
    assert "gen a\ufffdstream 9, begins by itself\ufffd[2J" in outline(graph)
    assert len(outline(graph).splitlines()) == 6


def test_a_notebook_shows_the_picture():
    graph = thought.trace()
    assert graph._repr_svg_() == graph.draw()
    assert ET.fromstring(graph.draw()).tag == f"{SVG}svg"


@given(scripts)
@settings(max_examples=30)
def test_no_box_is_over_another_and_all_are_in_the_picture(script):
    svg = program(script).trace().draw()
    drawn = boxes(svg)
    assert not [pair for pair in itertools.combinations(drawn, 2) if overlap(*pair)]
    root = ET.fromstring(svg)
    for x, y, width, height in drawn:
        assert x >= 0
        assert x + width <= float(root.get("width"))
        assert y >= 0
        assert y + height <= float(root.get("height"))


def test_the_branches_of_a_stream_are_drawn_beside_it_before_its_siblings():
    svg = thought.trace().draw()
    left = {stream: int(x) for x, stream in re.findall(r'<text class="small" x="(\d+)" y="\d+">stream (\d)<', svg)}
    assert left["0"] < left["1"] < left["3"] < left["4"] < left["2"] < left["5"] < left["6"] < left["7"]


def test_characters_that_no_picture_can_hold_are_replaced():
    svg = function(lambda s: s.__iadd__("\x00\ud800</text><script>")).trace().draw()
    ET.fromstring(svg)
    assert "<script>" not in svg


def test_a_step_with_many_parts_says_how_many_more_there_are():
    @function
    def long(s, words):
        piece = words[0] + "."
        for _ in range(20):
            piece = piece + words[1] + ";"
        s += piece

    assert "… and 31 more" in long.trace().draw()


def test_the_outline_tells_lines_streams_and_what_is_returned():
    told = outline(thought.trace())
    assert told.startswith("thought(question, shots)\n\nstream 0\n")
    assert "stream 3, forked from stream 1" in told
    assert told.endswith("returns {'best': best}")
    line = thought.body.__code__.co_firstlineno + 2
    assert f"{line:>5}  user:" in told


def test_shorten_keeps_both_ends():
    assert shorten("short", 10) == "short"
    assert shorten("a long text that ends", 10) == "a long…nds"
