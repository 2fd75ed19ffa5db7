"""Executes a graph: submits its steps to the streams without running the function.

All steps are submitted at once, in program order. A step waits in its own stream for the values it needs.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treeline_lang import growing
from treeline_lang.compiler.graph import (
    ROOT,
    Append,
    Argument,
    Fork,
    Graph,
    Hole,
    Join,
    Joined,
    SetVar,
    Source,
    State,
    Step,
    Variable,
    parts_of,
    rebuilt,
    sources,
)
from treeline_lang.compiler.trace import Recorder
from treeline_lang.errors import WrongArgument
from treeline_lang.executor import Step as StreamStep
from treeline_lang.executor import StreamExecutor
from treeline_lang.expressions import Expr, Sum, Text, at_path, characters_of, flatten
from treeline_lang.state import ProgramState
from treeline_lang.steps import Assign, Extend, Read, join
from treeline_lang.steps import Fork as ForkStep
from treeline_lang.where import Where


class GraphBody:
    """A graph as a program's body, called with the same arguments as the function."""

    def __init__(self, graph: Graph, source: Callable[..., Any]) -> None:
        """source: the function, with the same parameters."""
        self.graph = graph
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
        """Raises WrongArgument, and the error of any variable that the body would have read."""
        stream: Any = state._stream
        if isinstance(stream, Recorder):
            return self._source(state, **arguments)
        execution = _Execution(self.graph, state, arguments)
        try:
            for step in self.graph.steps:
                execution.submit(step)
        finally:
            execution.close()
        for source in execution.reads:
            execution.known(source)
        return execution.value(self.graph.returns)


class _Execution:
    def __init__(self, graph: Graph, state: ProgramState, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._generated: dict[Variable, growing.Variable] = {}
        run = state._stream.run
        self._called = {number: StreamExecutor(run.beside(sampling)) for number, sampling in graph.called}
        self._streams = {ROOT: state._stream, **self._called}
        self._states = {ROOT: state}
        self.reads: list[Variable] = []
        """The generated variables that the steps read."""

    def submit(self, step: Step) -> None:
        stream, where = self._streams[step.stream], step.where
        match step:
            case Append(parts):
                extend = Extend(Sum(parts_of(parts, self._filled)), where)
                self._generated.update(zip(step.sets, extend.variables, strict=False))
                stream.submit(extend)
            case SetVar(name, value):
                needed = [source for source in sources(value) if isinstance(source, Variable)]
                self.reads += needed
                stream.submit(Compute(name, value, self, where) if needed else Assign(name, self.value(value), where))
            case Fork(children):
                branches = stream.branch(len(children))
                self._streams.update(zip(children, branches, strict=True))
                stream.submit(ForkStep(branches, where))
            case Join(children, appends):
                join(stream, [self._streams[child] for child in children], appends=appends, where=where)

    def close(self) -> None:
        """Ends the programs that the body called."""
        for stream in self._called.values():
            stream.close()

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _filled(self, part: Expr) -> Sequence[Expr]:
        """The part with its holes filled; variables that are not set yet become reads."""
        match part:
            case Hole(Variable() as variable, text, where=where):
                self.reads.append(variable)
                return (Read(self._variable(variable), variable.path, text, where),)
            case Hole(Argument() as argument, text, where=where):
                return self._argument(argument, text, where)
            case _:
                return (part,)

    def _argument(self, argument: Argument, text: bool, where: Where | None) -> Sequence[Expr]:
        value = self.known(argument, where)
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

    def _variable(self, variable: Variable) -> growing.Variable:
        return self._generated[Variable(variable.stream, variable.name, variable.nth)]

    # ---- values -----------------------------------------------------------------------------------------------------

    def known(self, source: Source, where: Where | None = None) -> Any:
        """The value of a variable; waits for it. Raises its failure, or WrongArgument."""
        if isinstance(source, Variable):
            return at_path(self._variable(source).read(), source.path)
        try:
            return at_path(self._arguments[source.name], source.path)
        except (LookupError, TypeError) as error:
            path = "".join(f"[{key!r}]" for key in source.path)
            reason = f"{source.name}{path}: {type(error).__name__}: {error}"
            raise WrongArgument(reason, where=where) from None

    async def wait(self, value: Any) -> None:
        """Waits until everything that the value needs is set."""
        for source in sources(value):
            if isinstance(source, Variable):
                await self._variable(source).wait_async()

    def value(self, value: Any) -> Any:
        return rebuilt(value, self._leaf)

    def _leaf(self, value: Any) -> Any:
        match value:
            case Argument() | Variable():
                return self.known(value)
            case Joined(parts):
                return "".join(part if isinstance(part, str) else self._text(part) for part in parts)
            case State(number):
                return self._states.setdefault(number, ProgramState(self._streams[number]))
            case _:
                return value

    def _text(self, source: Source) -> str:
        text = self.known(source)
        if not isinstance(text, str):
            raise WrongArgument(_not_a_text(source, text))
        return text


def _not_a_text(source: Source, value: object) -> str:
    kind = "argument" if isinstance(source, Argument) else "variable"
    return f"the {kind} {source.name!r} is added to a text, and it is {value!r}: only a text can be"


class Compute(StreamStep):
    """`set_var` of a value made of variables; waits for them."""

    name = "set_var"

    def __init__(self, name: str, value: Any, execution: _Execution, where: Where | None) -> None:
        self.where = where
        self._value = value
        self._execution = execution
        self.variables = [growing.Variable(name)]

    async def do(self, stream: StreamExecutor) -> None:
        await self._execution.wait(self._value)
        self.variables[0].set(self._execution.value(self._value))
