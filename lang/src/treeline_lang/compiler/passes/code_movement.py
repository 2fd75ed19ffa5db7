"""Code movement for prefix sharing: in a region whose order the program declares free, what is constant comes first.

    with s.any_order():
        s += "Here is a question: " + question + "\n"
        s += "Act as an expert and answer in one sentence.\n"

Each `+=` within is moved as a whole: constants first, then what has arguments in it, then what has variables; otherwise
the order stays. A region with anything but texts, arguments and variables in it is left as it is: a model call answers
to all the text before it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from treeline_lang.compiler.graph import Graph, Stream
from treeline_lang.compiler.nodes import Append, Argument, Hole, Step
from treeline_lang.compiler.passes.base import Report, shown
from treeline_lang.expressions import Expr, OrderBegin, OrderEnd, Text


@dataclass(frozen=True, slots=True)
class _Region:
    """The steps between two markers, which are outside of it."""

    first: int
    end: int


def move_constants(graph: Graph) -> tuple[Graph, Report]:
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
    yield from (shown(part) for part in step.parts if not isinstance(part, Text | Hole))


def _known_late(step: Step) -> int:
    """0: a constant, shared by all runs; 1: with an argument; 2: with a variable."""
    holes = [part.value for part in step.parts if isinstance(part, Hole)] if isinstance(step, Append) else []
    return max((1 if isinstance(value, Argument) else 2 for value in holes), default=0)


def _place(step: Step) -> str:
    return str(step.where) if step.where else "any_order"


def _diff(before: Sequence[Step], after: Sequence[Step]) -> list[str]:
    """Of the prompt, as a unified diff."""
    return list(difflib.unified_diff(_prompt(before), _prompt(after), "before", "after", lineterm=""))


def _prompt(steps: Sequence[Step]) -> list[str]:
    return "".join(shown(part) for step in steps if isinstance(step, Append) for part in step.parts).splitlines()


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
