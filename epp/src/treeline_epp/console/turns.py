"""Bounds the time that answers of the console take from the picker, however many clients ask for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")
PAUSE: Final = 9.0
"""The pause after an answer, in durations of that answer: answers hold the event loop a tenth of the time."""
MOST_WAITING: Final = 8
"""The longest answers take 40 ms: the last of eight waits for a few seconds, and its connection lasts for ten."""


class Turns:
    """Makes answers one at a time, in the order of the calls."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        self._free_at = 0.0
        self._waiting = 0

    async def take(self, make: Callable[[], T]) -> T | None:
        """Wait for a turn and return the result of `make`; return None at once if `MOST_WAITING` calls wait."""
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
