"""The state of a program: appended to, read and forked by its body."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal, Self, cast

from treeline_lang.errors import ProgramError
from treeline_lang.executor import Run, StreamExecutor
from treeline_lang.expressions import (
    Expr,
    OrderBegin,
    OrderEnd,
    Piece,
    Role,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    as_expr,
    assistant,
    check_name,
    system,
    user,
)
from treeline_lang.growing import Growing, Variable
from treeline_lang.steps import Assign, Extend, Fork, join
from treeline_lang.where import caller

JoinMode = Literal["gather_variable", "concate_and_append"]
JOIN_MODES: Final = ("gather_variable", "concate_and_append")


class ProgramState:
    """A prompt that grows. `s += …` appends without waiting. `s[name]`, `s.text()`, `s.messages()` wait for what they
    read, and raise the ProgramError of a failed step."""

    def __init__(self, stream: StreamExecutor, ended: threading.Event | None = None) -> None:
        """ended: set when the body has returned; readers in other threads wait for it where they need the whole
        program."""
        self._stream = stream
        self._ended = ended

    def __repr__(self) -> str:
        """With the text so far; does not wait."""
        return f"ProgramState({self._stream.growing.so_far!r})"

    @property
    def ret_value(self) -> Any:
        """The function's return value, once all steps are done. Raises the error that ended it."""
        with self._or_cancel():
            self._await_body()
            return self._stream.result()

    # ---- appending ----------------------------------------------------------------------------------------------

    def __iadd__(self, piece: Piece) -> Self:
        self._stream.submit(Extend(as_expr(piece), caller()))
        return self

    def system(self, content: Piece | None = None) -> Any:
        """Appends a turn; without content, a context manager around its steps."""
        return self._turn("system", system, content)

    def user(self, content: Piece | None = None) -> Any:
        return self._turn("user", user, content)

    def assistant(self, content: Piece | None = None) -> Any:
        return self._turn("assistant", assistant, content)

    def _turn(self, role: Role, whole: Callable[[Piece], Expr], content: Piece | None) -> Any:
        if content is None:
            return self._around(RoleBegin(role), RoleEnd(role))
        self += whole(content)
        return None

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """A context manager: `s[name]` becomes all text appended within. Raises TypeError if the name is not a text."""
        if not isinstance(cast(object, name), Expr):  # an argument that is not known yet: its trace refuses that
            check_name(name)
        with self._around(ScopeBegin(name), ScopeEnd(name)):
            variable = self._stream.variables[name]
            variable.in_scope = True
            try:
                yield
            finally:
                variable.in_scope = False

    def any_order(self) -> Any:
        """A context manager: the order of the steps within does not matter. A compiled program puts constants first, so
        that more prompts share them (`treeline_lang.compiler.passes.move_constants`)."""
        return self._around(OrderBegin(), OrderEnd())

    @contextmanager
    def _around(self, begin: Expr, end: Expr) -> Iterator[None]:
        self._stream.submit(Extend(begin, caller()))
        try:
            yield
        finally:
            self._stream.submit(Extend(end, caller()))

    # ---- reading ------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: object) -> bool:
        """Whether a step that sets it has been submitted."""
        if self._ended is not None and isinstance(name, str):
            with suppress(ProgramError):
                self._stream.variable(name)  # waits until it is, or the body has ended
        return name in self._stream.variables

    def get_var(self, name: str, timeout: float | None = None) -> Any:
        """Raises UnknownVariable (a KeyError), TimeoutError."""
        with self._or_cancel():
            return self._stream.variable(name, timeout).read(timeout)

    async def get_var_async(self, name: str) -> Any:
        variable = await asyncio.to_thread(self._stream.variable, name)
        return await variable.read_async()

    def set_var(self, name: str, value: Any) -> None:
        """Raises TypeError if the name is not a text."""
        check_name(name)
        self._stream.submit(Assign(name, value, caller()))

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """The backend's meta data of a variable: `finish_reason`, `prompt_tokens`, `cached_tokens`, logprobs, …; a list
        where n > 1 and after a join. Raises UnknownVariable, TimeoutError."""
        with self._or_cancel():
            return self._stream.variable(name, timeout).meta(timeout)

    @property
    def variables(self) -> dict[str, Any]:
        """All variables; waits for them."""
        self._await_body()
        return {name: variable.read() for name, variable in list(self._stream.variables.items())}

    def text(self) -> str:
        """The whole text, once all submitted steps are done."""
        self._settle()
        return self._stream.transcript.text

    def messages(self) -> list[dict[str, Any]]:
        """The finished turns in OpenAI's format."""
        self._settle()
        return list(self._stream.transcript.messages)

    def _await_body(self) -> None:
        if self._ended is not None:
            self._ended.wait()

    def _settle(self) -> None:
        with self._or_cancel():
            self._await_body()
            self._stream.settle()

    def sync(self) -> None:
        """Waits until all submitted steps are done or failed (`error`); for a parallel program, until it has ended."""
        with self._or_cancel():
            self._await_body()
            self._stream.sync()

    def error(self) -> ProgramError | None:
        """The error that ended the state early, if any; waits for all submitted steps."""
        self.sync()
        return self._stream.failure

    def cancel(self) -> None:
        """Cancels the program, on the server too; reading then raises Cancelled."""
        self._stream.run.streams.cancel()

    @contextmanager
    def _or_cancel(self) -> Iterator[None]:
        """A Ctrl-C while waiting cancels the program, not only the waiting."""
        try:
            yield
        except KeyboardInterrupt:
            self.cancel()
            raise

    # ---- following ----------------------------------------------------------------------------------------------

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Yields pieces of a variable's text, or of the whole text, as they come. Use with `stream=True`; otherwise it
        comes step by step. Raises the error that ended it."""
        with self._or_cancel():
            yield from self._grows(var_name).follow()

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """`text_iter` for `async for`. return_meta_data: yields pairs with the variable's meta data so far ({} for the
        whole text)."""
        grows = await asyncio.to_thread(self._grows, var_name)
        async for piece in grows.follow_async():
            if return_meta_data:
                yield piece, (grows.meta_so_far if isinstance(grows, Variable) else {})
            else:
                yield piece

    def _grows(self, name: str | None) -> Growing:
        return self._stream.growing if name is None else self._stream.variable(name)

    # ---- branches -----------------------------------------------------------------------------------------------

    def fork(self, size: int = 1) -> ProgramStateGroup:
        """Branches with this state's text, variables and open turn, which run in parallel. Their shared prefix is sent
        ahead once."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"a state is forked into one or more, not {size!r}")
        where = caller()
        children = self._stream.branch(size)
        self._stream.submit(Fork(children, where))
        return ProgramStateGroup([ProgramState(child) for child in children], self)

    @contextmanager
    def copy(self) -> Iterator[ProgramState]:
        """A context manager with a branch, joined at the end of the block."""
        group = self.fork(1)
        yield group[0]
        group.join()

    def _joined(self, children: Sequence[ProgramState], mode: str) -> None:
        if mode not in JOIN_MODES:
            raise ValueError(f"a join's mode is one of {', '.join(JOIN_MODES)}, not {mode!r}")
        streams = [child._stream for child in children]
        join(self._stream, streams, appends=mode == "concate_and_append", where=caller())


class ProgramStateGroup:
    """The branches of a fork."""

    def __init__(self, states: Sequence[ProgramState], parent: ProgramState) -> None:
        self._states = list(states)
        self._parent = parent

    def __iadd__(self, other: Piece | Sequence[Piece] | Callable[[int], Piece]) -> Self:
        """Appends to all branches: one expression, a list with one each, or a function of the branch's number."""
        pieces: list[Piece]
        if callable(other):
            pieces = [other(i) for i in range(len(self))]
        elif isinstance(other, list | tuple):
            pieces = list(other)
        else:
            pieces = [cast(Piece, other)] * len(self)
        if len(pieces) != len(self):
            raise ValueError(f"{len(pieces)} pieces for {len(self)} branches")
        for i, piece in enumerate(pieces):
            self._states[i] += piece
        return self

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Ends the branches. gather_variable: the parent's variables become lists of the branches' values, in order;
        concate_and_append: the branches' texts since the fork are appended to the parent's."""
        self._parent._joined(self._states, mode)

    def __getitem__(self, index: int) -> ProgramState:
        return self._states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """For `group[i] += …`, which also assigns."""
        if state is not self._states[index]:
            raise TypeError("branches of a fork cannot be replaced; append to them")

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)


def state_of(run: Run) -> ProgramState:
    return ProgramState(StreamExecutor(run))
