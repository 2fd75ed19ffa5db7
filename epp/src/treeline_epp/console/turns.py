"""Bounds the time that answers of the console take from the picker, however many clients ask for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")
PAUSE: Final = 9.0
"""So many times as long as an answer took is the pause after it: they hold the event loop a tenth of the time."""
MOST_WAITING: Final = 8
"""The longest answers take 40 ms: the last of eight waits for a few seconds, and its connection lasts for ten."""


class Turns:
    """Answers are made one after another, in the order in which they were asked for."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        self._free_at = 0.0
        self._waiting = 0

    async def take(self, make: Callable[[], T]) -> T | None:
        """What `make` returns, when it is its turn; None at once if `MOST_WAITING` wait."""
        if self._waiting >= MOST_WAITING:
            return None
        self._waiting += 1
        try:
            async with self._turn:
                await asyncio.sleep(max(0.0, self._free_at - self._clock()))
                began = self._clock()
                try:
                    return make()
                finally:
                    self._free_at = self._clock() + PAUSE * (self._clock() - began)
        finally:
            self._waiting -= 1
