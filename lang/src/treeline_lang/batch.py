"""Runs a program with many arguments: threads for the bodies, results in order."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from treeline_lang import background
from treeline_lang.executor import Run
from treeline_lang.ordering import plan_batch
from treeline_lang.state import ProgramState, state_of
from treeline_lang.transcript import Prompt

if TYPE_CHECKING:
    from treeline_lang.program import Function

Order = Literal["dfs", "given"]
ORDERS: Final = ("dfs", "given")


def thread_count(asked: int | Literal["auto"], items: int) -> int:
    """Number of threads; more than cores, since bodies mostly wait. Raises ValueError."""
    if asked == "auto":
        asked = max(96, 16 * (os.cpu_count() or 1))
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise ValueError(f"num_threads is 1 or more, or 'auto', not {asked!r}")
    return min(asked, items)


def run_all(
    program: Function,
    arguments: Sequence[Mapping[str, Any]],
    new_run: Callable[[], Run],
    *,
    order: Order,
    num_threads: int | Literal["auto"],
    progress_bar: bool,
) -> Iterator[ProgramState]:
    """The states in the order of the arguments, each as soon as it and those before have ended. Leaving early, or an
    interrupt, ends the others. Raises ValueError at once; Unsupported without a backend."""
    if order not in ORDERS:
        raise ValueError(f"order is one of {', '.join(ORDERS)}, not {order!r}")
    runs = [new_run() for _ in arguments]
    threads = thread_count(num_threads, len(runs)) if runs else 0
    return _states(program, arguments, runs, order, threads, Progress(len(runs), program.__name__, shown=progress_bar))


def _states(
    program: Function,
    arguments: Sequence[Mapping[str, Any]],
    runs: Sequence[Run],
    order: Order,
    threads: int,
    progress: Progress,
) -> Iterator[ProgramState]:
    if not runs:
        return
    started: Sequence[int] = range(len(runs))
    if order == "dfs":
        started, shared = plan_batch(program, arguments, runs[0], threads)
        if shared:
            background.call(runs[0].send_ahead(Prompt(shared)))

    def one(index: int) -> ProgramState:
        """Runs one to its end; errors stay in its state."""
        state = state_of(runs[index])
        with suppress(BaseException):  # the state keeps the error; a SystemExit must not end this thread
            program.run_body(state, arguments[index])
        runs[index].streams.sync()
        return state

    waiting, ended = queue.SimpleQueue[int](), queue.SimpleQueue[tuple[int, ProgramState]]()
    stopped = threading.Event()

    def work() -> None:
        with suppress(queue.Empty):
            while not stopped.is_set():
                index = waiting.get_nowait()
                ended.put((index, one(index)))

    for index in started:
        waiting.put(index)
    try:
        with progress:
            for number in range(threads):  # daemons: a body that hangs in code of its own does not keep the process
                threading.Thread(target=work, name=f"programs {number}", daemon=True).start()
            states: dict[int, ProgramState] = {}
            for following in range(len(runs)):
                while following not in states:
                    index, state = ended.get()
                    states[index] = state
                    progress.advance()
                yield states.pop(following)
    finally:
        stopped.set()
        for run in runs:
            run.streams.cancel()


class Progress:
    """Counts ended programs: on a terminal in one changing line, elsewhere in a line at the end."""

    def __init__(self, total: int, name: str, *, shown: bool) -> None:
        self._total, self._name, self._shown = total, name, shown
        self._done = 0
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._write("\n")

    def advance(self) -> None:
        self._done += 1
        if self._shown and sys.stderr.isatty():
            self._write("\r")

    def _write(self, end: str) -> None:
        sys.stderr.write(f"{self._name}: {self._done}/{self._total}, {time.monotonic() - self._started:.0f} s{end}")
        sys.stderr.flush()
