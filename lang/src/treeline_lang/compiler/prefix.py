"""With which text a program's first request begins, as far as its graph tells without running it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from treeline_lang.compiler.graph import Graph
from treeline_lang.compiler.nodes import ROOT, Append, Argument, Fork, Hole, SetVar, parts_within
from treeline_lang.errors import ProgramError
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


def has_turns(parts: Iterable[Expr]) -> bool:
    """Whether their text depends on the chat template."""
    return any(isinstance(part, RoleBegin | RoleEnd) for part in parts_within(parts))


def parts_of(graph: Graph) -> Iterator[Expr]:
    """All that its streams append."""
    for stream in graph.streams:
        for step in stream.steps:
            yield from step.parts if isinstance(step, Append) else ()


def beginning(graph: Graph, arguments: Mapping[str, Any], template: ChatTemplate | None) -> str:
    """The text up to the first model call, or to the first argument that is not among these; of a program that forks
    before, that of its first branch."""
    transcript, number = Transcript(), ROOT
    while True:
        for step in graph.streams[number].steps:
            if isinstance(step, Append):
                if not _append_all(transcript, step.parts, arguments, template):
                    return transcript.text
            elif isinstance(step, Fork):
                number = step.children[0]
                break
            elif not isinstance(step, SetVar):
                return transcript.text
        else:
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
