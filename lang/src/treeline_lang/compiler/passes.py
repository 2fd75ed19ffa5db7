"""Passes: functions from a graph to a graph and a report."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from treeline_lang.compiler.graph import Append, Argument, Graph, Hole, Step
from treeline_lang.expressions import Expr, OrderBegin, OrderEnd, RoleBegin, RoleEnd, Text


@dataclass(frozen=True, slots=True)
class Report:
    """lines: the changes, and the parts left unchanged with the reason; empty if there was nothing to do."""

    name: str
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.name}:", *(f"  {line}" for line in self.lines or ("nothing to do",))])


Pass = Callable[[Graph], tuple[Graph, Report]]
"""Never changes its argument."""


def move_constants(graph: Graph) -> tuple[Graph, Report]:
    """Moves constants to the front of regions whose order is free, so that runs share more of their prefix.

        with s.any_order():
            s += "Here is a question: " + question + "\\n"
            s += "Act as an expert and answer in one sentence.\\n"

    Each `+=` moves as a whole: constants first, then texts with arguments, then texts with variables. A region that
    contains anything else, such as a model call, is left alone.
    """
    lines: list[str] = []
    steps = list(graph.steps)
    for region in _regions(graph):
        marker, *within = region
        before = [steps[index] for index in within]
        obstacle = next((part for step in before for part in _foreign(step)), None)
        if obstacle is not None:
            lines.append(f"{_place(steps[marker])}: left alone, as it holds {obstacle}")
            continue
        after = sorted(before, key=_known_late)
        if after != before:
            for index, step in zip(within, after, strict=True):
                steps[index] = step
            lines += [f"{_place(steps[marker])}: constants come first", *_diff(before, after)]
    return replace(graph, steps=tuple(steps)), Report("code movement", tuple(lines))


def _regions(graph: Graph) -> Iterator[list[int]]:
    """Innermost regions: the step that begins each, and the steps within."""
    begun: dict[int, list[int]] = {}
    for index, step in enumerate(graph.steps):
        if _is_marker(step, OrderBegin):
            begun[step.stream] = [index]
        elif _is_marker(step, OrderEnd) and step.stream in begun:
            yield begun.pop(step.stream)
        elif step.stream in begun:
            begun[step.stream].append(index)


def _is_marker(step: Step, kind: type[Expr]) -> bool:
    return isinstance(step, Append) and len(step.parts) == 1 and isinstance(step.parts[0], kind)


def _foreign(step: Step) -> Iterator[str]:
    """Names the parts of a step that cannot be moved."""
    if not isinstance(step, Append):
        yield f"a {type(step).__name__.lower()}"
        return
    yield from (_shown(part) for part in step.parts if not isinstance(part, Text | Hole))


def _known_late(step: Step) -> int:
    """0: constant for all runs; 1: with an argument; 2: with a variable."""
    holes = [part.value for part in step.parts if isinstance(part, Hole)] if isinstance(step, Append) else []
    return max((1 if isinstance(value, Argument) else 2 for value in holes), default=0)


def _place(step: Step) -> str:
    return str(step.where) if step.where else "any_order"


def _diff(before: Sequence[Step], after: Sequence[Step]) -> list[str]:
    """The change of the prompt as a unified diff."""
    return list(difflib.unified_diff(_prompt(before), _prompt(after), "before", "after", lineterm=""))


def _prompt(steps: Sequence[Step]) -> list[str]:
    return "".join(_shown(part) for step in steps if isinstance(step, Append) for part in step.parts).splitlines()


def _shown(part: Expr) -> str:
    """A part in readable form."""
    match part:
        case Text(text):
            return text
        case Hole(value):
            return "{" + value.name + "".join(f"[{key!r}]" for key in value.path) + "}"
        case RoleBegin(role) | RoleEnd(role):
            return f"<{'/' if isinstance(part, RoleEnd) else ''}{role}>"
        case _:
            return f"<{part.step}>"


DEFAULT_PASSES: Final[tuple[Pass, ...]] = (move_constants,)
