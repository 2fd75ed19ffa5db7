"""What graphs of programs are made of: values that are not all known before a program runs, steps, streams.

What a step appends is made of the same expressions that programs are written in; what is known only when it runs is a
`Hole`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from treeline_lang.expressions import Expr, Path, ScopeBegin, ScopeEnd, Select, SeparateReasoning, Sum, names_of
from treeline_lang.sampling import Sampling
from treeline_lang.where import Where

ROOT: Final = 0
"""The number of the stream that the program's own state is."""

# ---- values ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Argument:
    """One that the program is run with, or a part of it."""

    name: str
    path: Path = ()


@dataclass(frozen=True, slots=True)
class Variable:
    """What a step has generated: by the number of its stream, its name there, and which of those of this name."""

    stream: int
    name: str
    nth: int = 0
    path: Path = ()


@dataclass(frozen=True, slots=True)
class Joined:
    """Texts one after the other. Each part must be a text when it is known, as `+` of a text takes nothing else."""

    parts: tuple[str | Argument | Variable, ...]


@dataclass(frozen=True, slots=True)
class Const:
    value: Any


@dataclass(frozen=True, slots=True)
class Items:
    """A list, or a tuple."""

    items: tuple[Value, ...]
    mutable: bool = True


@dataclass(frozen=True, slots=True)
class Entries:
    """A mapping."""

    entries: tuple[tuple[Value, Value], ...]


@dataclass(frozen=True, slots=True)
class State:
    """The state that a stream is."""

    stream: int


Unknown = Argument | Variable | Joined
Value = Argument | Variable | Joined | Const | Items | Entries | State


def leaves(value: Value | str) -> Iterator[Argument | Variable | State]:
    """What a value is made of, but for constants."""
    match value:
        case Argument() | Variable() | State():
            yield value
        case Joined(parts):
            for part in parts:
                yield from leaves(part)
        case Items(items):
            for item in items:
                yield from leaves(item)
        case Entries(entries):
            for key, entry in entries:
                yield from (*leaves(key), *leaves(entry))
        case _:
            pass


def sources(value: Value) -> Iterator[Argument | Variable]:
    """What must be known for the value to be."""
    return (leaf for leaf in leaves(value) if not isinstance(leaf, State))


# ---- steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hole(Expr):
    """Where a value is appended that is not known yet. `text`: it must be one, since the program adds it to a text;
    otherwise a number will do."""

    has_text = True
    value: Argument | Variable
    text: bool = False
    where: Where | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class _Located:
    """A step that knows its line in the program."""

    where: Where | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Append(_Located):
    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class SetVar(_Located):
    name: str
    value: Value


@dataclass(frozen=True, slots=True)
class Fork(_Located):
    children: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Join(_Located):
    """Joins streams, which end here. `appends`: their texts are appended; otherwise their variables become lists."""

    children: tuple[int, ...]
    appends: bool = False


Step = Append | SetVar | Fork | Join
Place = tuple[int, int]
"""(number of a stream, index of a step in it)."""


def parts_within(parts: Iterable[Expr]) -> Iterator[Expr]:
    """All parts, those of choices and of reasoning too."""
    for part in parts:
        yield part
        match part:
            case Sum(inner):
                yield from parts_within(inner)
            case Select(_, choices):
                yield from parts_within(choice for choice in choices if isinstance(choice, Expr))
            case SeparateReasoning(expr):
                yield from parts_within((expr,))
            case _:
                pass


def reads(step: Step) -> Iterator[Argument | Variable]:
    """What a step needs to know."""
    match step:
        case Append(parts):
            yield from (part.value for part in parts_within(parts) if isinstance(part, Hole))
        case SetVar(_, value):
            yield from sources(value)
        case _:
            pass


def generates(step: Step) -> tuple[str, ...]:
    """The names of the variables that a step fills with what the model writes, in order."""
    return names_of(Sum(step.parts)) if isinstance(step, Append) else ()


# ---- graphs ---------------------------------------------------------------------------------------------------------


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
class GraphData:
    """A program as data: streams of steps, what it is run with, and what it returns."""

    name: str
    parameters: tuple[Parameter, ...]
    streams: tuple[Stream, ...]
    returns: Value = field(default_factory=lambda: Const(None))
    num_api_spec_tokens: int | None = None

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
        """The fork that begins each stream, by the number of the stream. Raises ValueError where two do."""
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
        held = [leaf.stream for value in values for leaf in leaves(value) if isinstance(leaf, State)]
        if any(not 0 <= number < len(self.streams) for number in held):
            raise ValueError("it returns a state that there is not")
        given = {parameter.name for parameter in self.parameters}
        steps = (step for stream in self.streams for step in stream.steps)
        needed = (*(one for step in steps for one in reads(step)), *(one for value in values for one in sources(value)))
        missing = [one.name for one in needed if isinstance(one, Argument) and one.name not in given]
        if missing:
            raise ValueError(f"it needs an argument {missing[0]!r}, and has no such parameter")
        self.order()

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
