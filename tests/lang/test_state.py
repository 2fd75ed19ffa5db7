"""The parts of a state: turns, variables, scopes, branches and their joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.lang_backend import FakeBackend
from treeline_lang import (
    ProgramError,
    RoleError,
    Unsupported,
    WrongType,
    assistant,
    function,
    gen,
    image,
    select,
    separate_reasoning,
    system,
    user,
    user_begin,
    user_end,
    video,
)
from treeline_lang.templates import TEMPLATES

COUNTS = FakeBackend(lambda prompt, *_: f"<{len(prompt.text)}>")
"""Answers with the prompt's length."""


def run(body: Callable[..., Any], backend: FakeBackend = COUNTS, **options: Any) -> Any:
    return function(body).run(backend=backend, **options)


def test_turns_are_texts_and_messages() -> None:
    def chat(s: Any) -> None:
        s += system("S") + user("U")
        with s.assistant():
            s += "It is " + gen("a")
        s += user_begin() + "V" + user_end()
        s.assistant(gen("b"))

    state = run(chat, FakeBackend(lambda *_: "fine", template=TEMPLATES["chatml"]))
    assert state.messages() == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "It is fine"},
        {"role": "user", "content": "V"},
        {"role": "assistant", "content": "fine"},
    ]
    assert state.text() == "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in state.messages()
    )


def test_only_a_gen_within_a_turn_stops_at_the_templates_end_of_turn() -> None:
    def both(s: Any) -> None:
        s += "x" + gen("free", stop="END")
        s += assistant(gen("turn", stop="END"))

    backend = FakeBackend(template=TEMPLATES["chatml"])
    run(both, backend).sync()
    assert [request.sampling.stop for request in backend.requests] == [("END",), ("END", "<|im_end|>")]


@pytest.mark.parametrize(
    "body",
    [
        lambda s: s.user(assistant("x")),
        lambda s: s.__iadd__(user_end()),
        lambda s: s.__iadd__(user_begin() + user("x")),
    ],
)
def test_turns_that_are_nested_are_an_error(body: Callable[[Any], Any]) -> None:
    def wrong(s: Any) -> None:
        body(s)

    assert isinstance(run(wrong).error(), RoleError)


def test_errors_name_the_programs_line_through_any_call() -> None:
    def wrong(s: Any) -> None:
        with s.user():
            s += "x"
            with s.user():
                pass

    line = wrong.__code__.co_firstlineno + 3
    assert str(run(wrong).error()).startswith(f"test_state.py:{line} in wrong: user(): a turn of the user begins")

    def copies(s: Any) -> None:
        with s.copy() as branch:
            branch += gen("a", dtype=int)

    failing = FakeBackend(lambda *_: "no number")
    error = run(copies, failing).error()
    assert isinstance(error, WrongType)
    assert error.where is not None
    assert (error.where.line, error.step) == (copies.__code__.co_firstlineno + 2, "gen('a')")


def test_variables_are_set_at_their_place_and_the_last_one_counts() -> None:
    def sets(s: Any) -> None:
        s.set_var("x", [1])
        assert s["x"] == [1]
        s["x"] = 2
        s += "n" + gen("y") + gen("y")
        assert s.get_var("y") == "<4>"

    state = run(sets)
    assert state.variables == {"x": 2, "y": "<4>"}
    assert state.get_meta_info("x") == {}


def test_a_scope_is_the_text_appended_within_and_scopes_nest() -> None:
    def scoped(s: Any) -> None:
        s += "a"
        with s.var_scope("outer"):
            s += "b"
            with s.var_scope("inner"):
                s += "c" + gen("g")
        s += "d"

    state = run(scoped)
    assert (state["outer"], state["inner"], state.text()) == ("bc<3>", "c<3>", "abc<3>d")


def test_values_keep_their_type_and_n_makes_lists() -> None:
    def typed(s: Any) -> None:
        s += "x" + gen("whole", dtype=int) + gen("truth", dtype=bool) + gen("word", dtype=str)
        s += gen("several", n=3, dtype=float)

    state = run(typed, FakeBackend())
    assert [type(state[name]) for name in ("whole", "truth", "word")] == [int, bool, str]
    assert [type(value) for value in state["several"]] == [float] * 3
    assert state.text().endswith(str(state["several"][0]))
    assert len(state.get_meta_info("several")) == 3


def test_an_option_that_is_an_expression_may_have_no_gen_in_it() -> None:
    def chooses(s: Any) -> None:
        s += "x" + select("a", ["y", "z" + gen("w")])

    with pytest.raises(ProgramError, match="a choice is a text, and Gen has none"):
        run(chooses)["a"]


def test_reasoning_is_taken_out_of_the_text_and_kept() -> None:
    def thinks(s: Any) -> None:
        s += user("q")
        s += assistant(separate_reasoning("So: " + gen("a"), "qwen3"))
        s += user("again") + assistant(separate_reasoning(gen("b", n=2), "qwen3"))

    backend = FakeBackend(lambda _p, _s, number: f"<think>\nhm {number}\n</think>\n\nyes {number}")
    for streaming in (False, True):
        state = run(thinks, backend, stream=streaming)
        assert (state["a"], state["a_reasoning_content"]) == ("yes 0", "hm 0")
        assert state["b"] == ["yes 0", "yes 1"]
        assert state["b_reasoning_content"] == ["hm 0", "hm 1"]
        assert "think" not in state.text()
        assert state.messages()[1]["content"] == "So: yes 0"


def test_a_backend_that_reads_text_alone_says_so(tmp_path: Any) -> None:
    for wrong in (image("a.png"), image(b"")):

        def shows(s: Any, wrong: Any = wrong) -> None:
            s += user(wrong + "?")

        assert isinstance(run(shows).error(), Unsupported)
    seeing = FakeBackend()
    seeing.reads_images = True
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n")

    def looks(s: Any, source: Any) -> None:
        s += user(image(source) + "?") + assistant(gen("a"))

    for source in (str(picture), picture.read_bytes(), "https://example.com/a.png"):
        state = run(looks, seeing, source=source)
        assert state.messages()[0]["content"][1] == {"type": "text", "text": "?"}
        assert state.messages()[0]["content"][0]["image_url"]["url"].startswith(("data:image/png;base64,iV", "https:"))
    seeing.reads_videos = True

    def watches(s: Any, source: Any) -> None:
        s += user(video(source) + "?") + assistant(gen("a"))

    for film, start in (
        (bytes(4) + b"ftypmp42", "data:video/mp4;base64,AAAA"),
        (b"\x1aE\xdf\xa3", "data:video/webm;base64,Gk"),
        ("https://e.org/a.mp4", "https:"),
    ):
        content: Any = run(watches, seeing, source=film).messages()[0]["content"]
        assert content[0]["video_url"]["url"].startswith(start)
    with pytest.raises(ProgramError, match=r"no video: .* MP4"):
        run(watches, seeing, source=b"no film").text()
    for lost in (str(tmp_path / "none.png"), b"no picture"):
        with pytest.raises(ProgramError, match="no image: "):
            run(looks, seeing, source=lost).text()


# ---- branches ---------------------------------------------------------------------------------------------------


def test_branches_begin_with_text_variables_and_open_turn() -> None:
    def forks(s: Any) -> None:
        s += system("S")
        s.set_var("v", 1)
        with s.user():
            s += "before"
            group = s.fork(2)
            group += ["one", "two"]
            assert [child["v"] for child in group] == [1, 1]
            group[0].set_var("v", 2)
            assert (group[0]["v"], group[1]["v"], s["v"]) == (2, 1, 1)
            for child in group:
                child += user_end()
            assert [child.messages()[-1]["content"] for child in group] == ["beforeone", "beforetwo"]

    state = run(forks)
    assert state.error() is None
    assert state.messages()[-1]["content"] == "before"


def test_a_join_gathers_variables_in_the_order_of_the_branches() -> None:
    def joins(s: Any) -> None:
        s.set_var("old", 0)
        group = s.fork(3)
        group += lambda i: "x" * i + gen("length")
        group[1].set_var("only", "one")
        group[2]["old"] = 5
        group.join()

    state = run(joins)
    assert state.variables == {"old": [5], "length": ["<0>", "<1>", "<2>"], "only": ["one"]}
    assert state.text() == ""
    assert len(state.get_meta_info("length")) == 3


def test_a_join_that_concatenates_appends_texts_and_turns() -> None:
    def joins(s: Any) -> None:
        s += user("q")
        group = s.fork(2)
        for number, child in enumerate(group):
            child += assistant(f"answer {number}") + user(f"and {number}")
        group.join("concate_and_append")
        s += assistant(gen("end"))

    backend = FakeBackend(template=TEMPLATES["chatml"])
    state = run(joins, backend)
    contents = [message["content"] for message in state.messages()]
    assert contents == ["q", "answer 0", "and 0", "answer 1", "and 1", state["end"]]
    assert state.text() == "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in state.messages()
    )
    assert [message["content"] for message in backend.requests[-1].prompt.messages] == contents[:-1]


def test_branches_that_are_concatenated_end_in_the_turn_in_which_they_began() -> None:
    def joins(s: Any) -> None:
        with s.user():
            group = s.fork(2)
            group += ["a", "b"]
            group.join("concate_and_append")
        group = s.fork(2)
        group += user_begin()
        group.join("concate_and_append")

    state = run(joins)
    error = state.error()
    assert isinstance(error, RoleError)
    assert "in the turn in which it began" in str(error)
    assert state._stream.transcript.messages == [{"role": "user", "content": "ab"}]


def test_a_copy_is_a_temporary_branch() -> None:
    def copies(s: Any) -> None:
        s += "x"
        with s.copy() as branch:
            branch += "yy" + gen("g")

    state = run(copies)
    assert (state.text(), state["g"]) == ("x", ["<3>"])


def test_forks_and_groups_check_their_arguments() -> None:
    def wrong(s: Any) -> None:
        for count in (0, True, "2"):
            with pytest.raises(ValueError, match="one or more"):
                s.fork(count)
        group = s.fork(2)
        with pytest.raises(ValueError, match="3 pieces for 2 branches"):
            group += ["a", "b", "c"]
        with pytest.raises(ValueError, match="a join's mode is one of"):
            group.join("zip")
        with pytest.raises(TypeError, match="append to them"):
            group[0] = group[1]
        group[0] += "fine"
        assert len(list(group)) == 2

    assert run(wrong).error() is None


def test_a_fork_sends_its_prefix_ahead_once_and_only_if_useful() -> None:
    def forks(s: Any, text: str, count: int) -> None:
        s += text
        group = s.fork(count)
        group += gen("a")
        group.join()

    for text, count, hints, expected in (("x", 3, True, 1), ("x", 1, True, 0), ("", 3, True, 0), ("x", 3, False, 0)):
        backend = FakeBackend()
        run(forks, backend, text=text, count=count, hints=hints).sync()
        assert len(backend.asked("warm")) == expected
        assert len(backend.asked("generate")) == count
    deaf = FakeBackend()
    deaf.takes_hints = False
    run(forks, deaf, text="x", count=3).sync()
    assert deaf.asked("warm") == []
