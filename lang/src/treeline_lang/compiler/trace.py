"""Tracing: runs a program's function with placeholders and a recording state; the result is a `Graph`.

The state is the ordinary one, submitting to a `Recorder` instead of a `StreamExecutor`. Placeholders can be appended,
added to texts and indexed. Anything that needs their value raises TraceError, which says what to write instead.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Never, Self, cast

from treeline_lang.compiler.graph import (
    Append,
    Argument,
    Fork,
    Graph,
    Hole,
    Join,
    Joined,
    Parameter,
    SetVar,
    Source,
    State,
    Unknown,
    Variable,
    parts_of,
    rebuilt,
)
from treeline_lang.compiler.graph import Step as GraphStep
from treeline_lang.errors import ProgramError, TraceError, UnknownVariable
from treeline_lang.executor import Step, StreamExecutor
from treeline_lang.expressions import Expr, Gen, Select, SeparateReasoning, Sum, Text, flatten, names_of
from treeline_lang.sampling import Sampling
from treeline_lang.state import ProgramState
from treeline_lang.steps import Arrive, Assign, Extend
from treeline_lang.steps import Fork as ForkStep
from treeline_lang.steps import Join as JoinStep
from treeline_lang.where import caller, name_of, raised_at

_tracing: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar("treeline-tracing", default=None)
_TEXT: Final = 'append it (s += …) or add it to texts: "…" + x + "…" in place of an f-string, format() or str()'


def current() -> Tracing | None:
    """This thread's trace, if any."""
    return _tracing.get()


def _refused(verb: str) -> Callable[..., Any]:
    def method(self: Placeholder, *_: Any) -> Never:
        self.tracing.refuse(self.value, verb)

    return method


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Placeholder(Expr):
    """Stands for a value that is unknown while tracing."""

    has_text = True
    value: Unknown
    tracing: Tracing

    def __add__(self, other: Any) -> Any:
        match other:
            case str() | Placeholder():
                return self._joined(self.value, other)
            case Expr():
                return Sum((self,)) + other
            case _:
                return self.tracing.refuse(self.value, "added to a number")

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, str):
            return self._joined(other, self.value)
        return self.tracing.refuse(self.value, "added to a number")

    def _joined(self, one: Unknown | str, other: Placeholder | Unknown | str) -> Placeholder:
        sides = (one, other.value if isinstance(other, Placeholder) else other)
        parts = [part for side in sides for part in (side.parts if isinstance(side, Joined) else (side,))]
        return Placeholder(Joined(tuple(parts)), self.tracing)

    def __getitem__(self, key: Any) -> Placeholder:
        if isinstance(self.value, Joined) or isinstance(key, bool) or not isinstance(key, str | int):
            self.tracing.refuse(self.value, "sliced, or indexed with an unknown value")
        return Placeholder(replace(self.value, path=(*self.value.path, key)), self.tracing)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.tracing.refuse(self.value, f"asked for its {name}")

    def __deepcopy__(self, _memo: object) -> Self:
        """The same placeholder: a copy would not be recognised as belonging to this trace."""
        return self

    def __repr__(self) -> str:
        return f"<{described(self.value)}>"

    __str__ = _refused("turned into a text")
    __format__ = _refused("formatted")
    __bool__ = _refused("branched on")
    __eq__ = _refused("compared")
    __ne__ = _refused("compared")
    __lt__ = __le__ = __gt__ = __ge__ = _refused("compared")
    __hash__ = _refused("looked up in a set or a mapping")
    __iter__ = _refused("iterated over")
    __len__ = _refused("measured")
    __contains__ = _refused("searched")
    __int__ = __float__ = __index__ = _refused("turned into a number")
    __sub__ = __mul__ = __rmul__ = __mod__ = __truediv__ = __floordiv__ = __rsub__ = _refused("calculated with")


def described(value: Unknown) -> str:
    match value:
        case Argument(name, path):
            kind = "the argument"
        case Variable(_, name, _, path):
            kind = "the variable"
        case Joined():
            return "a text with " + " and ".join(described(part) for part in value.parts if not isinstance(part, str))
    return f"{kind} {name}" + "".join(f"[{key!r}]" for key in path)


class Recorded:
    """A variable while tracing: `value` is what reading it returns."""

    def __init__(self, tracing: Tracing, name: str, value: Any) -> None:
        self._tracing = tracing
        self.name = name
        self.value = value
        self.in_scope = False
        """The same field as in `growing.Variable`."""

    def read(self, _timeout: float | None = None) -> Any:
        self._tracing.has_read()
        return self.value

    async def read_async(self) -> Any:
        return self.read()

    def meta(self, _timeout: float | None = None) -> Never:
        self._tracing.refuse_state(f"what the backend says with {self.name!r}")

    def follow(self) -> Never:
        self._tracing.refuse_state(f"the pieces of {self.name!r}")

    follow_async = follow


class Recorder:
    """Records submitted steps, in place of a StreamExecutor."""

    returned: Any = None

    def __init__(self, tracing: Tracing, variables: Mapping[str, Recorded]) -> None:
        self.tracing = tracing
        self.number = tracing.streams
        self.variables = dict(variables)
        self._counts: dict[str, int] = {}
        self._ended = False
        tracing.streams += 1

    def submit(self, step: Step) -> None:
        if self._ended:
            self.tracing.fail("a branch goes on after its join: a compiled branch ends there")
        match step:
            case Extend():
                self._append(step)
            case Assign():
                name = step.variables[0].name
                self._keep(SetVar(name, self.tracing.value(step.value), stream=self.number, where=step.where))
                self._set(name, step.value)
            case ForkStep():
                children = tuple(cast(Recorder, child).number for child in step.children)
                self._keep(Fork(children, stream=self.number, where=step.where))
            case Arrive():
                self.tracing.arrived[step] = self.number
            case JoinStep():
                children = tuple(self.tracing.arrived[arrival] for arrival in step.arrivals)
                self._keep(Join(children, step.appends, stream=self.number, where=step.where))
                for name, parts in cast(Mapping[str, Sequence[Recorded]], step.gathered).items():
                    self._set(name, [part.value for part in parts])
            case _:
                self.tracing.fail(f"{type(step).__name__} cannot be compiled")

    def _keep(self, step: GraphStep) -> None:
        self.tracing.steps.append(step)

    def _append(self, step: Extend) -> None:
        parts = parts_of(flatten(step.expr), self.tracing.parts)
        sets = [
            self._generated(name, part.sampling.n or 1 if isinstance(part, Gen) else 1)
            for part in parts
            for name in names_of(part)
        ]
        self._keep(Append(parts, sets=tuple(sets), stream=self.number, where=step.where))
        if any(isinstance(part, Gen | Select | SeparateReasoning) for part in parts):
            self.tracing.has_asked()

    def _generated(self, name: str, count: int) -> Variable:
        variable = Variable(self.number, name, self._counts.get(name, 0))
        self._counts[name] = variable.nth + 1
        whole = Placeholder(variable, self.tracing)
        self._set(name, whole if count == 1 else [whole[index] for index in range(count)])
        return variable

    def _set(self, name: str, value: Any) -> None:
        self.variables[name] = Recorded(self.tracing, name, value)

    def variable(self, name: str, _timeout: float | None = None) -> Recorded:
        if name not in self.variables:
            known = ", ".join(self.variables) or "none"
            raise UnknownVariable(f"nothing sets the variable {name!r}; there are: {known}", where=caller())
        if self.variables[name].in_scope:
            raise UnknownVariable(f"{name!r} is the text of a scope, which has not ended", where=caller())
        return self.variables[name]

    def branch(self, count: int) -> list[Recorder]:
        return [Recorder(self.tracing, self.variables) for _ in range(count)]

    def close_alone(self) -> None:
        self._ended = True

    def sync(self) -> None:
        self.tracing.refuse_state("the text, the messages and the error of a state")

    settle = sync

    def result(self) -> Any:
        return self.returned

    @property
    def growing(self) -> Never:
        self.tracing.refuse_state("the text of a state")


class Enough(BaseException):
    """Ends a trace that has recorded enough. Not an Exception, so that a program's own handlers do not catch it."""


@dataclass
class Tracing:
    """A running trace: its steps, and why it stopped, if it did."""

    to_first_request: bool
    steps: list[GraphStep] = field(default_factory=list)
    streams: int = 0
    called: list[tuple[int, Sampling]] = field(default_factory=list)
    arrived: dict[Arrive, int] = field(default_factory=dict)
    failure: TraceError | None = None
    stopped_by: Unknown | None = None
    """The unknown value that the program needed."""

    def state(self) -> ProgramState:
        """A new state with an empty text."""
        return ProgramState(cast(StreamExecutor, Recorder(self, {})))

    def beside(self, body: Callable[..., Any], arguments: Mapping[str, Any], sampling: Sampling) -> ProgramState:
        """The streams of a program that the traced one calls."""
        self.called.append((self.streams, sampling))
        state = self.state()
        state._stream.returned = body(state, **arguments)
        return state

    # ---- what cannot be known ---------------------------------------------------------------------------------------

    def refuse(self, value: Unknown, verb: str) -> Never:
        if self.failure is None:
            self.stopped_by = value
        named = first_argument(value)
        if named is None:
            remedy = "it is known once the model has written it, so a program that looks at it is not compiled but run"
        else:
            remedy = f"or make it a constant: compile({named.name}=…)"
        self.fail(f"{described(value)} is {verb}, and it is unknown while tracing: {_TEXT}; {remedy}")

    def refuse_state(self, what: str) -> Never:
        self.fail(f"{what} are not known while a program is traced: a program that reads them is not compiled but run")

    def fail(self, reason: str) -> Never:
        error = TraceError(reason, where=caller(), step="compile")
        self.failure = self.failure or error  # the program may catch it, and go on as it never would
        raise error

    def has_read(self) -> None:
        if self.to_first_request:
            raise Enough

    has_asked = has_read

    # ---- recording -------------------------------------------------------------------------------------------

    def parts(self, part: Expr) -> Sequence[Expr]:
        """A part of an expression, with holes for placeholders."""
        match part:
            case Placeholder(Joined(pieces)):
                return [
                    Text(piece) if isinstance(piece, str) else Hole(piece, text=True, where=caller())
                    for piece in pieces
                ]
            case Placeholder(value):
                return [Hole(cast(Source, value), where=caller())]
            case _:
                for one in fields(part):
                    inner = getattr(part, one.name)
                    if isinstance(inner, Placeholder):
                        self.refuse(inner.value, f"the {one.name} of {part.step}")
                return [part]

    def value(self, value: Any) -> Any:
        """A value with placeholders replaced by the unknowns they stand for."""
        return rebuilt(value, self._leaf)

    def _leaf(self, value: Any) -> Any:
        match value:
            case Placeholder():
                return value.value
            case ProgramState() if isinstance(recorder := cast(Any, value)._stream, Recorder):
                return State(recorder.number)
            case Sum():
                return self.fail("a sum with a model call in it is appended, not kept")
            case _:
                return value


def first_argument(value: Unknown | None) -> Argument | None:
    """The first argument that a value is made of."""
    parts = value.parts if isinstance(value, Joined) else (value,)
    return next((part for part in parts if isinstance(part, Argument)), None)


@dataclass(frozen=True, slots=True)
class Traced:
    """graph: the whole program, or the part before the line where the trace stopped."""

    graph: Graph
    failure: TraceError | None = None
    stopped_by: Unknown | None = None


def trace(
    body: Callable[..., Any],
    signature: inspect.Signature,
    given: Mapping[str, Any],
    *,
    num_api_spec_tokens: int | None = None,
    to_first_request: bool = False,
) -> Traced:
    """Runs `body` once. signature: without the state; given: arguments that are constants.

    to_first_request: stops at the first model call, or the first variable that is read.
    """
    tracing = Tracing(to_first_request)
    open_ones = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.name not in given and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    parameters = [
        Parameter(one.name, one.default is one.empty, None if one.default is one.empty else one.default)
        for one in open_ones
    ]
    holes = {one.name: Placeholder(Argument(one.name), tracing) for one in open_ones}
    returns: Any = None
    token = _tracing.set(tracing)
    try:
        returns = tracing.value(body(tracing.state(), **holes, **given))
    except Enough:
        pass
    except TraceError as error:
        tracing.failure = tracing.failure or error
    except ProgramError as error:
        tracing.failure = tracing.failure or TraceError(error.reason, where=error.where, step=error.step)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}; while it is traced, a program does not know its arguments"
        tracing.failure = tracing.failure or TraceError(reason, where=raised_at(error, body), step="compile")
        tracing.failure.__cause__ = error
    finally:
        _tracing.reset(token)
    steps, called = tuple(tracing.steps), tuple(tracing.called)
    graph = Graph(name_of(body), tuple(parameters), steps, called, returns, num_api_spec_tokens)
    return Traced(graph, tracing.failure, tracing.stopped_by)
