"""What passes have in common: their type, their report, and how a stream begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from treeline_lang.compiler.graph import Graph, Stream
from treeline_lang.compiler.nodes import Append, Argument, Hole, SetVar, Step, Variable, reads
from treeline_lang.expressions import Expr, OrderBegin, OrderEnd, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Text


@dataclass(frozen=True, slots=True)
class Report:
    """lines: what was done, and what was left alone and why; none if there was nothing to do."""

    name: str
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.name}:", *(f"  {line}" for line in self.lines or ("nothing to do",))])


Pass = Callable[[Graph], tuple[Graph, Report]]
"""It never changes the graph that it is given."""

_SILENT = (ScopeBegin, ScopeEnd, OrderBegin, OrderEnd)
"""Parts that append no text."""


def with_step(graph: Graph, number: int, index: int, step: Step) -> Graph:
    """The graph with one step instead of another."""
    stream = graph.streams[number]
    steps = (*stream.steps[:index], step, *stream.steps[index + 1 :])
    streams = (*graph.streams[:number], replace(stream, steps=steps), *graph.streams[number + 1 :])
    return replace(graph, streams=streams)


def leading(stream: Stream) -> Iterator[Expr]:
    """The parts that a stream appends first, up to its first fork or join, or to where it waits for a variable."""
    for step in stream.steps:
        if isinstance(step, Append):
            yield from (part for part in step.parts if not isinstance(part, _SILENT))
        elif not isinstance(step, SetVar) or any(isinstance(source, Variable) for source in reads(step)):
            return


def known_at_once(part: Expr, *, arguments: bool) -> bool:
    """Whether it has a text without waiting for a model."""
    if isinstance(part, Hole):
        return arguments and isinstance(part.value, Argument)
    return isinstance(part, Text | RoleBegin | RoleEnd)


def beginning(stream: Stream, *, arguments: bool) -> tuple[Expr, ...]:
    """The parts of a stream up to the first that is not known at once; texts that follow each other are one."""
    parts: list[Expr] = []
    for part in leading(stream):
        if not known_at_once(part, arguments=arguments):
            break
        if isinstance(part, Text) and parts and isinstance(parts[-1], Text):
            parts[-1] = Text(parts[-1].text + part.text, where=parts[-1].where)
        else:
            parts.append(part)
    return tuple(parts)


def shown(part: Expr) -> str:
    """A part as a reader of a prompt would like to see it."""
    match part:
        case Text(text):
            return text
        case Hole(value):
            return "{" + value.name + "".join(f"[{key!r}]" for key in value.path) + "}"
        case RoleBegin(role) | RoleEnd(role):
            return f"<{'/' if isinstance(part, RoleEnd) else ''}{role}>"
        case _:
            return f"<{part.step}>"
