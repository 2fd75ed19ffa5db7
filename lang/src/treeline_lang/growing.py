"""Texts and variables that the loop writes piece by piece, readable from any thread and event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

from treeline_lang.errors import ProgramError


class Growing:
    """A text that grows until it ends or fails. One writer; others wait for it or follow it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: list[Callable[[], None]] = []
        self._text = ""
        self._coming = ""
        """More text that follows `_text`."""
        self._failure: ProgramError | None = None
        self._done = False

    @property
    def so_far(self) -> str:
        return self._since(0)[0]

    @property
    def done(self) -> bool:
        return self._done

    @property
    def failure(self) -> ProgramError | None:
        return self._failure

    def grow(self, text: str, coming: str = "") -> None:
        """text and coming together are the whole text so far; they are not joined, as long texts may come in small
        pieces."""
        self._change(text, coming)

    def end(self) -> None:
        """No more text will come."""
        self._change(self._text, self._coming, done=True)

    def fail(self, failure: ProgramError) -> None:
        """Ends it with a failure, unless it has already ended."""
        self._change(self._text, self._coming, done=True, failure=failure)

    def _change(self, text: str, coming: str, *, done: bool = False, failure: ProgramError | None = None) -> None:
        with self._lock:
            if self._done:
                return
            self._text, self._coming, self._done, self._failure = text, coming, done, failure
            wake, self._wake = self._wake, []
        for one in wake:
            one()

    def _listen(self, seen: int, wake: Callable[[], None]) -> bool:
        """Registers `wake` for more than `seen` characters or the end. False if that is already so."""
        with self._lock:
            if self._done or len(self._text) + len(self._coming) > seen:
                return False
            self._wake.append(wake)
            return True

    def _since(self, seen: int) -> tuple[str, bool]:
        """Returns (the text after so many characters, whether it has ended)."""
        with self._lock:
            text, coming, done = self._text, self._coming, self._done
        return (text[seen:] + coming if seen < len(text) else coming[seen - len(text) :]), done

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the end. Raises its failure, and TimeoutError."""
        while not self._done:
            woken = threading.Event()
            if self._listen(len(self._text) + len(self._coming), woken.set) and not woken.wait(timeout):
                raise TimeoutError(f"nothing new for {timeout:g} s")
        self._raise()

    async def wait_async(self) -> None:
        """`wait`, for an event loop."""
        async for _ in self.follow_async():
            pass

    def follow(self) -> Iterator[str]:
        """Yields new pieces as they come. Raises its failure after the last."""
        seen = 0
        while True:
            woken = threading.Event()
            if self._listen(seen, woken.set):
                woken.wait()
            piece, done = self._since(seen)
            if piece:
                yield piece
                seen += len(piece)
            elif done:
                self._raise()
                return

    async def follow_async(self) -> AsyncIterator[str]:
        """`follow`, for an event loop."""
        loop, seen = asyncio.get_running_loop(), 0
        while True:
            woken = asyncio.Event()

            def wake(woken: asyncio.Event = woken) -> None:
                with suppress(RuntimeError):  # the reader's loop has been closed: there is no reader to wake
                    loop.call_soon_threadsafe(woken.set)

            if self._listen(seen, wake):
                await woken.wait()
            piece, done = self._since(seen)
            if piece:
                yield piece
                seen += len(piece)
            elif done:
                self._raise()
                return

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure.again()


class Variable(Growing):
    """A variable set by a step: its value, and the backend's meta data."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.in_scope = False
        """Whether it is the text of a scope whose end has not been submitted."""
        self._value: Any = None
        self._meta: Any = None

    def say(self, text: str, meta: Any) -> None:
        """Updates the text so far and its meta data."""
        if not self.done:
            self._meta = meta
        self.grow(text)

    @property
    def meta_so_far(self) -> Any:
        return {} if self._meta is None else self._meta

    def set(self, value: Any, text: str | None = None, meta: Any = None) -> None:
        """text: for readers that follow it (None: the value itself, if it is a text)."""
        self._value, self._meta = value, {} if meta is None else meta
        shown = text if text is not None else value if isinstance(value, str) else self._text
        self._change(shown, "", done=True)

    def read(self, timeout: float | None = None) -> Any:
        """Waits for the value. Raises the failure of its step, and TimeoutError."""
        self.wait(timeout)
        return self._value

    async def read_async(self) -> Any:
        await self.wait_async()
        return self._value

    def meta(self, timeout: float | None = None) -> Any:
        """The value's meta data: a dict, or a list where n > 1."""
        self.wait(timeout)
        return self._meta
