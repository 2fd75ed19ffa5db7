"""Regular expressions: parsed as Python's `re` does, and written so that every backend reads them alike.

Dialects differ in `\\d`, `\\s`, `.`, escapes, anchors and flags, and libraries misread what they do not know. So `re`'s
own parser reads the pattern into sets of characters, sequences, choices and repetitions, and these are written without
escapes, except of single characters. What is not regular, or differs between dialects, is refused by name: lookarounds,
backreferences, conditions, word boundaries, atomic groups, possessive quantifiers, and anchors that are not at an end.

Where Python and ECMAScript differ, a text must match in both: `\\d`, `\\w` and `\\s` are ASCII's, and `\\D`, `\\W` and
`\\S` are what is none of them in Unicode either.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from treeline_runtime.grammar.backend import MAX_SHORTEST, GrammarError
from treeline_runtime.grammar.character_sets import ASCII, LAST, Ranges, all_but, unicode, union, with_cases


@dataclass(frozen=True)
class Chars:
    """One of these characters, at least one."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    part: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Anchor:
    """The beginning or the end. `whole` and `within` return none."""

    start: bool


Node = Chars | Sequence | Choice | Repeat | Anchor
EMPTY = Sequence(())
_NAMED_GROUP = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<(?![=!])", re.DOTALL)
"""Or an escape or a class, in which no group begins."""


def whole(pattern: str) -> Node:
    """Texts that match the whole pattern (`re.fullmatch`). Raises GrammarError."""
    return _parse(pattern, EMPTY)


def within(pattern: str) -> Node:
    """Texts that contain a match (`re.search`), as in JSON Schema. Raises GrammarError."""
    return _parse(pattern, Repeat(Chars(all_but(())), 0, None))


def _parse(pattern: str, beyond: Node) -> Node:
    """beyond: see `_trim`."""
    try:
        node = _trim(_read(pattern), beyond)
        length = shortest(node)
    except RecursionError:
        raise GrammarError(f"the pattern {_short(pattern)} is nested too deeply") from None
    if length > MAX_SHORTEST:
        raise GrammarError(
            f"too long: the shortest text of the pattern {_short(pattern)} has {length} characters; "
            f"{MAX_SHORTEST} are the most"
        )
    return node


def shortest(node: Node) -> int:
    """Length of the shortest text in characters."""
    match node:
        case Chars():
            return 1
        case Sequence(parts):
            return sum(map(shortest, parts))
        case Choice(parts):
            return min(map(shortest, parts), default=0)
        case Repeat(part, least, _):
            return least * shortest(part) if least else 0
        case Anchor():
            return 0


def _read(pattern: str) -> Node:
    pattern = _NAMED_GROUP.sub(lambda m: "(?P<" if m[0] == "(?<" else m[0], pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = parser.parse(pattern)
        return _sequence(parsed, parsed.state.flags)
    except (re.error, OverflowError) as error:
        raise GrammarError(f"the pattern {_short(pattern)} is not a regular expression: {error}") from None
    except _RefusedError as refused:
        raise GrammarError(f"{refused} in the pattern {_short(pattern)} is not supported") from None


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")


class _RefusedError(Exception):
    """A pattern has an unsupported construct; the message names it."""


def _sequence(items: Iterable[tuple[Any, Any]], flags: int) -> Node:
    """Converts what `re` parsed. flags: those in effect here."""
    parts = [_item(code, argument, flags) for code, argument in items]
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def _item(code: Any, argument: Any, flags: int) -> Node:
    if code is op.LITERAL:
        return Chars(_cased(((argument, argument),), flags))
    if code is op.NOT_LITERAL:
        return Chars(all_but(_cased(((argument, argument),), flags, outside=True)))
    if code is op.ANY:
        return Chars(all_but(() if flags & re.DOTALL else ((10, 10),)))
    if code is op.IN:
        return _set(argument, flags)
    if code is op.BRANCH:
        return Choice(tuple(_sequence(branch, flags) for branch in argument[1]))
    if code is op.SUBPATTERN:
        _group, add, remove, items = argument
        return _sequence(items, (flags | add) & ~remove)
    if code in (op.MAX_REPEAT, op.MIN_REPEAT):
        least, most, items = argument
        return Repeat(_sequence(items, flags), least, None if most is op.MAXREPEAT else most)
    if code is op.AT:
        return _anchor(argument, flags)
    raise _RefusedError(_REFUSED.get(code, str(code)))


def _anchor(argument: Any, flags: int) -> Anchor:
    if argument in (op.AT_BOUNDARY, op.AT_NON_BOUNDARY):
        raise _RefusedError("a word boundary")
    if flags & re.MULTILINE and argument in (op.AT_BEGINNING, op.AT_END):
        raise _RefusedError("the flag m with an anchor")
    return Anchor(argument in (op.AT_BEGINNING, op.AT_BEGINNING_STRING))


def _set(items: list[tuple[Any, Any]], flags: int) -> Node:
    negated = items[0][0] is op.NEGATE
    ranges: list[tuple[int, int]] = []
    for code, argument in items[negated:]:
        match code:
            case op.LITERAL:
                ranges += _cased(((argument, argument),), flags, outside=negated)
            case op.RANGE:
                ranges += _cased((argument,), flags, outside=negated)
            case op.CATEGORY:
                ranges += _category(argument, outside=negated)
    chars = all_but(ranges) if negated else union(ranges)
    if not chars:
        raise _RefusedError("a set without characters")
    return Chars(chars)


_REFUSED = {
    op.ASSERT: "a lookaround",
    op.ASSERT_NOT: "a lookaround",
    op.GROUPREF: "a backreference",
    op.GROUPREF_EXISTS: "a condition",
    op.POSSESSIVE_REPEAT: "a possessive quantifier",
    op.ATOMIC_GROUP: "an atomic group",
    op.FAILURE: "a set without characters",
}


def _trim(node: Node, beyond: Node) -> Node:
    """Removes anchors. beyond: what may surround a side without an anchor."""
    node = _edge(_edge(node, beyond, start=True), beyond, start=False)
    if _has_anchor(node):
        raise GrammarError("'^' and '$' in a pattern are supported at its ends and those of its alternatives")
    return node


def _edge(node: Node, beyond: Node, start: bool) -> Node:
    """One side without its anchors, and with `beyond` where none closes it. Other anchors stay."""
    if not _has_anchor(node):
        if node == EMPTY or beyond is EMPTY:
            return node if beyond is EMPTY else beyond
        return Sequence((beyond, node) if start else (node, beyond))
    match node:
        case Anchor(at) if at == start:
            return EMPTY
        case Choice(parts):
            return Choice(tuple(_edge(part, beyond, start) for part in parts))
        case Sequence(parts):
            while len(parts) > 1 and parts[0 if start else -1] == parts[1 if start else -2] == Anchor(start):
                parts = parts[1:] if start else parts[:-1]
            if not _has_anchor(parts[0 if start else -1]):
                return node if beyond is EMPTY else Sequence((beyond, *parts) if start else (*parts, beyond))
            if start:
                return Sequence((_edge(parts[0], beyond, start), *parts[1:]))
            return Sequence((*parts[:-1], _edge(parts[-1], beyond, start)))
        case Repeat(part, 1, 1):
            return _edge(part, beyond, start)
        case _:
            return node


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Sequence(parts) | Choice(parts):
            return any(_has_anchor(part) for part in parts)
        case Repeat(part):
            return _has_anchor(part)
        case _:
            return False


# ---- characters ---------------------------------------------------------------------------------------------------


def _cased(ranges: Ranges, flags: int, outside: bool = False) -> Ranges:
    """With other cases, if the flag i is set. outside: inside a negated set, so with all that may be a case."""
    if not flags & re.IGNORECASE:
        return ranges
    if sum(last - first + 1 for first, last in ranges) > _MOST_CASED:
        raise _RefusedError("the flag i with a large set")
    return with_cases(ranges, wide=outside)


_MOST_CASED = 4096


def _category(code: Any, outside: bool) -> Ranges:
    """outside: inside a negated set, so with everything that any dialect counts in."""
    name, negative = _CATEGORIES[code]
    if negative:
        return all_but(ASCII[name] if outside else unicode(name))
    return unicode(name) if outside else ASCII[name]


_CATEGORIES = {
    op.CATEGORY_DIGIT: ("digit", False),
    op.CATEGORY_NOT_DIGIT: ("digit", True),
    op.CATEGORY_SPACE: ("space", False),
    op.CATEGORY_NOT_SPACE: ("space", True),
    op.CATEGORY_WORD: ("word", False),
    op.CATEGORY_NOT_WORD: ("word", True),
}


class EmptyError(Exception):
    """No text matches any more, because a set has lost all its characters."""


def but(node: Node, unwanted: Ranges) -> Node:
    """Texts without these characters. Raises EmptyError if a set has no others."""
    match node:
        case Chars(ranges):
            left = all_but((*all_but(ranges), *unwanted))
            if not left:
                raise EmptyError
            return Chars(left)
        case Sequence(parts):
            return Sequence(tuple(but(part, unwanted) for part in parts))
        case Choice(parts):
            return Choice(tuple(but(part, unwanted) for part in parts))
        case Repeat(part, least, most):
            return Repeat(but(part, unwanted), least, most)
    raise AssertionError(node)


# ---- writing ------------------------------------------------------------------------------------------------------


def as_regex(node: Node) -> str:
    """For Rust's `regex`, `re` and xgrammar, with non-capturing groups. Raises GrammarError."""
    try:
        return _written(node)
    except RecursionError:
        raise GrammarError("a pattern is nested too deeply") from None


def _written(node: Node) -> str:
    match node:
        case Chars(ranges):
            return _chars(ranges)
        case Sequence(parts):
            return "".join(f"(?:{_written(p)})" if isinstance(p, Choice) else _written(p) for p in parts)
        case Choice(parts):
            return "|".join(map(_written, parts))
        case Repeat(part, least, most):
            text = _written(part)
            return (text if isinstance(part, Chars) else f"(?:{text})") + _count(least, most) if text else ""
    raise AssertionError(node)


def _count(least: int, most: int | None) -> str:
    match least, most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
    if least == most:
        return f"{{{least}}}"
    return f"{{{least},{'' if most is None else most}}}"


def _chars(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    negated = ranges[-1][1] == LAST
    ranges = all_but(ranges) if negated else ranges
    if ranges and ranges[0][0] == ord("^"):  # not where it would negate
        ranges = ((ranges[-1][1], ranges[-1][1]), *ranges)
    inner = "".join(_char(first) if first == last else f"{_char(first)}-{_char(last)}" for first, last in ranges)
    return f"[^{inner}]" if negated and inner else f"[{inner or f'{_char(0)}-{_char(LAST)}'}]"


def _char(code: int) -> str:
    char = chr(code)
    if char in r"\^$.*+?()[]{}|/-":
        return "\\" + char
    if code < 32 or code == 127:
        return f"\\x{code:02x}"
    return char
