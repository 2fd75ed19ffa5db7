"""The processes that decode images, shared by clients in turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec
from treeline_wire.media import Kind

from treeline_runtime.confined.child import ProcessLimits
from treeline_runtime.confined.pool import ConfinedPool, PoolClosedError
from treeline_runtime.confined.process import ConfinedProcess, Killed, Vanished
from treeline_runtime.media.files import FullError, MediaFiles, Stored
from treeline_runtime.media.protocol import HEAD, KINDS, Made, Unreadable
from treeline_runtime.server.errors import ApiError, invalid, overloaded, rate_limited
from treeline_runtime.turns import ClientSeconds, Turns

WORKERS = max(2, min(8, (os.cpu_count() or 1) // 4))
MAX_WAITING = 256
"""Images that may wait for a process."""
SECONDS = 20.0
"""For one image."""
QUICK_S = 2.0
"""Images decoded sooner cost their client nothing."""
CLIENT_S = 60.0
"""Seconds that a client's slow images may take before others of it are refused,"""
CLIENT_S_BACK = 0.25
"""and how many come back each second."""
MEMORY_BYTES = 3 << 30
"""For one image, decoded and scaled, besides what the process needs."""
START_S = 180.0
"""Seconds for a process to start: importing transformers takes long where others compute."""
PAUSE_S = 1.0
"""Seconds to wait after a process that could not start, doubled each time,"""
MAX_PAUSE_S = 60.0
"""up to this."""

logger = logging.getLogger(__name__)
_STOPPING = "The server is shutting down"
_decode = msgspec.msgpack.Decoder(Made | Unreadable).decode


@dataclass
class Image:
    """An image to decode."""

    digest: bytes
    data: bytes
    param: str
    most: int
    """The most tokens that it may take."""
    client: str | None = None
    kind: Kind = "image"
    retried: bool = False
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class MediaPool:
    """`start`, any number of `process`, then `stop`; all in one event loop."""

    def __init__(self, folder: str, limits: Mapping[Kind, int], files: MediaFiles) -> None:
        """folder: of the model. limits: of each kind that is read, the most pixels of an image, or seconds. Frames of
        videos may have as many pixels as images."""
        self._files = files
        self._turns = Turns[Image](MAX_WAITING)
        self._seconds = ClientSeconds(CLIENT_S, CLIENT_S_BACK)
        self._wake = asyncio.Event()
        self._processes = ConfinedPool(partial(_Process, folder, json.dumps(limits)))
        self._lanes: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._lanes = [asyncio.create_task(self._lane()) for _ in range(WORKERS)]

    async def stop(self) -> None:
        """Ends the processes and refuses what waits. Idempotent."""
        self._processes.close()
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        self._refuse(_STOPPING)

    async def process(self, image: Image) -> None:
        """Decodes an image, whose output is then in the files. Raises ApiError."""
        if image.client is not None and (wait_s := self._seconds.wait_s(image.client)):
            raise rate_limited(
                f"Your images have taken too long to decode: try again in {wait_s} s, or send smaller ones",
                ((b"retry-after", b"%d" % wait_s),),
            )
        dropped = self._turns.put(image.client, image)
        if dropped is not None:
            _finish(dropped, overloaded("Too many images are waiting to be decoded"))
        self._wake.set()
        await image.done

    def pids(self) -> list[int]:
        return self._processes.pids()

    async def _lane(self) -> None:
        """Has a process decode one image after another, replaced whenever necessary, until the pool is closed. If no
        process can start, it retries ever more slowly, and refuses what waits each time but the first."""
        pause_s = PAUSE_S
        while True:
            try:
                with contextlib.ExitStack() as stack:
                    process = await asyncio.to_thread(stack.enter_context, self._processes.lend())
                    pause_s = PAUSE_S
                    while True:
                        await self._answer(process, await self._next(process))
            except PoolClosedError:
                return
            except Killed as error:
                logger.warning("a process that decodes images was replaced: %s", error)
            except (OSError, RuntimeError) as error:  # no process or thread can be started
                logger.error("a process to decode images could not start (%s); again in %g s", error, pause_s)
                if pause_s > PAUSE_S:
                    self._refuse("No process can be started to decode images; the server's log says why")
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, MAX_PAUSE_S)

    async def _next(self, process: _Process) -> Image:
        """An image for a process. Raises Killed if that has ended."""
        while True:
            image = self._turns.take(lambda _: True)
            if image is None:
                self._wake.clear()
                await self._wake.wait()
            elif not process.alive():
                self._put_back(image)
                raise Killed("it ended while idle")
            elif not image.done.done():  # else its client has gone
                return image

    def _put_back(self, image: Image) -> None:
        self._turns.put_back(image.client, image)
        self._wake.set()

    async def _answer(self, process: _Process, image: Image) -> None:
        """Raises Killed if the process must be replaced."""
        began = time.monotonic()
        try:
            _finish(image, await asyncio.to_thread(process.decode, image, self._files))
        except Vanished:
            if image.retried:
                _finish(image, overloaded("The process that decoded the image was ended; try again"))
            else:  # perhaps it ended before it took the image
                image.retried = True
                self._put_back(image)
            raise
        except Killed:
            began -= SECONDS  # its client also pays for the next process
            _finish(image, invalid(image.param, "it takes too much time or memory to decode"))
            raise
        except BaseException:
            _finish(image, overloaded(_STOPPING))
            raise
        finally:
            if (took_s := time.monotonic() - began) > QUICK_S and image.client is not None:
                self._seconds.charge(image.client, took_s)

    def _refuse(self, why: str) -> None:
        while (image := self._turns.take(lambda _: True)) is not None:
            _finish(image, overloaded(why))


class _Process(ConfinedProcess):
    """Decodes one image at a time. Raises OSError if it cannot be started."""

    def __init__(self, folder: str, most: str) -> None:
        limits = ProcessLimits(SECONDS, MEMORY_BYTES, threads=True)
        super().__init__("treeline_runtime.media.worker", limits, logs=True, arguments=(folder, most))

    def wait_ready(self, seconds: float = START_S) -> None:
        super().wait_ready(seconds)

    def decode(self, image: Image, files: MediaFiles) -> ApiError | None:
        """Writes an image's output into the files, or returns why not. Raises Killed."""
        try:
            answer = _decode(self.ask(HEAD.pack(KINDS.index(image.kind), image.most), image.data))
        except msgspec.MsgspecError:
            raise Killed("it answered nonsense") from None
        if isinstance(answer, Unreadable):
            return invalid(image.param, answer.why)
        if not 0 < answer.count <= image.most or min(*answer.grid, *answer.shape) < 1:
            raise Killed("it answered nonsense")
        if not 0 < answer.seconds < 1e6 or len(answer.times) not in (0, answer.grid[0]):
            raise Killed("it answered nonsense")
        size = 4 * math.prod(answer.shape)
        made = Stored(
            files.path_of(image.digest), size, answer.count, answer.grid, answer.shape, answer.seconds, answer.times
        )
        if size > files.most:
            return ApiError(
                413,
                f"The image takes {size} bytes of shared memory, and there are {files.most}: send a smaller one",
                param=image.param,
                code="request_too_large",
            )
        try:
            with files.writing(image.digest, made) as file:
                left = size
                while left:
                    piece = self.ask()
                    if not 0 < len(piece) <= left:
                        raise Killed("it answered nonsense")
                    left -= file.write(piece)
        except FullError as error:
            logger.warning("no shared memory for an image: %s", error)
            return overloaded("The memory for images of requests is in use; try again")
        return None


def _finish(image: Image, error: ApiError | None) -> None:
    image.data = b""
    if image.done.done():
        return
    if error is None:
        image.done.set_result(None)
    else:
        image.done.set_exception(error)
