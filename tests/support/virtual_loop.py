"""An event loop whose clock jumps to the next timer when it is idle: hours pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    skipped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("every task waits for something that no timer will bring")
        if not events and timeout:
            self.skipped += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop for code whose only clock is the loop's and that does no input or output."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.skipped


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run like ``asyncio.run``, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
