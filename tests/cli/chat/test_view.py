"""An answer drawn piece by piece looks the same as one drawn at once, and does nothing else to a terminal."""

import io
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.markdown import Markdown
from treeline.chat.answer import Piece
from treeline.chat.view import LONGEST_BLOCK, AnswerView, Shown, settled
from treeline.printable import printable

MARKDOWN = """\
# A title

Some *words* and `code`, in
two lines.

- one
- two

  still two
1. first

```python
def f():

    return 1
```

| a | b |
|---|---|
| 1 | 2 |

Title below
===

> quoted

The end."""
OURS = re.compile(r"\x1b\[(\?25[lh]|[0-9;]*m|2K|[0-9]*A)")
"""Escape sequences that rich writes: the cursor hidden and shown, colours, lines erased, a line up."""


def drawn(*pieces: Piece, width: int = 60, height: int = 20) -> str:
    file = io.StringIO()
    view = AnswerView(Console(file=file, force_terminal=True, width=width, height=height))
    view.start()
    for piece in pieces:
        view._looked_at = 0.0  # as if each came long after the one before
        view.add(piece)
    view.stop()
    return file.getvalue()


def left_on_screen(text: str) -> str:
    """Return the text that remains on the screen, without colours and erased lines."""
    lines: list[str] = [""]
    at = 0
    for part in re.split(r"(\x1b\[[0-9?;]*[A-Za-z]|\n|\r)", text):
        if part == "\n":
            at += 1
            lines += [""] * (at + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[at] = ""
        elif re.fullmatch(r"\x1b\[\d*A", part):
            at = max(0, at - int(part[2:-1] or 1))
        elif not part.startswith("\x1b") and part != "\r":
            lines[at] += part
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def plain(markdown: str, width: int = 60) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(Markdown(markdown, hyperlinks=False))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")


def words(text: str) -> list[str]:
    return text.split()


@given(st.lists(st.integers(0, len(MARKDOWN)), max_size=12))
def test_an_answer_in_pieces_is_drawn_as_the_whole_is(cuts):
    bounds = [0, *sorted(cuts), len(MARKDOWN)]
    pieces = [Piece("text", MARKDOWN[a:b]) for a, b in itertools.pairwise(bounds)]
    assert squeezed(left_on_screen(drawn(*pieces))) == squeezed(plain(MARKDOWN))


def squeezed(text: str) -> str:
    """Replace two empty lines by one: they appear between two lists of one text."""
    return re.sub("\n{3,}", "\n\n", text)


def test_settled_text_never_changes():
    whole = words(plain(MARKDOWN))
    for end in range(len(MARKDOWN)):
        first = words(plain(MARKDOWN[: settled(MARKDOWN[:end])]))
        assert first == whole[: len(first)]


@pytest.mark.parametrize("text", ["", "\n", "a", "```\na\n\nb", "- a\n- b", "a\nb"])
def test_a_block_that_may_go_on_is_not_settled(text):
    assert settled(text) == 0


def test_a_block_is_settled_when_the_next_begins():
    assert settled("a\n\nb") == len("a\n\n")
    assert settled("```\na\n```\nb\n") == len("```\na\n```\n")


HOSTILE = [
    "<http://a/%1b[31m>",
    "[x](http://a/%1b]8;;x)",
    "![x](http://a/%1b[2J)",
    "&#27;[31m &#x9b;31m &#x202e;abc &#7;",
    "`\x1b[31m`",
    "```\x1b]0;t\x07\n\x1b[2J\n```",
    "[x]: <\x1b[H> '\x1b[H'\n\n[x]",
    "<a\x1b[H>",
    "x" * (LONGEST_BLOCK + 10),
    "> " * 500 + "deep",
    "*" * 3000,
    "[" * 3000,
    "- " * 5 + "a",
]


@pytest.mark.parametrize("kind", ["text", "reasoning"])
@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_answer_reaches_no_terminal(text, kind):
    shown = OURS.sub("", drawn(Piece(kind, printable(text) + "\n"), Piece(kind, "\nend")))
    assert "\x1b" not in shown
    assert not set("\u202e\x9b\x07") & set(shown)
    assert "end" in shown


@pytest.mark.parametrize(("width", "height"), [(1, 1), (2, 3), (500, 2)])
def test_odd_terminals_are_drawn_on(width, height):
    assert drawn(Piece("text", MARKDOWN), width=width, height=height)


def test_reasoning_is_dim_and_apart_from_the_answer():
    shown = drawn(Piece("reasoning", "Hm.\nYes"), Piece("text", "\n\nParis"))
    assert left_on_screen(shown).split("\n") == ["Hm.", "Yes", "Paris"]
    assert "\x1b[2;3mHm." in shown


def test_lines_are_not_filled_with_spaces():
    file = io.StringIO()
    Console(file=file, width=40).print(Shown(Markdown("a\n\nb")), end="")
    assert file.getvalue() == "a\n\nb\n"


@given(st.text(alphabet="ab \n#*_`~[]()<>!|-:&;x01.>\\\"'", max_size=60))
def test_no_answer_is_too_odd_to_be_drawn(text):
    drawn(Piece("text", text[:30]), Piece("text", text[30:]), width=20)
