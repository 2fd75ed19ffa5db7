"""What is done to a graph before it is executed: functions from a graph to a graph, each with a report."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from treeline_lang.compiler.graph import Graph
from treeline_lang.compiler.nodes import Append, Argument, Fork, Hole, SetVar, Step, Stream, Variable, reads
from treeline_lang.compiler.prefix import shared_length
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
_KNOWN = (Text, RoleBegin, RoleEnd)
"""Parts whose text does not depend on a model."""


# ---- code movement --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Region:
    """The steps between two markers, which are outside of it."""

    first: int
    end: int


def move_constants(graph: Graph) -> tuple[Graph, Report]:
    """Code movement for prefix sharing: in a region of free order, what is constant comes first.

        with s.any_order():
            s += "Here is a question: " + question + "\\n"
            s += "Act as an expert and answer in one sentence.\\n"

    Each `+=` within is moved as a whole: constants first, then what has arguments in it, then what has variables;
    otherwise the order stays. A region with anything but texts, arguments and variables in it is left as it is: a model
    call answers to all the text before it.
    """
    lines: list[str] = []
    streams = []
    for stream in graph.streams:
        steps = list(stream.steps)
        for region in _regions(stream):
            before = steps[region.first : region.end]
            obstacle = next((part for step in before for part in _foreign(step)), None)
            if obstacle is not None:
                lines.append(f"{_place(steps[region.first - 1])}: left alone, as it holds {obstacle}")
                continue
            after = sorted(before, key=_known_late)
            if after != before:
                steps[region.first : region.end] = after
                lines += [f"{_place(steps[region.first - 1])}: constants come first", *_diff(before, after)]
        streams.append(replace(stream, steps=tuple(steps)))
    moved = replace(graph, streams=tuple(streams))
    _verify(graph, moved)
    return moved, Report("code movement", tuple(lines))


def _regions(stream: Stream) -> Iterator[_Region]:
    """Innermost ones only: one around another would hold its markers."""
    begun: int | None = None
    for index, step in enumerate(stream.steps):
        if _is_marker(step, OrderBegin):
            begun = index + 1
        elif _is_marker(step, OrderEnd) and begun is not None:
            yield _Region(begun, index)
            begun = None


def _is_marker(step: Step, kind: type[Expr]) -> bool:
    return isinstance(step, Append) and len(step.parts) == 1 and isinstance(step.parts[0], kind)


def _foreign(step: Step) -> Iterator[str]:
    """What is in a step that cannot be moved, in words."""
    if not isinstance(step, Append):
        yield f"a {type(step).__name__.lower()}"
        return
    yield from (_shown(part) for part in step.parts if not isinstance(part, Text | Hole))


def _known_late(step: Step) -> int:
    """0: a constant, shared by all runs; 1: with an argument; 2: with a variable."""
    holes = [part.value for part in step.parts if isinstance(part, Hole)] if isinstance(step, Append) else []
    return max((1 if isinstance(value, Argument) else 2 for value in holes), default=0)


def _place(step: Step) -> str:
    return str(step.where) if step.where else "any_order"


def _diff(before: Sequence[Step], after: Sequence[Step]) -> list[str]:
    """How the prompt changes, as a unified diff."""
    return list(difflib.unified_diff(_prompt(before), _prompt(after), "before", "after", lineterm=""))


def _prompt(steps: Sequence[Step]) -> list[str]:
    return "".join(_shown(part) for step in steps if isinstance(step, Append) for part in step.parts).splitlines()


def _verify(before: Graph, after: Graph) -> None:
    """Nothing outside of the regions has changed, and within them nothing but the order."""
    assert replace(before, streams=()) == replace(after, streams=())
    assert len(before.streams) == len(after.streams)
    for old, new in zip(before.streams, after.streams, strict=True):
        assert _outside(old) == _outside(new)
        assert old.sampling == new.sampling
        assert [Counter(old.steps[one.first : one.end]) for one in _regions(old)] == [
            Counter(new.steps[one.first : one.end]) for one in _regions(new)
        ]


def _outside(stream: Stream) -> list[tuple[int, Step]]:
    inside = {index for region in _regions(stream) for index in range(region.first, region.end)}
    return [(index, step) for index, step in enumerate(stream.steps) if index not in inside]


# ---- forks ----------------------------------------------------------------------------------------------------------


def hint_forks(graph: Graph) -> tuple[Graph, Report]:
    """Fork hints: what all branches begin with is cached with the text before, and only their first model calls wait
    for that. An interpreter sees a fork before it sees what the branches append, so its hint ends at the fork, and the
    branches wait for it."""
    lines: list[str] = []

    def hinted(step: Step) -> Step:
        if not isinstance(step, Fork) or len(step.children) < 2:
            return step
        hint = _common([_beginning(graph.streams[child]) for child in step.children])
        more = f", with {''.join(map(_shown, hint))!r}" if hint else ""
        lines.append(f"{step.where or 'fork'}: {len(step.children)} branches do not wait for their hint{more}")
        return replace(step, hint=hint, ahead=True)

    streams = [replace(stream, steps=tuple(map(hinted, stream.steps))) for stream in graph.streams]
    return replace(graph, streams=tuple(streams)), Report("fork hints", tuple(lines))


def _beginning(stream: Stream) -> tuple[Expr, ...]:
    """The parts of a stream whose texts are known without waiting for a model, up to the first other one; texts that
    follow each other are one."""
    parts: list[Expr] = []
    for part in _leading(stream):
        if not (isinstance(part.value, Argument) if isinstance(part, Hole) else isinstance(part, _KNOWN)):
            break
        if isinstance(part, Text) and parts and isinstance(parts[-1], Text):
            parts[-1] = Text(parts[-1].text + part.text, where=parts[-1].where)
        else:
            parts.append(part)
    return tuple(parts)


def _leading(stream: Stream) -> Iterator[Expr]:
    """The parts that a stream appends first, up to its first fork or join, or to where it waits for a variable."""
    for step in stream.steps:
        if isinstance(step, Append):
            yield from (part for part in step.parts if not isinstance(part, _SILENT))
        elif not isinstance(step, SetVar) or any(isinstance(source, Variable) for source in reads(step)):
            return


def _common(beginnings: Sequence[Sequence[Expr]]) -> tuple[Expr, ...]:
    """What all begin with: whole parts, and of a text where they part the characters before."""
    parts: list[Expr] = []
    for column in zip(*beginnings, strict=False):
        first = column[0]
        if all(part == first for part in column):
            parts.append(first)
            continue
        if isinstance(first, Text):
            length = min(shared_length(first.text, part.text) if isinstance(part, Text) else 0 for part in column)
            if length:
                parts.append(Text(first.text[:length], where=first.where))
        break
    return tuple(parts)


def _shown(part: Expr) -> str:
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


DEFAULT_PASSES: Final[tuple[Pass, ...]] = (move_constants, hint_forks)
