"""A program as data: recorded by `trace`, rewritten by `passes`, run by `execute`.

Steps append the same expressions that programs use, with a `Hole` for a value that is unknown until run time. Steps
keep Python values, with an `Unknown` for such a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from treeline_lang.expressions import Expr, Path, Select, SeparateReasoning, Sum, flatten
from treeline_lang.sampling import Sampling
from treeline_lang.where import Where

ROOT: Final = 0
"""The stream of the program's own state."""

# ---- values ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the program, or a part of it."""

    name: str
    path: Path = ()


@dataclass(frozen=True, slots=True)
class Variable:
    """A generated variable: its stream, its name there, and which one of that name."""

    stream: int
    name: str
    nth: int = 0
    path: Path = ()


@dataclass(frozen=True, slots=True)
class Joined:
    """Joined texts. Each part must be a text, as with `+`."""

    parts: tuple[str | Argument | Variable, ...]


@dataclass(frozen=True, slots=True)
class State:
    """The state of a stream."""

    stream: int


Source = Argument | Variable
Unknown = Argument | Variable | Joined


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with everything in its lists, tuples and mappings mapped."""
    if type(value) in (list, tuple):
        return type(value)(rebuilt(one, change) for one in value)
    if isinstance(value, dict):
        return {rebuilt(key, change): rebuilt(one, change) for key, one in value.items()}
    return change(value)


def sources(value: Any) -> list[Source]:
    """The unknowns that the value depends on."""
    found: list[Source] = []

    def look(leaf: Any) -> None:
        parts = leaf.parts if isinstance(leaf, Joined) else (leaf,)
        found.extend(part for part in parts if isinstance(part, Source))

    rebuilt(value, look)
    return found


# ---- steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hole(Expr):
    """A place for an unknown value. `text`: it must be a text, since the program adds it to one; otherwise numbers are
    allowed."""

    has_text = True
    value: Source
    text: bool = False
    where: Where | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class _Step:
    stream: int = field(default=ROOT, kw_only=True)
    where: Where | None = field(default=None, compare=False, repr=False, kw_only=True)
    """The step's line in the program."""


@dataclass(frozen=True, slots=True)
class Append(_Step):
    parts: tuple[Expr, ...]
    sets: tuple[Variable, ...] = field(default=(), compare=False, repr=False, kw_only=True)
    """The variables that it generates, in order."""


@dataclass(frozen=True, slots=True)
class SetVar(_Step):
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Fork(_Step):
    children: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Join(_Step):
    """Ends streams. `appends`: appends their texts; otherwise their variables become lists."""

    children: tuple[int, ...]
    appends: bool = False


Step = Append | SetVar | Fork | Join


def parts_of(parts: Iterable[Expr], change: Callable[[Expr], Sequence[Expr]]) -> tuple[Expr, ...]:
    """Maps the parts of an expression, including those of choices and reasoning."""

    def inner(expr: Expr) -> Sum:
        return Sum(parts_of(flatten(expr), change))

    found: list[Expr] = []
    for part in parts:
        match part:
            case Select(_, choices):
                found.append(
                    replace(part, choices=tuple(one if isinstance(one, str) else inner(one) for one in choices))
                )
            case SeparateReasoning(expr):
                found.append(replace(part, expr=inner(expr)))
            case _:
                found += change(part)
    return tuple(found)


# ---- graphs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    required: bool = True
    default: Any = None


@dataclass(frozen=True, slots=True)
class Graph:
    """A program as data: steps, arguments, and the returned value."""

    name: str
    parameters: tuple[Parameter, ...]
    steps: tuple[Step, ...]
    """The steps in program order: each comes after the steps that it needs."""
    called: tuple[tuple[int, Sampling], ...] = ()
    """The streams of called programs, with their own sampling parameters. Other streams except the root begin with a
    fork."""
    returns: Any = None
    num_api_spec_tokens: int | None = None

    def of(self, stream: int) -> tuple[Step, ...]:
        """The steps of one stream."""
        return tuple(step for step in self.steps if step.stream == stream)
