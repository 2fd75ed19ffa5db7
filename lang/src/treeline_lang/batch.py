"""A program run with many arguments: threads for the bodies, results in order."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, Protocol, Self

from treeline_lang.executor import Run
from treeline_lang.ordering import Plan, Traceable, plan_batch
from treeline_lang.state import ProgramState, state_of

Order = Literal["dfs", "given"]
ORDERS: Final = ("dfs", "given")
_WIDTH: Final = 30
"""Characters of the progress bar."""
_EVERY_S: Final = 0.1


def thread_count(asked: int | Literal["auto"], items: int) -> int:
    """Bodies mostly wait, so there are many more than cores. Raises ValueError."""
    if asked == "auto":
        asked = max(96, 16 * (os.cpu_count() or 1))
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise ValueError(f"num_threads is 1 or more, or 'auto', not {asked!r}")
    return min(asked, items)


class Program(Traceable, Protocol):
    """What is run of a program."""

    __name__: str

    def run_body(self, state: ProgramState, arguments: Mapping[str, Any]) -> None: ...


class Jobs:
    """The runs of one program, each with its own arguments."""

    def __init__(
        self, program: Program, arguments: Sequence[Mapping[str, Any]], new_run: Callable[[], Run], order: Order
    ) -> None:
        """Raises ValueError for an order that there is not; Unsupported if there is no backend."""
        if order not in ORDERS:
            raise ValueError(f"order is one of {', '.join(ORDERS)}, not {order!r}")
        self._program = program
        self._arguments = arguments
        self._runs = [new_run() for _ in arguments]
        self._order = order
        self._plan = Plan(range(len(self._runs)))
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[int, ProgramState]] = queue.SimpleQueue()
        self._stopped = False

    def run(self, num_threads: int | Literal["auto"], progress_bar: bool) -> Iterator[ProgramState]:
        """The states, in the order of the arguments, each as soon as it and those before have ended. Leaving early,
        or an interrupt, ends the others."""
        threads = thread_count(num_threads, len(self._runs)) if self._runs else 0
        return self._results(threads, Progress(len(self._runs), self._program.__name__, shown=progress_bar))

    def _results(self, threads: int, progress: Progress) -> Iterator[ProgramState]:
        if not self._runs:
            return
        if self._order == "dfs":
            self._plan = plan_batch(self._program, self._arguments, self._runs[0], threads)
        for index in self._plan.order:
            self._waiting.put(index)
        try:
            with progress:
                for number in range(threads):
                    threading.Thread(target=self._work, name=f"programs {number}", daemon=True).start()
                yield from self._in_order(progress)
        finally:
            self._stop()

    def _in_order(self, progress: Progress) -> Iterator[ProgramState]:
        ended: dict[int, ProgramState] = {}
        for index in range(len(self._runs)):
            while index not in ended:
                number, state = self._ended.get()
                ended[number] = state
                progress.advance()
            yield ended.pop(index)

    def _work(self) -> None:
        while not self._stopped:
            try:
                index = self._waiting.get_nowait()
            except queue.Empty:
                return
            self._ended.put((index, self._one(index)))

    def _one(self, index: int) -> ProgramState:
        """Runs to its end; what goes wrong stays in the state."""
        self._plan.prepare(index, self._runs[index])
        state = state_of(self._runs[index])
        with suppress(BaseException):  # the state keeps the error; a SystemExit must not end this thread
            self._program.run_body(state, self._arguments[index])
        self._runs[index].streams.sync()
        return state

    def _stop(self) -> None:
        self._stopped = True
        self._plan.give_up()
        for run in self._runs:
            run.streams.cancel()


class Progress:
    """Counts what has ended. On a terminal one line that changes, elsewhere a line at the end."""

    def __init__(self, total: int, name: str, *, shown: bool) -> None:
        self._total, self._name, self._shown = total, name, shown
        self._done = 0
        self._started = self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._write("\n")

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if self._shown and sys.stderr.isatty() and now - self._last >= _EVERY_S:
            self._last = now
            self._write("")

    def _write(self, end: str) -> None:
        filled = _WIDTH * self._done // max(self._total, 1)
        passed = time.monotonic() - self._started
        rate = self._done / passed if passed > 0 else 0.0
        bar = f"{'#' * filled:<{_WIDTH}}"
        start = "\r" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{start}{self._name}: {self._done}/{self._total} [{bar}] {rate:.1f}/s, {passed:.0f} s{end}")
        sys.stderr.flush()
