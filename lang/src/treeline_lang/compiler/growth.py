"""How long texts can get that a program makes of its own variables, before it is run.

A text that has a variable twice, kept as a variable, had again twice, …: thirty such steps are more than a machine has
memory for. A program from a file that could do so is refused.
"""

from __future__ import annotations

from typing import Final

from treeline_lang.compiler.graph import Graph
from treeline_lang.compiler.nodes import Append, Entries, Fork, Hole, Items, Join, Joined, SetVar, Value, Variable
from treeline_lang.expressions import Expr, Gen, ScopeBegin, ScopeEnd, Select, SeparateReasoning, Sum, Text, flatten

MAX_COPIES: Final = 10_000
"""Of one model call's answer or of one argument, in the text of one stream, or in what is kept; of a constant's
characters a thousand times as many."""
_CONSTANTS: Final = 1000
_STREAMS: Final = 64
"""How many texts of that size all streams may have together."""


def check(graph: Graph) -> None:
    """Raises ValueError."""
    _Sizes(graph).check()


class _Sizes:
    """Sizes are counted in answers of a model: a constant's characters weigh a thousandth."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._text = [0.0] * len(graph.streams)
        self._at_fork = [0.0] * len(graph.streams)
        self._scopes: dict[tuple[int, str], tuple[Variable, float]] = {}
        self._variables: dict[Variable, float] = {}
        self._counts: dict[tuple[int, str], int] = {}

    def check(self) -> None:
        kept = 0.0
        for number, index in self._graph.order():
            match self._graph.streams[number].steps[index]:
                case Append(parts):
                    for part in parts:
                        self._append(number, part)
                case Fork(children):
                    for child in children:
                        self._text[child] = self._at_fork[child] = self._text[number]
                case Join(children, appends=True):
                    self._text[number] += sum(self._text[child] - self._at_fork[child] for child in children)
                case SetVar(_, value):
                    kept += self._made(value)
                case _:
                    pass
            if self._text[number] > MAX_COPIES:
                raise ValueError(f"the text of stream {number} can grow without a bound that makes sense")
        if kept + self._made(self._graph.returns) > MAX_COPIES:
            raise ValueError("what it keeps and returns can grow without a bound that makes sense")
        if sum(self._text) > MAX_COPIES * _STREAMS:
            raise ValueError("the texts of its streams can grow without a bound that makes sense")

    def _made(self, value: Value) -> float:
        """The size of the texts that are joined for a value; what else it holds exists already."""
        match value:
            case Joined(parts):
                return sum(self._size(part if isinstance(part, str) else Hole(part, where=None)) for part in parts)
            case Items(items):
                return sum(map(self._made, items))
            case Entries(entries):
                return sum(self._made(one) for entry in entries for one in entry)
            case _:
                return 0.0

    def _append(self, number: int, part: Expr) -> None:
        match part:
            case Text(text):
                self._text[number] += len(text) / _CONSTANTS
            case Hole():
                self._text[number] += self._size(part)
            case Gen(name):
                self._text[number] += 1
                self._define(number, name, 1.0)
            case Select(name, choices):
                largest = max(self._size(choice) for choice in choices)
                self._text[number] += largest
                self._define(number, name, largest)
            case SeparateReasoning(expr):
                for one in flatten(expr):
                    self._append(number, one)
            case ScopeBegin(name):
                self._scopes[number, name] = (self._define(number, name, 0.0), self._text[number])
            case ScopeEnd(name) if (number, name) in self._scopes:
                variable, start = self._scopes.pop((number, name))
                self._variables[variable] = self._text[number] - start
            case _:
                pass

    def _size(self, choice: str | Expr) -> float:
        match choice:
            case str():
                return len(choice) / _CONSTANTS
            case Text(text):
                return len(text) / _CONSTANTS
            case Hole(Variable(stream, name, nth)):
                return self._variables[Variable(stream, name, nth)]
            case Sum(parts):
                return sum(map(self._size, parts))
            case _:
                return 1.0

    def _define(self, number: int, name: str | None, size: float) -> Variable:
        key = (number, name or "")
        variable = Variable(number, name or "", self._counts.get(key, 0))
        if name is not None:
            self._counts[key] = variable.nth + 1
            self._variables[variable] = size
        return variable
