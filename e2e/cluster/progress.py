"""Progress of `up` and `down`: a live line on a terminal, elsewhere a line for each step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console


class Progress:
    """Steps on stderr."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Show a step while the block runs, and its time afterwards."""
        start = time.monotonic()
        if self._console.is_terminal:
            with self._console.status(text):
                yield
        else:
            self._console.print(f"{text} …", markup=False)
            yield
        self._console.print(f"{text}: {time.monotonic() - start:.1f} s", markup=False)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)
