"""From a task whose prompts have images as they were sent to one that the scheduler takes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from msgspec.structs import replace
from treeline_wire.media import Item, item_digest, private_digest, with_items

from treeline_runtime.media.fetch import Fetcher, FetchError
from treeline_runtime.media.files import MediaFiles, Stored
from treeline_runtime.media.pool import Image, MediaPool
from treeline_runtime.media.sources import MediaRules, PromptMedia, Source
from treeline_runtime.messages import GenerateReq, MediaItem
from treeline_runtime.server.errors import invalid, overloaded, unsupported
from treeline_runtime.server.http import ApiRequest
from treeline_runtime.server.jobs import ChatTask, Generations
from treeline_runtime.server.limits import ByteBudget, Limits, Reservation
from treeline_runtime.server.prompts import Prompts

TaskT = TypeVar("TaskT", bound=Generations)


class Held:
    """The outputs that a request uses; `release` ends that."""

    def __init__(self, files: MediaFiles) -> None:
        self._files = files
        self._digests = list[bytes]()

    def hold(self, digest: bytes) -> Stored | None:
        found = self._files.hold(digest)
        if found is not None:
            self._digests.append(digest)
        return found

    def release(self) -> None:
        """Idempotent."""
        while self._digests:
            self._files.release(self._digests.pop())


class MediaReader:
    """Reads the images of requests to one model: `start`, any number of `read`, then `stop`; all in one event loop."""

    def __init__(
        self,
        rules: MediaRules,
        prompts: Prompts,
        pool: MediaPool,
        files: MediaFiles,
        fetcher: Fetcher | None,
        timeout_s: float,
    ) -> None:
        """prompts: of the model. fetcher: None: images come in bodies alone. timeout_s: for all images of a
        request."""
        self._rules = rules
        self._prompts = prompts
        self._pool = pool
        self._files = files
        self._fetcher = fetcher
        self._timeout_s = timeout_s
        self._decoding: dict[tuple[str | None, bytes], asyncio.Task[None]] = {}
        """What a client's requests wait for together."""

    def start(self) -> None:
        self._pool.start()

    async def stop(self) -> None:
        await self._pool.stop()
        self._files.close()

    async def read(self, task: TaskT, asked: ApiRequest, limits: Limits, budget: ByteBudget) -> TaskT:
        """The task with items in its prompts, whose files stay until `asked` ends. Raises ApiError, TooMuchInFlight."""
        held = asked.held = Held(self._files)
        room = Reservation(budget, asked.client, 0)
        try:
            room.grow(sum(len(source.data) for media in task.media for source in media.sources))
            async with asyncio.timeout(self._timeout_s):
                found = await self._all(task, asked.client, held, room, limits)
        except TimeoutError:
            raise overloaded(f"The images were not read in {self._timeout_s:g} s (--media-timeout)") from None
        finally:
            room.release()
        prompts, fills = list[GenerateReq](), False
        for prompt, media, items in zip(task.prompts, task.media, found, strict=True):
            made = self._with_items(prompt, media, items, limits)
            fills |= made.sampling.max_new_tokens < prompt.sampling.max_new_tokens
            prompts.append(made)
        task = replace(task, prompts=prompts, media=[])
        return replace(task, fills_context=True) if fills and isinstance(task, ChatTask) else task

    async def _all(
        self, task: Generations, client: str | None, held: Held, room: Reservation, limits: Limits
    ) -> list[list[tuple[Source, bytes, Stored]]]:
        most = limits.max_request_tokens
        running = [
            [
                asyncio.create_task(self._one(source, client, prompt.namespace, held, room, most))
                for source in media.sources
            ]
            for prompt, media in zip(task.prompts, task.media, strict=True)
        ]
        each = [one for several in running for one in several]
        try:
            await asyncio.gather(*each)
        finally:
            for one in each:
                one.cancel()
        return [[one.result() for one in several] for several in running]

    async def _one(
        self, source: Source, client: str | None, namespace: str | None, held: Held, room: Reservation, most: int
    ) -> tuple[Source, bytes, Stored]:
        data, digest = source.data, source.digest
        if source.url:
            data = await self._fetched(source, client, room)
            digest = await asyncio.to_thread(item_digest, source.kind, data, self._rules.spec.fingerprint)
        name = private_digest(digest, namespace)
        stored = held.hold(name)
        if stored is None:
            await self._decoded(Image(name, data, source.param, most, client, source.kind))
            stored = held.hold(name)
        if stored is None:  # others' images have taken its place at once
            raise overloaded("The memory for images of requests is in use; try again")
        return source, digest, stored

    async def _fetched(self, source: Source, client: str | None, room: Reservation) -> bytes:
        if self._fetcher is None:
            raise unsupported(
                source.param, "this server fetches no images (--allowed-media-domains): send it as a data: URL"
            )
        try:
            return await self._fetcher.fetch(source.url, client, room.grow)
        except FetchError as error:
            raise invalid(source.param, str(error)) from None

    async def _decoded(self, image: Image) -> None:
        """Decodes an image, once for all requests of a client that have it."""
        key = image.client, image.digest
        running = self._decoding.get(key)
        if running is None:
            running = self._decoding[key] = asyncio.create_task(self._pool.process(image))
            running.add_done_callback(lambda task: self._ended(key, task))
        await asyncio.shield(running)

    def _ended(self, key: tuple[str | None, bytes], task: asyncio.Task[None]) -> None:
        del self._decoding[key]
        if not task.cancelled():
            task.exception()  # its requests may have gone

    def _with_items(
        self, prompt: GenerateReq, media: PromptMedia, found: Sequence[tuple[Source, bytes, Stored]], limits: Limits
    ) -> GenerateReq:
        """Raises ApiError 400 if the images leave too little of the context."""
        given = [item for one in found for item in _items(*one, self._rules.spec.fingerprint)]
        ids = self._with_times(prompt.input_ids, [stored for source, _, stored in found if source.kind == "video"])
        items = [Item(item.kind, item.digest, item.count) for item in given]
        ids, starts = with_items(ids, self._prompts.placeholders, items)
        param = found[0][0].param if found else "messages"
        asked = media.max_new_tokens
        most = limits.max_new_tokens(len(ids), asked, None, param)
        return replace(
            prompt,
            input_ids=ids,
            sampling=replace(prompt.sampling, max_new_tokens=min(most, prompt.sampling.max_new_tokens)),
            items=tuple(
                replace(item, start=start)
                for start, item in sorted(zip(starts, given, strict=True), key=lambda one: one[0])
            ),
        )

    def _with_times(self, ids: list[int], videos: Sequence[Stored]) -> list[int]:
        """The ids of a prompt in which the placeholder of a video whose frames stand apart became one for each frame,
        behind its time."""
        waiting, made = iter(videos), list[int]()
        for token in ids:
            times = next(waiting).times if videos and self._prompts.placeholders.get(token) == "video" else ()
            shown = f"<|vision_start|>{self._rules.spec.placeholders['video']}<|vision_end|>" if times else ""
            text = "".join(f"<{time:.1f} seconds>{shown}" for time in times)
            made += self._prompts.ids_of(text) if times else [token]
        return made


def _items(source: Source, digest: bytes, stored: Stored, processor: str) -> Iterator[MediaItem]:
    """The items of a prompt, without their places, that a part of a message is: frames that stand apart are one each,
    known by the video and their number."""
    if not stored.times:
        yield MediaItem(
            source.kind, 0, stored.count, digest, stored.grid, stored.shape, stored.path, seconds=stored.seconds
        )
        return
    frames = len(stored.times)
    grid, shape = (1, *stored.grid[1:]), (stored.shape[0] // frames, *stored.shape[1:])
    for number in range(frames):
        name = item_digest(source.kind, digest + number.to_bytes(4, "big"), processor)
        offset = number * 4 * math.prod(shape)
        yield MediaItem(source.kind, 0, stored.count // frames, name, grid, shape, stored.path, offset)
