"""In which order the programs of a batch are started, and what is cached before the first of them.

The program is traced once up to its first request (`compiler.trace`): with its arguments, that says how the first
prompt of each item begins. In the order of these texts the items are visited as a depth-first walk of the tree of their
prefixes would, which no order beats where the cache holds the longest of them: what is computed for a prefix serves all
that share it before anything else is asked for.

Items that start at the same moment would each compute what all share, as none of it has been cached. So that is sent
ahead once, and all wait for it.
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
"""Characters that are worth a request of their own; fewer are not."""


def plan_batch(
    program: Function, arguments: Sequence[Mapping[str, Any]], run: Run, threads: int
) -> tuple[Sequence[int], str]:
    """→ (numbers of the items, in their order; what all begin with, if it is worth a request). arguments: of each item;
    threads: how many run at the same time. Never fails: at worst the order is the given one."""
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
    """The text that the first prompt of each item begins with; and by what to order the items: that, and the argument
    at which the trace stopped, if there is one, since what follows is likely to be made of it."""
    traced = program.traced(_common(arguments), to_first_request=True)
    texts = beginnings(traced.graph, arguments, run.backend)
    cause = first_argument(traced.stopped_by)
    keys = [(text, _shown(one, cause)) for text, one in zip(texts, arguments, strict=True)]
    return texts, keys


def _common(arguments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments that all items have in common: constants of the batch, on which the program may
    branch. Plain data alone, and copies of it, as the trace shall not change what the runs are given."""
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
    """Characters, or bytes, that two texts begin with alike. O(n), as halves are compared and not characters."""
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
    """With each of these arguments the text up to the first model call, or to the first argument that is not among
    them; of a program that forks before, that of its first branch. Raises as the backend's template."""
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
    """False: up to one that is not known."""
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
