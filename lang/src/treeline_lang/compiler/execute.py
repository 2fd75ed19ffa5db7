"""Runs a graph: what a body would have submitted is submitted to the same streams, without the body.

All steps are submitted at once, in an order in which each comes after what it needs; a step that appends or keeps a
variable waits for it in its own stream.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from treeline_lang import growing
from treeline_lang.compiler.graph import Graph
from treeline_lang.compiler.nodes import (
    ROOT,
    Append,
    Argument,
    Const,
    Entries,
    Fork,
    Hole,
    Items,
    Join,
    Joined,
    SetVar,
    State,
    Value,
    Variable,
    generates,
    reads,
    sources,
)
from treeline_lang.compiler.trace import Recorder
from treeline_lang.errors import WrongArgument
from treeline_lang.executor import Step, StreamExecutor
from treeline_lang.expressions import Expr, Select, SeparateReasoning, Sum, Text, at_path, characters_of, flatten
from treeline_lang.state import ProgramState
from treeline_lang.steps import Assign, Extend, Read, join
from treeline_lang.steps import Fork as ForkStep
from treeline_lang.where import Where


class GraphBody:
    """A graph as the body of a program: called with a state and arguments, as the function was that it comes from."""

    def __init__(self, graph: Graph, source: Callable[..., Any] | None = None) -> None:
        """source: the function, with the same parameters. Raises ValueError for a graph that cannot be executed."""
        self.graph = graph
        self.order = graph.order()
        self._source = source
        self.__name__ = graph.name
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = sorted(graph.parameters, key=lambda parameter: not parameter.required)
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter("s", kind),
                *(
                    inspect.Parameter(one.name, kind, default=inspect.Parameter.empty if one.required else one.default)
                    for one in parameters
                ),
            ]
        )

    def __call__(self, state: ProgramState, /, **arguments: Any) -> Any:
        """Raises WrongArgument; and what the body would have raised where it reads: the failure of a variable."""
        recorder: Any = state._stream
        if isinstance(recorder, Recorder):
            if self._source is None:
                recorder.tracing.fail("a program from a file is run, and not compiled again within another one")
            return self._source(state, **arguments)
        execution = _Execution(self.graph, state, arguments)
        try:
            for number, index in self.order:
                execution.submit(number, self.graph.streams[number].steps[index])
        finally:
            execution.close()
        for number, index in self.order:
            for source in reads(self.graph.streams[number].steps[index]):
                execution.known(source)
        return execution.value(self.graph.returns)


class _Execution:
    def __init__(self, graph: Graph, state: ProgramState, arguments: Mapping[str, Any]) -> None:
        self._graph = graph
        self._arguments = arguments
        self._generated: dict[Variable, growing.Variable] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._states: dict[int, ProgramState] = {ROOT: state}
        run = state._stream.run
        called = set(range(1, len(graph.streams))) - graph.parents().keys()
        for number in sorted(called):
            self._states[number] = ProgramState(StreamExecutor(run.beside(graph.streams[number].sampling)))
        self._called = called

    def submit(self, number: int, step: Any) -> None:
        stream = self._stream(number)
        match step:
            case Append(parts, where=where):
                extend = Extend(Sum(tuple(filled for part in parts for filled in self._filled(part))), where)
                for name, variable in zip(generates(step), extend.variables, strict=False):
                    nth = self._counts.get((number, name), 0)
                    self._counts[number, name] = nth + 1
                    self._generated[Variable(number, name, nth)] = variable
                stream.submit(extend)
            case SetVar(name, value, where=where):
                waits = any(isinstance(source, Variable) for source in sources(value))
                stream.submit(Compute(name, value, self, where) if waits else Assign(name, self.value(value), where))
            case Fork():
                self._fork(stream, step)
            case Join(children, appends, where=where):
                join(stream, [self._stream(child) for child in children], appends=appends, where=where)

    def _fork(self, stream: StreamExecutor, step: Fork) -> None:
        branches = stream.branch(len(step.children))
        self._states |= {child: ProgramState(one) for child, one in zip(step.children, branches, strict=True)}
        stream.submit(ForkStep(branches, step.where))

    def close(self) -> None:
        """The programs that the body called have ended."""
        for number in self._called:
            self._stream(number).close()

    def _stream(self, number: int) -> StreamExecutor:
        return self._states[number]._stream

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _filled(self, part: Expr) -> tuple[Expr, ...]:
        """A part without holes, but for reading variables that are not there yet."""
        match part:
            case Hole(Variable() as variable, text, where=where):
                return (Read(self._variable(variable), variable.path, text, where),)
            case Hole(Argument() as argument, text, where=where):
                return self._argument(argument, text, where)
            case Select(_, choices):
                return (replace(part, choices=tuple(self._choice(choice) for choice in choices)),)
            case SeparateReasoning(expr):
                return (replace(part, expr=Sum(tuple(one for inner in flatten(expr) for one in self._filled(inner)))),)
            case _:
                return (part,)

    def _argument(self, argument: Argument, text: bool, where: Where | None) -> tuple[Expr, ...]:
        value = self.argument(argument, where)
        if text and not isinstance(value, str | Expr):
            raise WrongArgument(_not_a_text(argument, value), where=where)
        if isinstance(value, Expr):
            return flatten(value)
        if not isinstance(value, str | numbers.Number):
            reason = (
                f"the argument {argument.name!r} is appended, and it is {value!r}: texts, numbers and expressions are"
            )
            raise WrongArgument(reason, where=where)
        return (Text(characters_of(value), where=where),)

    def _choice(self, choice: str | Expr) -> str | Expr:
        if isinstance(choice, str):
            return choice
        parts = tuple(filled for part in flatten(choice) for filled in self._filled(part))
        if len(parts) == 1 and isinstance(parts[0], Text):
            return parts[0].text
        return Sum(parts)

    def _variable(self, variable: Variable) -> growing.Variable:
        return self._generated[replace(variable, path=())]

    # ---- values -----------------------------------------------------------------------------------------------------

    def argument(self, argument: Argument, where: Where | None = None) -> Any:
        try:
            return at_path(self._arguments[argument.name], argument.path)
        except (LookupError, TypeError) as error:
            path = "".join(f"[{key!r}]" for key in argument.path)
            reason = f"{argument.name}{path}: {type(error).__name__}: {error}"
            raise WrongArgument(reason, where=where) from None

    def known(self, source: Argument | Variable) -> Any:
        """Waits for a variable. Raises its failure."""
        if isinstance(source, Argument):
            return self.argument(source)
        return at_path(self._variable(source).read(), source.path)

    async def wait(self, value: Value) -> None:
        """Until all that the value needs is there."""
        for source in sources(value):
            if isinstance(source, Variable):
                await self._variable(source).wait_async()

    def value(self, value: Value) -> Any:
        match value:
            case Argument() | Variable():
                return self.known(value)
            case Joined(parts):
                return "".join(part if isinstance(part, str) else self._text(part) for part in parts)
            case Const(constant):
                return constant
            case Items(items, mutable):
                return (list if mutable else tuple)(self.value(item) for item in items)
            case Entries(entries):
                return {self.value(key): self.value(entry) for key, entry in entries}
            case State(number):
                return self._states[number]

    def _text(self, source: Argument | Variable) -> str:
        text = self.known(source)
        if not isinstance(text, str):
            raise WrongArgument(_not_a_text(source, text))
        return text


def _not_a_text(source: Argument | Variable, value: object) -> str:
    kind = "argument" if isinstance(source, Argument) else "variable"
    return f"the {kind} {source.name!r} is added to a text, and it is {value!r}: only a text can be"


class Compute(Step):
    """`set_var` of a value that has variables in it: once they are there."""

    name = "set_var"

    def __init__(self, name: str, value: Value, execution: _Execution, where: Where | None) -> None:
        self.where = where
        self._value = value
        self._execution = execution
        self.variables = [growing.Variable(name)]

    async def do(self, stream: StreamExecutor) -> None:
        await self._execution.wait(self._value)
        self.variables[0].set(self._execution.value(self._value))
