"""What graphs of programs are made of: values that are not all known before a program runs, and steps.

What a step appends is made of the same expressions that programs are written in; what is known only when it runs is a
`Hole`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from treeline_lang.expressions import Expr, Select, SeparateReasoning, Sum, names_of
from treeline_lang.where import Where

Path = tuple[str | int, ...]
"""Keys and indices into a value, outermost first."""
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


def sources(value: Value | str) -> Iterator[Argument | Variable]:
    """What must be known for the value to be."""
    match value:
        case Argument() | Variable():
            yield value
        case Joined(parts):
            for part in parts:
                yield from sources(part)
        case Items(items):
            for item in items:
                yield from sources(item)
        case Entries(entries):
            for key, entry in entries:
                yield from (*sources(key), *sources(entry))
        case _:
            pass


def states(value: Value) -> Iterator[int]:
    """The streams that the value holds as states."""
    match value:
        case State(stream):
            yield stream
        case Items(items):
            for item in items:
                yield from states(item)
        case Entries(entries):
            for key, entry in entries:
                yield from (*states(key), *states(entry))
        case _:
            pass


def at_path(value: Any, path: Path) -> Any:
    """A part of a value. Raises LookupError and TypeError as indexing does."""
    for key in path:
        value = value[key]
    return value


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
class Append:
    parts: tuple[Expr, ...]
    where: Where | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SetVar:
    name: str
    value: Value
    where: Where | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Fork:
    children: tuple[int, ...]
    hint: tuple[Expr, ...] = ()
    """What all children begin with: cached with the text before."""
    ahead: bool = False
    """Children begin before it is cached; their first model calls wait for it."""
    together: tuple[int, ...] = ()
    """Children whose first model calls are sent as one request."""
    where: Where | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Join:
    """Of streams that end here. `appends`: their texts are appended; otherwise their variables become lists."""

    children: tuple[int, ...]
    appends: bool = False
    where: Where | None = field(default=None, compare=False, repr=False)


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
        case Fork(_, hint):
            yield from (part.value for part in hint if isinstance(part, Hole))
        case _:
            pass


def generates(step: Step) -> tuple[str, ...]:
    """The names of the variables that a step fills with what the model writes, in order."""
    return names_of(Sum(step.parts)) if isinstance(step, Append) else ()
