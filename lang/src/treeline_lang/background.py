"""The event loop of all programs in this process, in its own thread, started when first needed.

Bodies of programs run in their callers' threads and only submit steps. Streams and requests are tasks on this loop, so
a thousand branches need no threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_posted: deque[tuple[contextvars.Context, Callable[..., object], tuple[Any, ...]]] = deque()
_woken = False
"""The loop was woken for posted calls and has not run them yet."""


def loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="treeline-programs", daemon=True).start()
        return _loop


def post(function: Callable[..., object], *args: Any) -> None:
    """Calls `function` on the loop, in the order of posting. Waking the other thread costs more than a step, so it is
    woken once for all calls posted before the loop runs."""
    global _woken
    _posted.append((contextvars.copy_context(), function, args))
    if not _woken:
        _woken = True
        wake()


def wake() -> None:
    """Wakes the loop. Called after a Ctrl-C, which may have interrupted `post` before it did so."""
    loop().call_soon_threadsafe(_take_posted)


def _take_posted() -> None:
    global _woken
    _woken = False  # before the last check: later posts wake it again
    while _posted:
        context, function, args = _posted.popleft()
        asyncio.get_running_loop().call_soon(function, *args, context=context)


def call(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the loop and returns its result. For other threads only; a Ctrl-C cancels it."""
    future = asyncio.run_coroutine_threadsafe(work, loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _forget() -> None:
    """After a fork, which does not copy the thread."""
    global _loop, _lock, _woken
    _loop, _lock, _woken = None, threading.Lock(), False
    _posted.clear()


os.register_at_fork(after_in_child=_forget)
