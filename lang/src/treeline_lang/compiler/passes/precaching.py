"""Pre-caching: constants with which a stream begins are cached once ahead of a batch, those of programs that the body
calls too, which an interpreter does not come to before it runs."""

from __future__ import annotations

from dataclasses import replace

from treeline_lang.compiler.graph import Graph
from treeline_lang.compiler.passes.base import Report, beginning
from treeline_lang.expressions import Text
from treeline_lang.ordering import MIN_SHARED


def precache(graph: Graph) -> tuple[Graph, Report]:
    forked = graph.parents()
    beginnings, lines = [], []
    for number, stream in enumerate(graph.streams):
        if number in forked:
            continue
        parts = beginning(stream, arguments=False)
        length = sum(len(part.text) for part in parts if isinstance(part, Text))
        if length > MIN_SHARED:
            beginnings.append(parts)
            lines.append(f"stream {number}: its first {length} characters are the same in all runs")
    return replace(graph, beginnings=tuple(dict.fromkeys(beginnings))), Report("pre-caching", tuple(lines))
