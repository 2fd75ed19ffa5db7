"""Drives a reflector: the task that sends its requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from treeline_kube.connection import Answer, Call, Streams
from treeline_kube.errors import KubeError, Malformed
from treeline_kube.reflector import Reflector

log = logging.getLogger(__name__)

_SLICE_BYTES = 64 * 1024
"""Decoded in one go; then others get a turn."""


class Driver:
    """A reflector and its connection. `on_change` is called after changes, errors and recoveries."""

    def __init__(
        self,
        client: Client,
        reflector: Reflector,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reflector = reflector
        self._client = client
        self._on_change = on_change
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name=f"follow {self.reflector.collection.path}")

    async def stop(self) -> None:
        """End, with its connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            recovers = self.reflector.error is not None
            try:
                pause = await self._ask()
            except KubeError as error:
                pause = self.reflector.on_failure(error, self._clock())
            except Exception:
                # A bug, or an untyped error of the client's library: following must never end.
                log.exception("following %s failed; restarting", self.reflector.label)
                pause = self.reflector.on_failure(Malformed("internal error"), self._clock())
            if recovers or self.reflector.error is not None:
                self._on_change()
            await asyncio.sleep(pause)

    async def _ask(self) -> float:
        """One request to its end; returns the pause before the next. Raises KubeError."""
        reflector, call = self.reflector, self.reflector.request()
        if call.verb == "watch":
            return await self._watch(call)
        answer = await self._client.request(call)
        if reflector.on_page(answer.body, self._clock()):
            self._on_change()
        return reflector.pause_after_list()

    async def _watch(self, call: Call) -> float:
        async with self._client.watch(call, self.reflector.timing.silence_s) as pieces:
            had_error = self.reflector.error is not None
            self.reflector.on_open(self._clock())
            if had_error:
                self._on_change()
            async for piece in pieces:
                for start in range(0, len(piece), _SLICE_BYTES):
                    if self.reflector.on_data(piece[start : start + _SLICE_BYTES], self._clock()):
                        self._on_change()
                    await asyncio.sleep(0)
        return self.reflector.on_end(self._clock())


class Client(Protocol):
    """The connection that a driver needs. Both methods raise KubeError."""

    async def request(self, call: Call) -> Answer:
        """The whole answer."""
        ...

    def watch(self, call: Call, silence_s: float) -> Streams:
        """The answer as it comes."""
        ...
