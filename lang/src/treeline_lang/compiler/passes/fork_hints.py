"""Fork hints: what all branches of a fork begin with is cached with the text before, and nobody waits for that but
their first model calls.

An interpreter sees a fork before it sees what the branches append, so its hint ends at the fork, and the branches wait
for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treeline_lang.compiler.graph import Graph
from treeline_lang.compiler.nodes import Fork
from treeline_lang.compiler.passes.base import Report, beginning, shown, with_step
from treeline_lang.expressions import Expr, Text
from treeline_lang.ordering import shared_length


def hint_forks(graph: Graph) -> tuple[Graph, Report]:
    lines = []
    for number, stream in enumerate(graph.streams):
        for index, step in enumerate(stream.steps):
            if isinstance(step, Fork) and len(step.children) > 1:
                hint = common([beginning(graph.streams[child], arguments=True) for child in step.children])
                graph = with_step(graph, number, index, replace(step, hint=hint, ahead=True))
                more = f", with {''.join(map(shown, hint))!r}" if hint else ""
                lines.append(f"{step.where or 'fork'}: {len(step.children)} branches do not wait for their hint{more}")
    return graph, Report("fork hints", tuple(lines))


def common(beginnings: Sequence[Sequence[Expr]]) -> tuple[Expr, ...]:
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
