"""A stream: the executor of a state. It takes steps without making the submitter wait and runs them in order; different
streams run in parallel.

A variable exists once its step is submitted; reading it waits for the value. A failed step ends its stream: later steps
do not run, and their variables raise the same error.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from treeline_lang import background
from treeline_lang.backends.base import Backend, Call
from treeline_lang.errors import Cancelled, ProgramError, UnknownVariable
from treeline_lang.growing import Growing, Variable
from treeline_lang.sampling import Sampling
from treeline_lang.speculation import Ahead
from treeline_lang.transcript import Prompt, Transcript
from treeline_lang.where import Where

HINT_S: Final = 30.0
"""Seconds that requests wait for their hint; then they compute the shared prefix themselves."""
DEEPEST: Final = 200
"""Nested programs each need a thread."""


class Step(ABC):
    """A step submitted to a stream."""

    name: str = ""
    """The program's name in errors."""
    where: Where | None = None
    variables: Sequence[Variable] = ()
    """The variables that it sets."""

    @abstractmethod
    async def do(self, stream: StreamExecutor) -> None: ...

    def do_late(self) -> bool:
        """Runs on a program that has ended. False if that is impossible."""
        return False

    def abandon(self, failure: ProgramError) -> None:
        """Called if the step will not run, or not to its end."""
        for variable in self.variables:
            variable.fail(failure)


class Mark(Step):
    """Set when a stream reaches this step, or never will."""

    def __init__(self, reached: Callable[[], None]) -> None:
        self._reached = reached

    async def do(self, stream: StreamExecutor) -> None:
        self._reached()

    def abandon(self, failure: ProgramError) -> None:
        self._reached()


class Streams:
    """The streams of a run, which are cancelled together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: weakref.WeakSet[StreamExecutor] = weakref.WeakSet()
        self._cancelled = False

    def add(self, stream: StreamExecutor) -> None:
        with self._lock:
            self._members.add(stream)
            cancelled = self._cancelled
        if cancelled:
            stream.cancel()

    def cancel(self) -> None:
        """Cancels requests in flight and all waiting and later steps. Finished steps stay."""
        with self._lock:
            self._cancelled = True
            members = list(self._members)
        for stream in members:
            stream.cancel()

    def sync(self) -> None:
        """Waits until all submitted steps have run or failed, including branches that were not joined."""
        with self._lock:
            members = list(self._members)
        for stream in members:
            stream.sync()


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a program, with all its streams."""

    backend: Backend
    defaults: Sampling = field(default_factory=Sampling)
    streaming: bool = False
    hints: bool = True
    """Whether shared prefixes are sent ahead of branches."""
    parallel: bool = True
    """False: submitting waits until the step is done."""
    call: Call = field(default_factory=Call)
    depth: int = 0
    """The nesting depth of this program in others."""
    streams: Streams = field(default_factory=Streams)

    async def send_ahead(self, prompt: Prompt, children: int = 1) -> None:
        """Sends a hint; returns when the prompt is cached for so many requests, or the hint has failed. A failed hint
        costs only time."""
        with suppress(Exception):
            async with asyncio.timeout(HINT_S):
                await self.backend.warm(prompt, self.call, children)

    def beside(self, sampling: Sampling, num_api_spec_tokens: int | None = None) -> Run:
        """A run of a program called within this one, cancelled together with it. Raises RecursionError."""
        tokens = self.call.num_api_spec_tokens if num_api_spec_tokens is None else num_api_spec_tokens
        call = replace(self.call, num_api_spec_tokens=tokens)
        if self.depth == DEEPEST:
            raise RecursionError(f"{DEEPEST} programs call each other, one inside the other")
        return replace(self, defaults=sampling.over(self.defaults), call=call, depth=self.depth + 1)


class StreamExecutor:
    """The executor of one stream. Methods without `_` are for the threads of programs; the others run on the loop."""

    def __init__(self, run: Run, variables: dict[str, Variable] | None = None, *, waits: bool = False) -> None:
        """variables: the forked state's, if any. waits: runs nothing before `start`."""
        self.run = run
        self.variables = dict(variables or {})
        self.transcript = Transcript()
        self.growing = Growing()
        """The whole text."""
        self.returned: Any = None
        """The value that the body returned."""
        self.scopes: dict[str, tuple[Variable, int]] = {}
        """Open ones: variable, where its text begins."""
        self.step: tuple[Where | None, str] = (None, "")
        """The place and name of the step that runs."""
        self.failure: ProgramError | None = None
        self.forked = Transcript()
        """The transcript at the fork."""
        self.ahead = Ahead()
        """Text generated beyond the stream's position."""
        self._children: list[StreamExecutor] = []
        self.owner: int | None = threading.get_ident()
        """The thread that submits steps (None: not yet begun). If it reads a variable before it has submitted the step
        that sets it, the value can never come."""
        self._declared = threading.Condition()
        self._open = True
        """Whether more steps may be submitted."""
        self.ended_by: ProgramError | None = None
        """Why no more do, where the body did not end well."""
        self._inbox: deque[Step] = deque()
        self._over = False
        """The last step is done."""
        self._waits = self._is_branch = waits
        self._task: asyncio.Task[None] | None = None
        run.streams.add(self)

    # ---- threads of programs ------------------------------------------------------------------------------------

    def submit(self, step: Step) -> None:
        """Does not wait, unless the run is not parallel. Raises ProgramError after `close`."""
        with self._declared:
            late = not self._open
            if late and (self._is_branch or not step.do_late()):
                reason = "nothing can be appended any more: the program has ended, or the branch was joined"
                refusal = ProgramError(reason, where=step.where, step=step.name)
                background.post(step.abandon, refusal)  # so that its branches and variables fail instead of waiting
                raise refusal.again()
            self.variables.update({variable.name: variable for variable in step.variables})
            self._declared.notify_all()
        if late:
            return
        background.post(self._put, step)
        if not self.run.parallel:
            self.sync()

    def variable(self, name: str, timeout: float | None = None) -> Variable:
        """Waits for a body in another thread that may still set it. Raises UnknownVariable, TimeoutError."""
        mine = threading.get_ident() == self.owner
        with self._declared:
            if not self._declared.wait_for(lambda: name in self.variables or mine or not self._open, timeout):
                raise TimeoutError(f"the program has not come to {name!r} within {timeout:g} s")
            if name in self.variables:
                variable = self.variables[name]
                if variable.in_scope and mine:
                    raise UnknownVariable(f"{name!r} is the text of a scope, which has not ended")
                return variable
            known = ", ".join(self.variables) or "none"
        if failure := self.failure or self.ended_by:
            raise failure.again()
        raise UnknownVariable(f"nothing sets the variable {name!r}; there are: {known}")

    def branch(self, count: int) -> list[StreamExecutor]:
        """New streams that wait for a step of this one to start them."""
        children = [StreamExecutor(self.run, self.variables, waits=True) for _ in range(count)]
        self._children += children
        return children

    def sync(self) -> None:
        """Waits until everything submitted so far has run or failed."""
        done = threading.Event()
        background.post(self._put, Mark(done.set))
        done.wait()

    def settle(self) -> None:
        """`sync`, then raises the error that ended the program early, if any."""
        self.sync()
        if self.failure is not None:
            raise self.failure.again()

    def result(self) -> Any:
        """The body's return value. Waits and raises like `settle`."""
        self.settle()
        return self.returned

    def close(self, failure: ProgramError | None = None) -> None:
        """The body has ended; no more steps will come. failure: its error, if any."""
        closing = [self]
        while closing:  # forks of forks may be deeper than Python's stack
            stream = closing.pop()
            if stream._open:
                stream.close_alone(failure)
            closing += stream._children

    def close_alone(self, failure: ProgramError | None = None) -> None:
        """Ends a joined stream, but not its own unjoined branches."""
        with self._declared:
            self._open, self.ended_by = False, failure
            self._declared.notify_all()
        background.post(self._put, Mark(lambda: self._end(failure)))

    def cancel(self) -> None:
        background.post(self._cancel)
        background.wake()

    # ---- the loop -----------------------------------------------------------------------------------------------

    def start(self, transcript: Transcript) -> None:
        """Starts a waiting stream with this text."""
        self.transcript, self.forked = transcript, transcript.copy()
        self.growing.grow(transcript.text)
        self._waits = False
        self._go_on()

    def fail(self, failure: ProgramError) -> None:
        """Fails the stream: this step and the next ones do not run."""
        self._waits = False
        if self.failure is None:
            self.failure = failure
        for variable, _ in self.scopes.values():
            variable.fail(self.failure)
        self.growing.fail(self.failure)  # first: the mark of the body's end may be among the steps, and ends it well
        while self._inbox:
            self._inbox.popleft().abandon(self.failure)

    def show(self, coming: str = "") -> None:
        """Shows progress to readers of the text. coming: text that is not in the transcript yet."""
        self.growing.grow(self.transcript.text, coming)

    def _put(self, step: Step) -> None:
        if self.failure is not None:
            step.abandon(self.failure)
            return
        self._inbox.append(step)
        self._go_on()

    def _go_on(self) -> None:
        if self._task is None and not self._waits and self._inbox:
            self._task = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        while self._inbox:
            step = self._inbox.popleft()
            self.step = (step.where, step.name)
            try:
                await step.do(self)
            except asyncio.CancelledError:
                self._stop(step, Cancelled("interrupted"))
            except ProgramError as error:  # perhaps of several streams, each with its own line
                self._stop(step, error.again())
            except Exception as error:
                failure = ProgramError(f"{type(error).__name__}: {error}")
                failure.__cause__ = error
                self._stop(step, failure)
        self._task = None

    def _stop(self, step: Step, failure: ProgramError) -> None:
        failure.at(*self.step)
        step.abandon(failure)
        self.fail(failure)

    def _end(self, failure: ProgramError | None) -> None:
        self._over = True
        if failure is not None:
            self.fail(failure)
        for variable, _ in self.scopes.values():
            variable.fail(ProgramError("the program ended within the scope", step=f"var_scope({variable.name!r})"))
        self.growing.end()

    def _cancel(self) -> None:
        if self._over:
            return
        failure = Cancelled("interrupted")
        if self._task is not None:  # which may not have begun, and then does nothing at all
            self._task.cancel()
            failure.at(*self.step)
        self.fail(failure)
