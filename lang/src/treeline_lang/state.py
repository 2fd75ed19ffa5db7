"""The state of a program: what its body appends to, reads from and forks."""

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
    """A prompt that grows. `s += …` appends without waiting; `s[name]`, `s.text()`, `s.messages()` wait for what they
    read, and raise the ProgramError of the step that failed."""

    def __init__(self, stream: StreamExecutor, ended: threading.Event | None = None) -> None:
        """ended: set once the body has returned, where this is for those outside of one in another thread: they wait
        for it with what only an ended program has."""
        self._stream = stream
        self._ended = ended

    def __repr__(self) -> str:
        """With the text so far: it does not wait."""
        return f"ProgramState({self._stream.growing.so_far!r})"

    @property
    def ret_value(self) -> Any:
        """What the program's function returned, once all that was submitted is done. Raises what ended it."""
        with self._or_cancel():
            self._await_body()
            return self._stream.result()

    # ---- appending ----------------------------------------------------------------------------------------------

    def __iadd__(self, piece: Piece) -> Self:
        self._stream.submit(Extend(as_expr(piece), caller()))
        return self

    def system(self, content: Piece | None = None) -> Any:
        """Appends a turn; without content, a context manager around the steps of one."""
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
        """A context manager: `s[name]` is all the text appended within. Raises TypeError for a name that is no text."""
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
        """A context manager: the steps within mean the same in any order. A compiled program appends constants first,
        which more prompts share (`treeline_lang.compiler.passes.move_constants`); otherwise nothing changes."""
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
        """Raises TypeError for a name that is no text."""
        check_name(name)
        self._stream.submit(Assign(name, value, caller()))

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """What the backend said with a variable: `finish_reason`, `prompt_tokens`, `cached_tokens`, logprobs, … A list
        of them where n > 1 and after a join. Raises UnknownVariable, TimeoutError."""
        with self._or_cancel():
            return self._stream.variable(name, timeout).meta(timeout)

    @property
    def variables(self) -> dict[str, Any]:
        """All that are set, once they are."""
        self._await_body()
        return {name: variable.read() for name, variable in list(self._stream.variables.items())}

    def text(self) -> str:
        """The whole text, once all that was submitted is done."""
        self._settle()
        return self._stream.transcript.text

    def messages(self) -> list[dict[str, Any]]:
        """The turns that have ended, as OpenAI's API has them."""
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
        """Wait until all that was submitted is done, or was given up (`error`); of a program that runs beside, until
        it has ended."""
        with self._or_cancel():
            self._await_body()
            self._stream.sync()

    def error(self) -> ProgramError | None:
        """Why the state ended early, if it did, once all that was submitted is done."""
        self.sync()
        return self._stream.failure

    def cancel(self) -> None:
        """Gives up what the program does and has yet to do, on the server, too: reading raises Cancelled."""
        self._stream.run.streams.cancel()

    @contextmanager
    def _or_cancel(self) -> Iterator[None]:
        """A Ctrl-C while waiting ends the program, and not the waiting alone."""
        try:
            yield
        except KeyboardInterrupt:
            self.cancel()
            raise

    # ---- following ----------------------------------------------------------------------------------------------

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Pieces of a variable's text as they come, or of the whole until the program ends. Run with `stream=True`;
        else it comes step by step. Raises the error that ends it."""
        with self._or_cancel():
            yield from self._grows(var_name).follow()

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """`text_iter` for `async for`. return_meta_data: pairs with what the backend has said
        of the variable so far (of the whole text: {})."""
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
        """New states with the text, the variables and the open turn of this one, which go on side by side. Before
        that the prefix that they share is sent to the server once."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"a state is forked into one or more, not {size!r}")
        where = caller()
        children = self._stream.branch(size)
        self._stream.submit(Fork(children, where))
        return ProgramStateGroup([ProgramState(child) for child in children], self)

    @contextmanager
    def copy(self) -> Iterator[ProgramState]:
        """A branch for a while: what it sets is joined at the end of the block."""
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
        """The same for all, a list with one for each, or a function of the branch's number."""
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
        """Ends the branches. gather_variable: each variable that they set becomes a list in the parent, in their order;
        concate_and_append: what each wrote since the fork is appended to the parent's text, in their order."""
        self._parent._joined(self._states, mode)

    def __getitem__(self, index: int) -> ProgramState:
        return self._states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """For `group[i] += …`, which assigns what it appended to."""
        if state is not self._states[index]:
            raise TypeError("the branches of a fork are what they are; append to them")

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)


def state_of(run: Run) -> ProgramState:
    return ProgramState(StreamExecutor(run))
