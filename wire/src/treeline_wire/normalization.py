"""A tokenizer's normalizer as a fast Python function.

The `tokenizers` library tracks alignments while it normalizes: 0.3 µs a character, 100 ms for a long prompt. Keys need
only the text, so common steps use Python's string functions, and the library does the rest. Where tokenizers write a
mark (`▁`) for a space, this returns the space.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Iterable
from itertools import chain
from operator import methodcaller
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from tokenizers import normalizers

TextTransform: TypeAlias = Callable[[str], str]
Form: TypeAlias = Literal["NFC", "NFD", "NFKC", "NFKD"]


class Normalizer(NamedTuple):
    """A function from text to normalized text.

    `local`: if it leaves a text unchanged, it also leaves every part of it unchanged.
    """

    normalize: TextTransform
    local: bool


_FORMS: Final = ("NFC", "NFD", "NFKC", "NFKD")
_COMBINING_RANGES: Final = tuple(
    range(first, last)
    for first, last in (
        (0x80, 0x3400),
        (0xA000, 0xAC00),
        (0xD7A4, 0xD800),
        (0xF900, 0x17000),
        (0x18D00, 0x20000),
        (0x2F800, 0x2FA20),
    )
)
"""Ranges of characters that may combine or decompose, now or later: not ideographs, Hangul or private use."""
_STRIDE: Final = 16
"""A run of marks is long if samples at this distance show it."""
_IN_A_ROW: Final = 4
_ASTRAL: Final = re.compile("[\U00010000-\U0010ffff]+")

MOST_GROWTH: Final = 64
"""The most that a normalizer may lengthen a text; known ones at most double it."""


def identity(text: str) -> str:
    """Returns the text unchanged."""
    return text


def flatten(spec: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    """Returns the steps of a tokenizer.json component, with nested sequences flattened. `members`: the name of a
    sequence's list.
    """
    if spec is None:
        return []
    if spec.get("type") == "Sequence":
        return [step for inner in spec.get(members, []) for step in flatten(inner, members)]
    return [spec]


def check_growth(spec: dict[str, Any] | None) -> None:
    """Raises ValueError for a normalizer that can lengthen a text too much: nine steps of one character to ten turn a
    letter into a gigabyte."""
    growth = 1.0
    for step in flatten(spec, "normalizers"):
        if step.get("type") == "Replace":
            old, new = step["pattern"].get("String"), len(step["content"])
            # A regular expression may match the empty text, at every position.
            growth *= max(1.0, new / len(old)) if old else 1.0 + new
        elif step.get("type") == "Prepend":
            growth *= 1.0 + len(step["prepend"])
        if growth > MOST_GROWTH:
            raise ValueError(f"its normalizer may make a text more than {MOST_GROWTH} times as long")


def space_mark(spec: dict[str, Any] | None) -> str | None:
    """Returns the character that a normalizer writes for a space, or None."""
    for step in flatten(spec, "normalizers"):
        blanks = step.get("type") == "Replace" and step.get("pattern") == {"String": " "}
        if blanks and len(step["content"]) == 1:
            return str(step["content"])
    return None


def compile_normalizer(spec: dict[str, Any] | None, rust: Any, mark: str | None) -> Normalizer:
    """Returns the function for `spec` (the `normalizer` of tokenizer.json).

    `rust`: the same normalizer in the library; `mark`: the character to read as a space.
    """
    flat = flatten(spec, "normalizers")
    unmark: list[TextTransform] = [] if mark is None else [methodcaller("replace", mark, " ")]
    compiled = [_compile_step(step, mark) for step in flat]
    steps: list[TextTransform] = []
    for step in compiled:
        if step is None:
            steps = [rust.normalize_str]
            break
        if step is not identity:
            steps.append(step)
    local = None not in compiled and all(step["type"] != "Prepend" for step in flat)
    return Normalizer(_composed([*steps, *unmark]), local)


def _compile_step(step: dict[str, Any], mark: str | None) -> TextTransform | None:
    kind = step.get("type")
    if kind in _FORMS:
        return functools.partial(_unicode, form=cast(Form, kind))
    if kind == "ByteLevel":
        return identity  # it spells bytes as characters; keys are bytes anyway
    if kind == "Lowercase":
        return _lowercase
    if kind == "Prepend":
        prefix = str(step["prepend"])
        return functools.partial(_prepend, prefix=" " if prefix == mark else prefix)
    if kind == "Replace" and "String" in step["pattern"]:
        old, new = str(step["pattern"]["String"]), str(step["content"])
        if mark is not None and old == " " and new == mark:
            return methodcaller("replace", mark, " ")
        if old and (mark is None or (mark not in old and mark not in new)):
            return methodcaller("replace", old, new)
    return None


def _composed(steps: list[TextTransform]) -> TextTransform:
    if len(steps) > 1:
        return functools.partial(_chain, steps=tuple(steps))
    return steps[0] if steps else identity


def _chain(text: str, steps: Iterable[TextTransform]) -> str:
    for step in steps:
        text = step(text)
    return text


def _prepend(text: str, prefix: str) -> str:
    return prefix + text if text else text


def _lowercase(text: str) -> str:
    return text.lower() if text.isascii() else str(normalizers.Lowercase().normalize_str(text))


def _unicode(text: str, form: Form) -> str:
    if text.isascii():
        return text
    if _is_disputed(text, form):
        return str(getattr(normalizers, form)().normalize_str(text))
    return unicodedata.normalize(form, text)


def long_run(text: str) -> int | None:
    """Returns the start of the first long run of combining marks, with its base character; None if there is none.

    Python sorts a run by insertion, in quadratic time: 64 KB of marks take seconds. Normal texts have a few in a row,
    Unicode's stream-safe format allows 30; runs of 64 or more are found here, by samples, so that other texts cost next
    to nothing.
    """
    if text.isascii():
        return None
    few, mark = _marks()
    samples = text[::_STRIDE]
    found = few.search(samples)
    while found is not None:
        first = found.start() * _STRIDE
        run = mark.match(text, first)
        if run is not None and run.end() - first > _STRIDE * (_IN_A_ROW - 1):
            while first > 0 and mark.match(text, first - 1, first) is not None:
                first -= 1
            return max(0, first - 1)
        found = few.search(samples, found.start() + 1)
    return None


@functools.cache
def _marks() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Returns patterns for a few combining marks in a row, and for a whole run: all characters that some form
    reorders.
    """
    codes = [
        code for code in chain(*_COMBINING_RANGES) if unicodedata.combining(unicodedata.normalize("NFKD", chr(code))[0])
    ]
    one = _char_class(codes)
    return re.compile(one + f"{{{_IN_A_ROW}}}"), re.compile(one + "+")


def _is_disputed(text: str, form: Form) -> bool:
    """Whether Python and the library may normalize a text differently. The regex engine is fast for small code points
    only."""
    low, high = _disputed(form)
    if low.search(text) is not None:
        return True
    astral = _ASTRAL.findall(text)
    return bool(astral) and high.search("".join(set("".join(astral)))) is not None


@functools.cache
def _disputed(form: Form) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Returns the characters, up to U+FFFF and above, that Python and the library may treat differently because of
    their Unicode versions.

    These are characters unknown to Python's version (in planes with combining characters), and those whose
    decomposition or combining class differs in the library.
    """
    rust = getattr(normalizers, form)()
    disputed: set[int] = set()
    for code in chain(*_COMBINING_RANGES):
        char = chr(code)
        category = unicodedata.category(char)
        if category == "Cn":
            disputed.add(code)
            continue
        parts = unicodedata.decomposition(char)
        if not parts and category[0] != "M":
            continue
        probes = [char, "a\u0345" + char]
        if parts and parts[0] != "<":
            probes.append("".join(chr(int(part, 16)) for part in parts.split()))
        for probe in probes:
            if unicodedata.normalize(form, probe) != rust.normalize_str(probe):
                disputed.update(map(ord, probe[2:] if probe[0] == "a" else probe))
    codes = sorted(disputed)
    return tuple(  # type: ignore[return-value]
        re.compile(_char_class([code for code in codes if (code > 0xFFFF) == above])) for above in (False, True)
    )


def _char_class(codes: list[int]) -> str:
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    if not ranges:
        return "(?!)"
    return "[" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges) + "]"
