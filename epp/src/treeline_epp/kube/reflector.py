"""Keeps a mirror true: the task that asks what the mirror wants asked, for as long as the picker lives."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from treeline_epp.kube.client import KubeClient, NoCluster
from treeline_epp.kube.mirror import Failure, Mirror, Request

log = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE_BYTES = 64 * 1024
"""Decoded in one go; then others get a turn."""


class Reflector(Generic[T]):
    """A mirror and its connection. ``on_change`` is called whenever the mirror's state or usability has changed."""

    def __init__(
        self,
        client: KubeClient,
        mirror: Mirror[T],
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mirror = mirror
        self._client = client
        self._on_change = on_change
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name=f"follow {self.mirror.resource.label}")

    async def stop(self) -> None:
        """End, with its connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                pause = await self._ask()
            except Exception:
                # A defect of ours, or something in the client's library that has no type: never the end of following.
                log.exception("following %s failed; it starts again", self.mirror.resource.label)
                pause = self.mirror.on_failure(Failure(200, "internal error"), self._clock())
            await asyncio.sleep(pause)

    async def _ask(self) -> float:
        """One request to its end; returns the pause before the next."""
        mirror, settled = self.mirror, self.mirror.settled
        request = mirror.request()
        try:
            if request.watch:
                return await self._watch(request)
            if mirror.on_page(await self._client.get(request), self._clock()):
                self._on_change()
            return 0.0
        except (Failure, NoCluster) as error:
            failure = error if isinstance(error, Failure) else Failure(401, str(error))
            pause = mirror.on_failure(failure, self._clock())
            if mirror.settled != settled:
                self._on_change()
            return pause

    async def _watch(self, request: Request) -> float:
        async with self._client.watch(request) as pieces:
            self.mirror.on_open(self._clock())
            async for piece in pieces:
                for start in range(0, len(piece), _SLICE_BYTES):
                    if self.mirror.feed(piece[start : start + _SLICE_BYTES], self._clock()):
                        self._on_change()
                    await asyncio.sleep(0)
        return self.mirror.on_end(self._clock())
