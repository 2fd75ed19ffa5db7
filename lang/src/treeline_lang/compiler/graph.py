"""A program as data: streams of steps, what it is run with, and what it returns.

A `Graph` is what a trace records (`trace`), passes rewrite (`passes`), a file holds (`serialize`), streams execute
(`execute`) and a picture shows (`draw`).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treeline_lang.compiler import draw
from treeline_lang.compiler.nodes import (
    ROOT,
    Append,
    Argument,
    Const,
    Fork,
    Join,
    Place,
    SetVar,
    Step,
    Value,
    Variable,
    reads,
    sources,
    states,
)
from treeline_lang.expressions import Expr, ScopeBegin, ScopeEnd, names_of
from treeline_lang.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Stream:
    """Steps in their order. One that no `Fork` names begins by itself, with an empty text; but for the root, it is a
    program that the body called, with sampling parameters of its own."""

    steps: tuple[Step, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    required: bool = True
    default: Any = None


@dataclass(frozen=True, slots=True)
class Graph:
    name: str
    parameters: tuple[Parameter, ...]
    streams: tuple[Stream, ...]
    returns: Value = field(default_factory=lambda: Const(None))
    num_api_spec_tokens: int | None = None
    beginnings: tuple[tuple[Expr, ...], ...] = ()
    """Constants with which streams begin that begin by themselves: cached once ahead of a batch."""

    def definitions(self) -> dict[Variable, Place]:
        """Which step makes which variable known: the text of a scope is at its end."""
        places: dict[Variable, Place] = {}
        for number, stream in enumerate(self.streams):
            counts: dict[str, int] = {}
            scopes: dict[str, Variable] = {}
            for index, step in enumerate(stream.steps):
                for part in step.parts if isinstance(step, Append) else ():
                    for name in names_of(part):
                        variable = Variable(number, name, counts.get(name, 0))
                        counts[name] = variable.nth + 1
                        if isinstance(part, ScopeBegin):
                            scopes[name] = variable
                        else:
                            places[variable] = (number, index)
                    if isinstance(part, ScopeEnd) and part.name in scopes:
                        places[scopes.pop(part.name)] = (number, index)
        return places

    def parents(self) -> Mapping[int, Place]:
        """Of each stream that a fork begins: that fork. Raises ValueError where two do."""
        found: dict[int, Place] = {}
        for number, stream in enumerate(self.streams):
            for index, step in enumerate(stream.steps):
                for child in step.children if isinstance(step, Fork) else ():
                    if child in found or child == ROOT or not 0 <= child < len(self.streams):
                        raise ValueError(f"stream {child} cannot be forked from stream {number}")
                    found[child] = (number, index)
        return found

    def order(self) -> list[Place]:
        """The steps so that each comes after all that it needs: those before it in its stream, the fork that begins its
        stream, the steps that generate what it reads, the streams that it joins. Of several that could be next, the one
        of the lowest stream is. Raises ValueError where there is no such order.
        """
        needs = self.needs()
        followers: dict[Place, list[Place]] = {}
        missing = {place: len(others) for place, others in needs.items()}
        for place, others in needs.items():
            for other in others:
                followers.setdefault(other, []).append(place)
        ready = [place for place, count in missing.items() if not count]
        heapq.heapify(ready)
        ordered: list[Place] = []
        while ready:
            place = heapq.heappop(ready)
            ordered.append(place)
            for follower in followers.get(place, ()):
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(ready, follower)
        if len(ordered) < len(needs):
            raise ValueError("the steps wait for each other in a circle")
        return ordered

    def check(self) -> None:
        """Raises ValueError for a graph that cannot be executed."""
        parents, places = self.parents(), self.definitions()
        joined: set[int] = set()
        values = [self.returns]
        for number, stream in enumerate(self.streams):
            for step in stream.steps:
                if isinstance(step, SetVar):
                    values.append(step.value)
                for child in step.children if isinstance(step, Join) else ():
                    if child in joined or child not in parents or parents[child][0] != number:
                        raise ValueError(f"stream {child} cannot be joined to stream {number}")
                    joined.add(child)
        for value in values:
            for source in sources(value):
                if isinstance(source, Variable):
                    self._place(source, places)
        if any(not 0 <= state < len(self.streams) for value in values for state in states(value)):
            raise ValueError("it returns a state that there is not")
        given = {parameter.name for parameter in self.parameters}
        steps = (step for stream in self.streams for step in stream.steps)
        needed = (*(one for step in steps for one in reads(step)), *(one for value in values for one in sources(value)))
        missing = [one.name for one in needed if isinstance(one, Argument) and one.name not in given]
        if missing:
            raise ValueError(f"it needs an argument {missing[0]!r}, and has no such parameter")
        self.order()

    def draw(self) -> str:
        """A picture of it, as SVG: streams are columns, steps are boxes."""
        return draw.picture(self)

    def _repr_svg_(self) -> str:
        """For notebooks."""
        return self.draw()

    def needs(self) -> dict[Place, set[Place]]:
        parents, places = self.parents(), self.definitions()
        needs: dict[Place, set[Place]] = {}
        for number, stream in enumerate(self.streams):
            for index, step in enumerate(stream.steps):
                needs[number, index] = mine = (
                    {(number, index - 1)} if index else {parents[number]} if number in parents else set()
                )
                for source in reads(step):
                    if isinstance(source, Variable):
                        mine.add(self._place(source, places))
                for child in step.children if isinstance(step, Join) else ():
                    if child not in parents:
                        raise ValueError(f"stream {child} is joined, and no fork begins it")
                    last = len(self.streams[child].steps) - 1
                    mine.add((child, last) if last >= 0 else parents[child])
        return needs

    def _place(self, variable: Variable, places: Mapping[Variable, Place]) -> Place:
        whole = Variable(variable.stream, variable.name, variable.nth)
        if whole not in places:
            raise ValueError(f"nothing generates the variable {variable.name!r} of stream {variable.stream}")
        return places[whole]
