"""How far a batch is: a line on standard error."""

from __future__ import annotations

import sys
import time
from typing import Final, Self

_WIDTH: Final = 30
_EVERY_S: Final = 0.1


class Progress:
    """Counts what has ended. On a terminal one line that changes, elsewhere a line at the end."""

    def __init__(self, total: int, name: str, *, shown: bool) -> None:
        self._total, self._name, self._shown = total, name, shown
        self._done = 0
        self._started = self._last = time.monotonic()

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._shown and sys.stderr.isatty():
            self._write("\r" + self._line())
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._write(("\r" if sys.stderr.isatty() else "") + self._line() + "\n")

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if self._shown and sys.stderr.isatty() and now - self._last >= _EVERY_S:
            self._last = now
            self._write("\r" + self._line())

    def _line(self) -> str:
        filled = _WIDTH * self._done // max(self._total, 1)
        passed = time.monotonic() - self._started
        rate = self._done / passed if passed > 0 else 0.0
        return f"{self._name}: {self._done}/{self._total} [{'#' * filled:<{_WIDTH}}] {rate:.1f}/s, {passed:.0f} s"

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
