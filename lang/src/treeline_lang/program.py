"""Programs: functions over a state, and running them."""

from __future__ import annotations

import contextvars
import functools
import inspect
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, Literal, Self, overload

from treeline_lang import background, batch, ordering
from treeline_lang.backends.base import Backend, Call, default_backend
from treeline_lang.compiler import trace
from treeline_lang.compiler.execute import GraphBody
from treeline_lang.compiler.graph import Graph
from treeline_lang.compiler.passes import DEFAULT_PASSES, Pass, Report
from treeline_lang.errors import Cancelled, ProgramError, TraceError
from treeline_lang.executor import Run
from treeline_lang.sampling import Sampling, check_sampling
from treeline_lang.state import ProgramState, state_of
from treeline_lang.transcript import Prompt
from treeline_lang.where import name_of, raised_at

SAMPLING_NAMES = frozenset({field.name for field in fields(Sampling)} - {"dtype", "regex", "json_schema"}) | {
    "max_new_tokens"
}
_running: contextvars.ContextVar[Run | None] = contextvars.ContextVar("treeline-run", default=None)


class Function:
    """A program, made by `@function` of a Python function whose first parameter is the state.

        state = program.run(topic="trees", backend=backend, temperature=0)

    Sampling parameters given to `run` are defaults for every `gen`; a parameter of the function with the same name
    takes precedence.
    """

    def __init__(
        self, body: Callable[..., Any], num_api_spec_tokens: int | None = None, bound: Mapping[str, Any] | None = None
    ) -> None:
        """Raises TypeError for functions that cannot be programs, ValueError for a wrong number of tokens."""
        signature = _checked_signature(body)
        if num_api_spec_tokens is not None and num_api_spec_tokens < 1:
            raise ValueError(f"num_api_spec_tokens is at least 1, not {num_api_spec_tokens!r}")
        self.body = body
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bound = dict(bound or {})
        self._signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        functools.update_wrapper(self, body, updated=())
        self.__name__ = name_of(body)

    @property
    def func(self) -> Callable[..., Any]:
        """The body, under SGLang's name."""
        return self.body

    def __reduce__(self) -> Any:
        """Pickled by name, like functions; the other process imports its module."""
        if self.bound:
            raise pickle.PicklingError(f"{self.__name__} has bound arguments: pickle the program, and bind there")
        return getattr(self, "__qualname__", self.__name__)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        return f"<program {self.__name__}{self._signature}>"

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The body's arguments by name. Raises TypeError for unknown and missing ones."""
        try:
            bound = self._signature.bind(*args, **{**self.bound, **kwargs})
        except TypeError as error:
            raise TypeError(f"{self.__name__}{self._signature}: {error}") from None
        bound.apply_defaults()
        flat = dict(bound.arguments)
        for parameter in self._signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                flat.update(flat.pop(parameter.name))
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and flat.get(parameter.name):
                raise TypeError(f"{self.__name__}: programs have no *{parameter.name}")
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                flat.pop(parameter.name, None)
        return flat

    def bind(self, **arguments: Any) -> Self:
        """The same program with some arguments fixed."""
        unknown = arguments.keys() - self._signature.parameters.keys()
        open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in self._signature.parameters.values())
        if unknown and not open_ended:
            raise TypeError(f"{self.__name__}{self._signature} has no parameter {sorted(unknown)[0]!r}")
        program = object.__new__(type(self))
        program.__dict__.update(self.__dict__, bound={**self.bound, **arguments})
        return program

    # ---- ahead of running ---------------------------------------------------------------------------------------

    def traced(self, arguments: Mapping[str, Any], *, to_first_request: bool = False) -> trace.Traced:
        """The trace with these arguments as constants (`treeline_lang.compiler.trace`)."""
        return trace.trace(
            self.body,
            self._signature,
            {**self.bound, **arguments},
            num_api_spec_tokens=self.num_api_spec_tokens,
            to_first_request=to_first_request,
        )

    def trace(self, **static: Any) -> Graph:
        """The program as data. static: constant arguments, on which it may branch; the others become holes. Raises
        TraceError with the line that needs an unknown value; TypeError.

        Parameters with default None, True or False are constants too, since `x is None` cannot be traced.
        """
        self.bind(**static)
        traced = self.traced(self._switches() | self.bound | static)
        if traced.failure is not None:
            raise traced.failure
        return traced.graph

    def compile(self, *, passes: Sequence[Pass] = DEFAULT_PASSES, strict: bool = False, **static: Any) -> Compiled:
        """Compiles to a program that gives the same results without running the function again. static: constant
        arguments.

        If it cannot be traced, the function runs as before, and `fallback` says why; with strict it raises TraceError.
        Raises TypeError.
        """
        constants = self._switches() | self.bound | static
        try:
            graph = self.trace(**static)
        except TraceError as error:
            if strict:
                raise
            compiled = Compiled(self.body, self.num_api_spec_tokens, self.bound | static)
            compiled.fallback = str(error)
            return compiled
        reports = []
        for one in passes:
            graph, report = one(graph)
            reports.append(report)
        body = GraphBody(graph, lambda state, **rest: self.body(state, **constants, **rest))
        compiled = Compiled(body, self.num_api_spec_tokens)
        compiled.graph, compiled.reports, compiled.__doc__ = graph, tuple(reports), self.__doc__
        return compiled

    def _switches(self) -> dict[str, Any]:
        parameters = self._signature.parameters.values()
        return {one.name: one.default for one in parameters if one.default is None or isinstance(one.default, bool)}

    def cache(self, *, backend: Backend | None = None, **arguments: Any) -> str:
        """Caches the beginning that all runs share, up to the first argument without default or value. Returns that
        text; "" if they share none. Raises BackendError, Unsupported, TypeError."""
        self.bind(**arguments)
        run = self.new_run(backend, Sampling())
        parameters = self._signature.parameters.values()
        usual = {one.name: one.default for one in parameters if one.default is not one.empty}
        constants = usual | self.bound | arguments
        graph = self.traced(constants, to_first_request=True).graph
        [text] = ordering.beginnings(graph, [constants], run.backend)
        if text:
            background.call(run.backend.warm(Prompt(text), run.call))
        return text

    # ---- running ------------------------------------------------------------------------------------------------

    def run(
        self,
        *args: Any,
        backend: Backend | None = None,
        stream: bool = False,
        hints: bool = True,
        parallel: bool = True,
        **kwargs: Any,
    ) -> ProgramState:
        """Runs the program and returns its state. Its last steps may still be running; reading waits for them.

        stream: return at once, with growing texts (`text_iter`). hints=False: send no prefixes ahead. parallel=False:
        one step at a time. Raises the body's exceptions, including ProgramErrors of what it reads.
        """
        kwargs, sampling = self.split(kwargs)
        run = self.new_run(backend, sampling, stream=stream, hints=hints, parallel=parallel)
        return self.start(run, self.arguments(args, kwargs), waits=not stream)

    def split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Sampling]:
        """Returns (arguments of the body, sampling parameters). Raises TypeError, ValueError."""
        mine = {name for name in kwargs if name not in SAMPLING_NAMES or name in self._signature.parameters}
        sampling = check_sampling(**{name: value for name, value in kwargs.items() if name not in mine})
        return {name: kwargs[name] for name in mine}, sampling

    def new_run(
        self,
        backend: Backend | None,
        sampling: Sampling,
        *,
        stream: bool = False,
        hints: bool = True,
        parallel: bool = True,
    ) -> Run:
        """Raises Unsupported without a backend."""
        call = Call(uuid.uuid4().hex, self.num_api_spec_tokens)
        return Run(backend or default_backend(), sampling, stream, hints, parallel, call)

    def start(self, run: Run, arguments: Mapping[str, Any], *, waits: bool) -> ProgramState:
        """Runs the body in this thread (`waits`) or another."""
        state = state_of(run)
        if waits:
            try:
                self.run_body(state, arguments)
            except BaseException as error:
                if not isinstance(error, Exception):  # a Ctrl-C
                    run.streams.cancel()
                raise
            return state

        def body() -> None:
            with suppress(Exception):  # the state raises it when it is read
                try:
                    self.run_body(state, arguments)
                finally:
                    ended.set()

        state._stream.owner = None
        ended = threading.Event()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(body,), name=f"program {self.__name__}", daemon=True).start()
        return ProgramState(state._stream, ended)

    def run_body(self, state: ProgramState, arguments: Mapping[str, Any]) -> None:
        stream = state._stream
        stream.owner = threading.get_ident()
        token = _running.set(stream.run)
        failure: ProgramError | None = Cancelled("interrupted")
        try:
            stream.returned = self._call(state, arguments)
            failure = None
        except ProgramError as error:
            failure = error
            raise
        except Exception as error:
            failure = _of_body(error, self.body)
            raise
        finally:
            _running.reset(token)
            stream.close(failure)

    def _call(self, state: ProgramState, arguments: Mapping[str, Any]) -> Any:
        returned = self.body(state, **arguments)
        if inspect.iscoroutine(returned):
            returned.close()
            raise TypeError(f"{self.__name__}: {_NOT_ASYNC}")
        return returned

    @overload
    def run_batch(
        self, items: Sequence[Any], *, generator_style: Literal[False] = False, **options: Any
    ) -> list[ProgramState]: ...
    @overload
    def run_batch(
        self, items: Sequence[Any], *, generator_style: Literal[True], **options: Any
    ) -> Iterator[ProgramState]: ...
    def run_batch(
        self,
        items: Sequence[Any],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        backend: Backend | None = None,
        hints: bool = True,
        parallel: bool = True,
        order: batch.Order = "dfs",
        **kwargs: Any,
    ) -> Any:
        """Runs the program once for each of many arguments (mappings or tuples), many at a time. Returns the ended
        states in order; a failed one has an `error()` and raises it when read.

        generator_style: yields them in order as they end. order: "dfs" runs programs with the same beginning together
        and sends the common beginning ahead; "given" does neither. kwargs: sampling parameters, and arguments common to
        all. Raises TypeError before any starts.
        """
        common, sampling = self.split(kwargs)
        program = self.bind(**common) if common else self
        states = batch.run_all(
            program,
            [program.arguments(*_item(item)) for item in items],
            lambda: program.new_run(backend, sampling, hints=hints, parallel=parallel),
            order=order,
            num_threads=num_threads,
            progress_bar=progress_bar,
        )
        return states if generator_style else list(states)

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Inside a program: with its state, continues it; without, runs in parallel and returns the state at once (when
        done, if the run is not parallel). Outside a program: `run`."""
        if args and isinstance(args[0], ProgramState):
            state = args[0]
            state._stream.returned = self._call(state, self.arguments(args[1:], kwargs))
            return state
        tracing = trace.current()
        if tracing is not None:
            kwargs, sampling = self.split(kwargs)
            return tracing.beside(self.body, self.arguments(args, kwargs), sampling)
        outer = _running.get()
        if outer is None:
            return self.run(*args, **kwargs)
        kwargs, sampling = self.split(kwargs)
        run, arguments = outer.beside(sampling, self.num_api_spec_tokens), self.arguments(args, kwargs)
        if run.parallel:
            return self.start(run, arguments, waits=False)
        state = state_of(run)
        with suppress(Exception):  # the state raises it when it is read
            self.run_body(state, arguments)
        return state


class Compiled(Function):
    """A compiled program, run like any other."""

    graph: Graph | None = None
    """None if it is interpreted."""
    fallback: str | None = None
    """Why it is interpreted, with the line."""
    reports: tuple[Report, ...] = ()
    """The report of each pass."""

    def traced(self, arguments: Mapping[str, Any], *, to_first_request: bool = False) -> trace.Traced:
        if self.graph is None:
            return super().traced(arguments, to_first_request=to_first_request)
        return trace.Traced(self.graph)


def _item(item: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(item, Mapping):
        return (), item
    if isinstance(item, tuple | list):
        return item, {}
    raise TypeError(f"an item of a batch is a mapping of arguments or a tuple of them, not {item!r}")


_NOT_ASYNC = (
    "a program is a plain def: its steps do not wait, and run() can be awaited as asyncio.to_thread(program.run, …)"
)


def _checked_signature(body: Callable[..., Any]) -> inspect.Signature:
    """Raises TypeError for functions that cannot be programs."""
    if not callable(body):
        raise TypeError(f"@function takes a function, not {body!r}: @classmethod and the like go above it")
    name = name_of(body)
    kinds = (body, type(body).__call__)
    if any(inspect.iscoroutinefunction(kind) or inspect.isasyncgenfunction(kind) for kind in kinds):
        raise TypeError(f"{name}: {_NOT_ASYNC}")
    if any(inspect.isgeneratorfunction(kind) for kind in kinds):
        raise TypeError(f"{name}: a program does not yield; to follow its text, read text_iter()")
    signature = inspect.signature(body)
    parameters = [*signature.parameters.values()]
    first = parameters[0] if parameters else None
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise TypeError(f"{name}: the first parameter of a program is its state: def {name}(s, …)")
    if first.name in ("self", "cls"):
        raise TypeError(
            f"{name}: the first parameter of a program is its state; of a method: function({first.name}.{name})"
        )
    if any(one.kind is one.POSITIONAL_ONLY for one in parameters[1:]):
        raise TypeError(f"{name}: the parameters of a program have names: without the /")
    return signature


def _of_body(error: Exception, body: Callable[..., Any]) -> ProgramError:
    """An error of the program's own code, with its line."""
    failure = ProgramError(f"{type(error).__name__}: {error}", where=raised_at(error, body), step="the program")
    failure.__cause__ = error
    return failure


@overload
def function(body: Callable[..., Any]) -> Function: ...
@overload
def function(*, num_api_spec_tokens: int | None = None) -> Callable[[Callable[..., Any]], Function]: ...
def function(body: Callable[..., Any] | None = None, *, num_api_spec_tokens: int | None = None) -> Any:
    """Makes a program of a function whose first parameter is the state.

    num_api_spec_tokens: each call asks for at least this many tokens, beyond its stop, and later steps use them where
    they fit; in a chat, an assistant turn with several gens is one call (`treeline_lang.speculation`).
    """
    if body is not None:
        return Function(body)
    return lambda body: Function(body, num_api_spec_tokens)
