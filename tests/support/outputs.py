"""Outputs of models, and parsers' results in a short notation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import strategies as st
from treeline_runtime.parsers.source import CallArguments, CallBegun, OutputParser, Part, Said, Thought

Found = list[tuple[str, Any]]
"""("thought", text), ("said", text), ("call", (name, arguments' text)), in order; adjoining texts as one."""


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    """Cut `text` at these places."""
    places = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


def fed(parser: OutputParser, pieces: Iterable[str]) -> list[Part]:
    """Feed an output in these pieces and return all parts."""
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return parts + parser.end()


def told(parts: Sequence[Part]) -> Found:
    """Join parts. Checks invariants: calls are numbered from 0, and arguments belong to the last call."""
    found: Found = []
    calls = 0
    for part in parts:
        match part:
            case CallBegun(index, name, _):
                assert index == calls
                calls += 1
                found.append(("call", (name, "")))
            case CallArguments(index, text):
                assert index == calls - 1
                assert text
                kind, (name, so_far) = found[-1]
                assert kind == "call"
                found[-1] = ("call", (name, so_far + text))
            case Said(text) | Thought(text):
                assert text
                kind = "said" if isinstance(part, Said) else "thought"
                if found and found[-1][0] == kind:
                    text = found.pop()[1] + text
                found.append((kind, text))
    return found


def read(parser: OutputParser, text: str) -> Found:
    """Parse a whole output; arguments that are JSON are decoded."""
    found = told(fed(parser, [text]))
    return [(kind, (value[0], _said(value[1])) if kind == "call" else value) for kind, value in found]


def _said(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def same_however_cut(new: Callable[[], OutputParser], text: str, cuts: Iterable[int]) -> Found:
    """Check that a parser finds the same in `text` whole, by characters and cut at `cuts`. Return it."""
    whole = told(fed(new(), [text]))
    assert told(fed(new(), text)) == whole
    assert told(fed(new(), pieces(text, cuts))) == whole
    return whole


def near(fragments: Sequence[str]) -> st.SearchStrategy[str]:
    """Draw texts from fragments of a format, valid and broken."""
    whole = st.sampled_from(fragments)
    part = st.builds(lambda text, at: text[: at % (len(text) + 1)], whole, st.integers(0, 60))
    return st.lists(whole | whole | part | st.sampled_from(list(" \n<[{}]>\"\\',:;|ax0")), max_size=14).map("".join)


cut_places = st.lists(st.integers(0, 2000), max_size=6)
