"""The API key that an engine wants (vLLM's and SGLang's `--api-key`), shown where the picker asks what it serves."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final

from treeline_epp.watched_file import read_file

log = logging.getLogger(__name__)

_REREAD_S: Final = 10.0
_MOST_BYTES: Final = 4096


class EngineKey:
    """The key in a file, to be shown as a bearer token. Read again when it may have been replaced; a file that cannot
    be used is logged once, and the engine is asked without a key."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._key = ""
        self._due = float("-inf")
        self._problem = ""

    def __call__(self) -> str:
        """The key as it is now; empty where there is none that can be used."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _REREAD_S
            try:
                key = read_file(self._file, _MOST_BYTES + 2).decode().strip()
                problem = "" if _usable(key) else "it must be one line of printable ASCII, of at most 4096 bytes"
            except (OSError, UnicodeDecodeError) as error:
                key, problem = "", str(error)
            if problem and problem != self._problem:
                log.error("API key %s cannot be used, engines are asked without it: %s", self._file, problem)
            self._key, self._problem = "" if problem else key, problem
        return self._key


def _usable(key: str) -> bool:
    return 0 < len(key) <= _MOST_BYTES and key.isascii() and key.isprintable() and " " not in key
