"""Batching: model calls of sibling branches that are ready at once go out as one request.

A branch is ready at once if its first model call is a `gen` of one answer, and all before it is known when the fork is.
"""

from __future__ import annotations

from dataclasses import replace

from treeline_lang.compiler.graph import Graph, Stream
from treeline_lang.compiler.nodes import Fork
from treeline_lang.compiler.passes.base import Report, known_at_once, leading, with_step
from treeline_lang.expressions import Gen


def batch_siblings(graph: Graph) -> tuple[Graph, Report]:
    lines = []
    for number, stream in enumerate(graph.streams):
        for index, step in enumerate(stream.steps):
            if not isinstance(step, Fork):
                continue
            ready = tuple(child for child in step.children if _ready(graph.streams[child]))
            if len(ready) > 1:
                graph = with_step(graph, number, index, replace(step, together=ready))
                lines.append(f"{step.where or 'fork'}: the first calls of {len(ready)} branches are one request")
    return graph, Report("batching", tuple(lines))


def _ready(stream: Stream) -> bool:
    first = next((part for part in leading(stream) if not known_at_once(part, arguments=True)), None)
    return isinstance(first, Gen) and first.sampling.n in (None, 1) and not first.sampling.stop_regex
