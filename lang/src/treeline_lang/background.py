"""The event loop on which all programs of this process run: in a thread of its own, started when first needed.

Bodies of programs run in their callers' threads and only submit; streams and the requests of backends are tasks here,
so that a thousand branches cost no threads.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="treeline-programs", daemon=True).start()
        return _loop


def call(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine run there. From other threads only; a Ctrl-C cancels it."""
    future = asyncio.run_coroutine_threadsafe(work, loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _forget() -> None:
    """A forked process has no copy of the thread."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
