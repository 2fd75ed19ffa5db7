"""The order in which a batch's programs start, and the prefix that is cached before the first.

The program is traced once up to its first request (`compiler.trace`); with each item's arguments that gives the
beginning of its first prompt. Sorted by these texts, items are visited like a depth-first walk of the tree of prefixes,
which is optimal if the cache holds the longest path: all programs that share a prefix run before any other.

Items that start together would each compute their shared prefix. So the prefix is sent ahead once, and all wait for it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, AnyStr, Final

from treeline_lang import background
from treeline_lang.backends.base import Backend
from treeline_lang.compiler.graph import ROOT, Append, Argument, Fork, Graph, Hole, Join
from treeline_lang.compiler.trace import first_argument
from treeline_lang.errors import ProgramError
from treeline_lang.executor import Run
from treeline_lang.expressions import (
    Expr,
    OrderBegin,
    OrderEnd,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    SeparateReasoning,
    Text,
    at_path,
    characters_of,
    flatten,
)
from treeline_lang.templates import ChatTemplate
from treeline_lang.transcript import Transcript

if TYPE_CHECKING:
    from treeline_lang.program import Function

MIN_SHARED: Final = 64
"""The fewest characters that are worth a request of their own."""


def plan_batch(
    program: Function, arguments: Sequence[Mapping[str, Any]], run: Run, threads: int
) -> tuple[Sequence[int], str]:
    """Returns (item numbers in order, the shared beginning if it is worth a request). arguments: of each item; threads:
    how many run at once. Never fails: at worst it keeps the given order."""
    given = range(len(arguments))
    if len(arguments) < 2:
        return given, ""
    try:
        texts, keys = _beginnings(program, arguments, run)
    except Exception:
        return given, ""
    order = sorted(range(len(arguments)), key=keys.__getitem__)
    first, last = texts[order[0]], texts[order[-1]]
    shared = first[: shared_length(first, last)]
    hints = run.hints and run.backend.takes_hints and threads > 1 and len(shared) > MIN_SHARED
    return order, shared if hints else ""


def _beginnings(
    program: Function, arguments: Sequence[Mapping[str, Any]], run: Run
) -> tuple[list[str], list[tuple[str, str]]]:
    """For each item the beginning of its first prompt, and the sort key: that text and the argument where the trace
    stopped, which probably comes next."""
    traced = program.traced(_common(arguments), to_first_request=True)
    texts = beginnings(traced.graph, arguments, run.backend)
    cause = first_argument(traced.stopped_by)
    keys = [(text, _shown(one, cause)) for text, one in zip(texts, arguments, strict=True)]
    return texts, keys


def _common(arguments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arguments that all items share: constants on which the program may branch. Only copies of plain data, so that the
    trace cannot change them."""
    first, *rest = arguments
    return {
        name: copy.deepcopy(value)
        for name, value in first.items()
        if all(one.get(name, arguments) is value for one in rest) and _plain(value)
    }


def _plain(value: Any) -> bool:
    match value:
        case list() | tuple():
            return all(_plain(item) for item in value)
        case dict():
            return all(_plain(key) and _plain(entry) for key, entry in value.items())
        case _:
            return value is None or type(value) in (str, int, float, bool, bytes)


def _shown(arguments: Mapping[str, Any], argument: Argument | None) -> str:
    if argument is None:
        return ""
    try:
        value = at_path(arguments[argument.name], argument.path)
    except (LookupError, TypeError):
        return ""
    return value if isinstance(value, str) else ""


def shared_length(one: AnyStr, other: AnyStr) -> int:
    """Length of the common beginning of two texts. O(n): compares halves, not characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ---- with which text a program's first request begins, as far as its graph tells without running it ------------------


def beginnings(graph: Graph, arguments: Sequence[Mapping[str, Any]], backend: Backend) -> list[str]:
    """The text up to the first model call or unknown argument, with each of these arguments; for a program that forks
    first, that of its first branch. Raises as the backend's template."""
    appended = (part for step in graph.steps if isinstance(step, Append) for part in step.parts)
    has_turns = any(isinstance(part, RoleBegin | RoleEnd) for part in appended)
    template = background.call(backend.template()) if has_turns else None
    return [_beginning(graph, one, template) for one in arguments]


def _beginning(graph: Graph, arguments: Mapping[str, Any], template: ChatTemplate | None) -> str:
    transcript, stream = Transcript(), ROOT
    for step in graph.steps:
        if step.stream != stream:
            continue
        match step:
            case Append(parts) if not _append_all(transcript, parts, arguments, template):
                break
            case Fork(children):
                stream = children[0]
            case Join():
                break
            case _:
                pass
    return transcript.text


def _append_all(
    transcript: Transcript, parts: Sequence[Expr], arguments: Mapping[str, Any], template: ChatTemplate | None
) -> bool:
    """False if it stopped at an unknown part."""
    return all(_append(transcript, part, arguments, template) for part in parts)


def _append(transcript: Transcript, part: Expr, arguments: Mapping[str, Any], template: ChatTemplate | None) -> bool:
    match part:
        case Text(text):
            transcript.append(text)
        case Hole(Argument(name, path)) if name in arguments:
            try:
                value = at_path(arguments[name], path)
            except (LookupError, TypeError):
                return False
            if not isinstance(value, str | int | float):
                return False
            transcript.append(characters_of(value))
        case RoleBegin(role) | RoleEnd(role) if template is not None:
            try:
                (transcript.begin if isinstance(part, RoleBegin) else transcript.end)(role, template)
            except ProgramError:
                return False
        case ScopeBegin() | ScopeEnd() | OrderBegin() | OrderEnd():
            pass
        case SeparateReasoning(expr):
            return _append_all(transcript, flatten(expr), arguments, template)
        case _:
            return False
    return True
