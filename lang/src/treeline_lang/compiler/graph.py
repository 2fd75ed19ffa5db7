"""What a trace records (`trace`), passes rewrite (`passes`) and streams execute (`execute`): a program as data.

What a step appends is made of the same expressions that programs are written in; what is known only when it runs is a
`Hole`. What a step keeps is a value of Python; what is known only when it runs is an `Unknown` in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from treeline_lang.expressions import Expr, Path, Select, SeparateReasoning, Sum, flatten
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
class State:
    """The state that a stream is."""

    stream: int


Source = Argument | Variable
Unknown = Argument | Variable | Joined


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with what is in its lists, tuples and mappings changed."""
    if type(value) in (list, tuple):
        return type(value)(rebuilt(one, change) for one in value)
    if isinstance(value, dict):
        return {rebuilt(key, change): rebuilt(one, change) for key, one in value.items()}
    return change(value)


def sources(value: Any) -> list[Source]:
    """What must be known for the value to be."""
    found: list[Source] = []

    def look(leaf: Any) -> None:
        parts = leaf.parts if isinstance(leaf, Joined) else (leaf,)
        found.extend(part for part in parts if isinstance(part, Source))

    rebuilt(value, look)
    return found


# ---- steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hole(Expr):
    """Where a value is appended that is not known yet. `text`: it must be one, since the program adds it to a text;
    otherwise a number will do."""

    has_text = True
    value: Source
    text: bool = False
    where: Where | None = field(default=None, compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class _Step:
    stream: int = field(default=ROOT, kw_only=True)
    where: Where | None = field(default=None, compare=False, repr=False, kw_only=True)
    """Its line in the program."""


@dataclass(frozen=True, slots=True)
class Append(_Step):
    parts: tuple[Expr, ...]
    sets: tuple[Variable, ...] = field(default=(), compare=False, repr=False, kw_only=True)
    """The variables that it fills with what the model writes, in order."""


@dataclass(frozen=True, slots=True)
class SetVar(_Step):
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Fork(_Step):
    children: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Join(_Step):
    """Joins streams, which end here. `appends`: their texts are appended; otherwise their variables become lists."""

    children: tuple[int, ...]
    appends: bool = False


Step = Append | SetVar | Fork | Join


def parts_of(parts: Iterable[Expr], change: Callable[[Expr], Sequence[Expr]]) -> tuple[Expr, ...]:
    """The parts of an expression, each changed into some; those of choices and of reasoning, too."""

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
    """A program as data: its steps, what it is run with, and what it returns."""

    name: str
    parameters: tuple[Parameter, ...]
    steps: tuple[Step, ...]
    """In the order of the program, so each comes after all that it needs."""
    called: tuple[tuple[int, Sampling], ...] = ()
    """The streams of programs that the body called, with sampling parameters of their own. The others but for the root
    begin with a fork."""
    returns: Any = None
    num_api_spec_tokens: int | None = None

    def of(self, stream: int) -> tuple[Step, ...]:
        """The steps of one stream."""
        return tuple(step for step in self.steps if step.stream == stream)
