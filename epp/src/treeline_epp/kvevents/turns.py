"""The time on the loop that all publishers share.

A loop runs all that is ready before it looks for more: a hundred publishers with something to do would each have their
time, one after the other, and a request that comes meanwhile waits for all of them. So each piece of work needs the
*turn*, which one has at a time. Whoever finds that the publishers have had `SLICE_S` in this round of the loop waits
for the next one, while everything else that is ready is run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

SLICE_S: Final = 0.001


class Turns:
    """`async with` it around each piece of work, which must not wait for anything. Turns are given in the order in
    which they are asked for."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._lock = asyncio.Lock()
        self._clock = clock
        self._began: float | None = None  # the first piece of this round of the loop

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        try:
            if self._began is not None and self._clock() - self._began >= SLICE_S:
                await asyncio.sleep(0)
        except BaseException:
            self._lock.release()
            raise
        if self._began is None:
            self._began = self._clock()
            asyncio.get_running_loop().call_soon(self._next_round)

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()

    def _next_round(self) -> None:
        self._began = None
