"""Returns memory to the system that is free but that the heap keeps.

To read a compiled grammar takes a dozen times what is left of it, in arenas of the threads that read it: after some
hundred grammars 400 MB of pages that nothing was in, which glibc does not give back by itself (malloc_trim(3)).
"""

from __future__ import annotations

import ctypes
import threading

READING = 12
"""Times what a grammar takes when it is read: measured 13 of xgrammar's JSON."""
TRIM_BYTES = 32 << 20
"""So much may lie about: to give it back takes some 20 ms, in which others wait for the heap."""


class Trimmer:
    """Counts what was let go; gives back when it is much. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._let_go = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def let_go(self, num_bytes: int) -> bool:
        """→ whether it is time for `trim`."""
        with self._lock:
            self._let_go += num_bytes
            return self._let_go >= TRIM_BYTES

    def trim(self) -> None:
        """Takes its time, without the interpreter's lock."""
        with self._lock:
            if self._let_go < TRIM_BYTES:
                return  # another thread has done it
            self._let_go = 0
        if self._trim is not None:
            self._trim(0)
