"""A program as data, which a trace records (`trace`), passes rewrite (`passes`), a file holds (`serialize`), streams
execute (`execute`) and a picture shows (`draw`)."""

from __future__ import annotations

from dataclasses import dataclass

from treeline_lang.compiler import draw
from treeline_lang.compiler.nodes import GraphData


@dataclass(frozen=True, slots=True)
class Graph(GraphData):
    """A program as data, with its picture."""

    def draw(self) -> str:
        """A picture of it, as SVG: streams are columns, steps are boxes."""
        return draw.picture(self)

    def _repr_svg_(self) -> str:
        """For notebooks."""
        return self.draw()
