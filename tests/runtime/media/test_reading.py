"""What requests wait for together, what they hold and for how long, and what becomes of one that cannot be answered."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace
from treeline_runtime.media import pool as pools
from treeline_runtime.media.fetch import FetchError
from treeline_runtime.media.files import MediaFiles, Stored
from treeline_runtime.media.pool import Image, MediaPool
from treeline_runtime.media.reading import MediaReader
from treeline_runtime.media.sources import MediaRules, PromptMedia, Source
from treeline_runtime.messages import GenerateReq, SamplingParams
from treeline_runtime.server.errors import ApiError, invalid
from treeline_runtime.server.jobs import GenerateTask
from treeline_runtime.server.limits import ByteBudget, Limits, TooMuchInFlight
from treeline_wire.media import MediaSpec, item_digest, item_ids

SPEC = MediaSpec({"image": "<i>", "video": "<v>"}, "processor")
LIMITS = Limits(100, 100)
PLACEHOLDER, FRAMES = 7, 8


class Asked:
    """As much of a request as reading sees."""

    def __init__(self, client: str | None = None) -> None:
        self.client = client
        self.held: Any = None


class FakePrompts:
    """The tokens of a text: its characters, with placeholders."""

    placeholders: ClassVar = {PLACEHOLDER: "image", FRAMES: "video"}

    def ids_of(self, text: str) -> list[int]:
        return [FRAMES if one == "\0" else ord(one) for one in text.replace("<v>", "\0")]


class FakePool:
    """Decodes an image to as many tokens as it has bytes, when it is let go."""

    def __init__(self, files: MediaFiles) -> None:
        self.files = files
        self.decoded: list[bytes] = []
        self.go = asyncio.Event()
        self.go.set()
        self.called = asyncio.Semaphore(0)
        self.timing: dict[str, Any] = {}

    async def process(self, image: Image) -> None:
        self.decoded.append(image.data)
        self.called.release()
        await self.go.wait()
        if image.data.startswith(b"bad"):
            raise invalid(image.param, "it is broken")
        size = len(image.data)
        made = Stored(self.files.path_of(image.digest), size, size, (1, 2, 2 * size), (size,))
        if image.kind == "video":
            made = dataclasses.replace(made, size=4 * size, grid=(2, 2, size), shape=(size, 1), **self.timing)
        with self.files.writing(image.digest, made) as file:
            file.write(image.data)


class FakeFetcher:
    async def fetch(self, url: str, client: str | None, grow: Callable[[int], None]) -> bytes:
        if "refused" in url:
            raise FetchError("its domain is strange")
        grow(3)
        return b"far"


class World:
    def __init__(self, files: MediaFiles, timeout_s: float = 60.0) -> None:
        self.files = files
        self.pool = FakePool(files)
        self.budget = ByteBudget(1000)
        pool: Any = self.pool
        fetcher: Any = FakeFetcher()
        self.reader = MediaReader(MediaRules(SPEC, 8), FakePrompts(), pool, files, fetcher, timeout_s)

    async def read(
        self, asked: Any, *images: bytes | str, most: int | None = None, room: int = 50, namespace: str | None = None
    ) -> GenerateReq:
        sources = tuple(
            Source("image", f"p{i}", image)
            if isinstance(image, str)
            else Source("image", f"p{i}", "", image, item_digest("image", image, SPEC.fingerprint))
            for i, image in enumerate(images)
        )
        ids, sampling = [1, *[PLACEHOLDER] * len(images), 2], SamplingParams(max_new_tokens=room)
        prompt = GenerateReq("", ids, sampling, namespace=namespace)
        task = GenerateTask(rid="r", prompts=[prompt], batched=False, with_text=False)
        task = replace(task, media=[PromptMedia(sources, most)])
        made = await self.reader.read(task, asked, LIMITS, self.budget)
        assert made.media == []
        return made.prompts[0]

    def uses(self, image: bytes) -> int:
        found = self.files.hold(item_digest("image", image, SPEC.fingerprint))
        assert found is not None
        found.uses -= 1
        return found.uses


def contents(made: GenerateReq) -> list[bytes]:
    return [Path(item.path).read_bytes() for item in made.items]


@pytest.fixture
def files() -> Iterator[MediaFiles]:
    made = MediaFiles(1000)
    yield made
    made.close()


async def test_a_prompt_gets_its_items(files: MediaFiles) -> None:
    world, asked = World(files), Asked()
    made = await world.read(asked, b"12", b"345")
    digests = [item_digest("image", data, "processor") for data in (b"12", b"345")]
    assert made.input_ids == [1, *item_ids(digests[0], 2), *item_ids(digests[1], 3), 2]
    assert [(item.start, item.count, item.digest) for item in made.items] == [(1, 2, digests[0]), (3, 3, digests[1])]
    assert contents(made) == [b"12", b"345"]
    assert world.budget.used == 0, "the bytes themselves are gone"


def film(world: World, *sources: Source) -> GenerateTask:
    ids = [1, *(PLACEHOLDER if source.kind == "image" else FRAMES for source in sources), 2]
    prompt = GenerateReq("", ids, SamplingParams(max_new_tokens=50))
    task = GenerateTask(rid="r", prompts=[prompt], batched=False, with_text=False)
    return replace(task, media=[PromptMedia(sources, None)])


def source(kind: Any, data: bytes) -> Source:
    return Source(kind, "p", "", data, item_digest(kind, data, SPEC.fingerprint))


async def test_a_video_is_one_item_with_the_seconds_of_a_frame(files: MediaFiles) -> None:
    world = World(files)
    world.pool.timing = {"seconds": 0.25}
    task = film(world, source("video", b"123456"), source("image", b"12"))
    made: Any = (await world.reader.read(task, Asked(), Limits(400, 400), world.budget)).prompts[0]
    video, image = made.items
    assert (video.kind, video.start, video.count, video.grid, video.seconds) == ("video", 1, 6, (2, 2, 6), 0.25)
    assert (image.kind, image.start, image.count) == ("image", 7, 2)


async def test_frames_that_stand_apart_are_items_behind_their_times(files: MediaFiles) -> None:
    world = World(files)
    world.pool.timing = {"times": (0.25, 11.0)}
    task = film(world, source("video", b"123456"), source("image", b"12"), source("video", b"123456"))
    made: Any = (await world.reader.read(task, Asked(), Limits(400, 400), world.budget)).prompts[0]
    digest = item_digest("video", b"123456", SPEC.fingerprint)
    names = [item_digest("video", digest + bytes([0, 0, 0, number]), SPEC.fingerprint) for number in range(2)]
    shown = [(f"<{time} seconds><|vision_start|>", names[i]) for i, time in enumerate(("0.2", "11.0"))]
    video = [id for text, name in shown for id in (*map(ord, text), *item_ids(name, 3), *map(ord, "<|vision_end|>"))]
    picture = item_ids(item_digest("image", b"12", SPEC.fingerprint), 2)
    assert made.input_ids == [1, *video, *picture, *video, 2]
    assert [item.kind for item in made.items] == ["video", "video", "image", "video", "video"]
    assert [item.digest for item in made.items if item.kind == "video"] == names * 2
    first, second = made.items[:2]
    assert [(one.grid, one.shape, one.offset) for one in (first, second)] == [((1, 2, 6), (3, 1), at) for at in (0, 12)]
    assert first.path == second.path
    assert all(
        made.input_ids[item.start : item.start + item.count] == item_ids(item.digest, item.count) for item in made.items
    )


async def test_files_stay_until_the_request_ends(files: MediaFiles) -> None:
    world, one, two = World(files), Asked(), Asked()
    await world.read(one, b"12", b"12")
    await world.read(two, b"12")
    assert world.uses(b"12") == 3
    one.held.release()
    one.held.release()
    assert world.uses(b"12") == 1
    two.held.release()
    assert world.uses(b"12") == 0


async def test_namespaces_share_no_output(files: MediaFiles) -> None:
    """Else the time until it is there would tell a client what images others have sent."""
    world = World(files)
    made = [await world.read(Asked(), b"12", namespace=name) for name in ("one", "other", "one", None)]
    assert len(world.pool.decoded) == 3
    assert len({item.path for one in made for item in one.items}) == 3
    assert [*map(contents, made)] == [[b"12"]] * 4
    assert len({tuple(one.input_ids) for one in made}) == 1


async def test_a_fetched_image_is_known_by_its_bytes(files: MediaFiles) -> None:
    world = World(files)
    (item,) = (await world.read(Asked(), "https://e.org/x")).items
    assert item.digest == item_digest("image", b"far", "processor")
    with pytest.raises(ApiError, match="strange") as refused:
        await world.read(Asked(), "https://refused")
    assert refused.value.status == 400
    assert world.budget.used == 0


async def test_one_broken_image_refuses_the_request_alone(files: MediaFiles) -> None:
    world, asked = World(files), Asked()
    with pytest.raises(ApiError) as refused:
        await world.read(asked, b"12", b"bad", b"345")
    assert refused.value.told["param"] == "p1"
    asked.held.release()
    assert world.uses(b"12") == 0
    assert world.budget.used == 0


async def test_requests_of_a_client_wait_for_one_decoding(files: MediaFiles) -> None:
    world = World(files)
    world.pool.go.clear()
    same = [asyncio.create_task(world.read(Asked("a"), b"12")) for _ in range(5)]
    await world.pool.called.acquire()
    other = asyncio.create_task(world.read(Asked("b"), b"12"))
    await world.pool.called.acquire()
    same[0].cancel()
    world.pool.go.set()
    done = await asyncio.gather(*same, other, return_exceptions=True)
    assert [isinstance(one, GenerateReq) for one in done] == [False, True, True, True, True, True]
    assert len(world.pool.decoded) == 2, "one for each client"
    assert world.uses(b"12") == 5


async def test_a_request_that_leaves_holds_nothing(files: MediaFiles) -> None:
    world, asked = World(files), Asked()
    await world.read(Asked(), b"12")
    world.pool.go.clear()
    left = asyncio.create_task(world.read(asked, b"12", b"345"))
    for _ in range(2):
        await world.pool.called.acquire()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    asked.held.release()
    assert world.uses(b"12") == 1
    world.pool.go.set()
    await world.read(Asked(), b"345")
    assert world.uses(b"345") == 1
    assert world.budget.used == 0


async def test_what_takes_too_long_is_refused(files: MediaFiles) -> None:
    world = World(files, timeout_s=0.01)
    world.pool.go.clear()
    with pytest.raises(ApiError, match="--media-timeout") as refused:
        await world.read(Asked(), b"12")
    assert refused.value.status == 503


async def test_bytes_that_wait_count(files: MediaFiles) -> None:
    world = World(files)
    world.budget.used = 900
    with pytest.raises(TooMuchInFlight):
        await world.read(Asked("a"), b"x" * 60)
    assert world.budget.used == 900


async def test_images_leave_less_of_the_context(files: MediaFiles) -> None:
    world = World(files)
    assert (await world.read(Asked(), b"x" * 40)).sampling.max_new_tokens == 50
    assert (await world.read(Asked(), b"x" * 70)).sampling.max_new_tokens == 28, "as much as there is room for"
    for length, asked in ((70, 50), (99, None), (98, None)):
        with pytest.raises(ApiError) as refused:
            await world.read(Asked(), b"x" * length, most=asked)
        assert refused.value.told["code"] == "context_length_exceeded"


async def test_the_client_with_most_images_is_refused_first(files: MediaFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_WAITING", 4)
    pool = MediaPool("/nowhere", {"image": 1}, files)  # not started: everything waits
    greedy = [asyncio.create_task(pool.process(Image(b"%d" % i, b"x", "p", 9, "a"))) for i in range(4)]
    await asyncio.sleep(0)
    modest = asyncio.create_task(pool.process(Image(b"m", b"x", "p", 9, "b")))
    with pytest.raises(ApiError) as refused:
        await greedy[3]
    assert refused.value.status == 503
    await pool.stop()
    for task in (*greedy[:3], modest):
        with pytest.raises(ApiError, match="shutting down"):
            await task
