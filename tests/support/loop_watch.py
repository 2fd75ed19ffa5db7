"""Measures how long a step holds an event loop: the processor time of its thread between two turns.

Processor time and not the clock, so that other processes of a busy machine are not counted.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

TICK_S = 0.001
NOTED_S = 0.005


async def watch(path: Path) -> None:
    """Add a line of milliseconds for each hold of more than `NOTED_S`. Runs forever."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    while True:
        before = time.thread_time()
        await asyncio.sleep(TICK_S)
        held = time.thread_time() - before
        if held > NOTED_S:
            os.write(file, f"{held * 1000:.2f}\n".encode())


class Holds:
    """The file, as a test reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def clear(self) -> None:
        self._seen = len(self.path.read_text())

    def worst_ms(self) -> float:
        """Return the longest hold since `clear`; 0 if there was none."""
        return max(map(float, self.path.read_text()[self._seen :].split()), default=0.0)
