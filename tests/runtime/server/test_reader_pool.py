"""The processes that read large bodies: replaced when they end, and not blamed for a slow machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from treeline_runtime.server import reader_pool
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.jobs import Answered, Caller, Kind
from treeline_runtime.server.limits import ByteBudget, Limits, Reservation
from treeline_runtime.server.reader_pool import ReaderPool, ReaderSpec
from treeline_runtime.server.sampling import SamplingDefaults

pytestmark = [pytest.mark.integration, pytest.mark.deep]


PLAYED: Any = SimpleNamespace(alive=lambda: True)
"""A stand-in for a process to which nothing happens."""


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  the pool does not announce replaced processes
            await asyncio.sleep(0.02)


async def read(pool: ReaderPool, prompt: str) -> Answered:
    body = json.dumps({"prompt": prompt}).encode()
    room = Reservation(ByteBudget(1 << 30), None)
    task = await pool.read("tokenize", [body], len(body), None, Caller(), room)
    assert isinstance(task, Answered)
    return task


@contextlib.asynccontextmanager
async def started(model: Path) -> AsyncIterator[ReaderPool]:
    """Return a pool whose two processes have read something."""
    pool = ReaderPool(ReaderSpec(str(model), "m", SamplingDefaults(), "warning"))
    pool.start()
    try:
        await eventually(lambda: len(pool.pids) == 2)
        await asyncio.gather(read(pool, "a"), read(pool, "b"))
        yield pool
    finally:
        await pool.stop()


async def test_a_body_of_every_endpoint_is_read(model: Path) -> None:
    async with started(model) as pool:
        for kind in get_args(Kind):
            room = Reservation(ByteBudget(1 << 30), None)
            with pytest.raises(ApiError) as refused:
                await pool.read(kind, [b"{", b"}"], 2, Limits(4096, 4096), Caller(), room)
            assert refused.value.status == 400, kind


async def test_an_idle_process_that_ends_is_replaced_before_a_body_comes(model: Path) -> None:
    async with started(model) as pool:
        before = set(pool.pids)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: len(pool.pids) == 2 and not before & set(pool.pids))
        assert b"tokens" in (await read(pool, "a b")).body


async def test_processes_that_end_during_their_start_are_replaced_until_each_lane_reads(
    model: Path,
) -> None:
    async with started(model) as pool:
        gone: set[int] = set()
        for _ in range(6):
            await eventually(lambda: bool(set(pool._processes.pids()) - gone))
            pid = min(set(pool._processes.pids()) - gone)
            os.kill(pid, signal.SIGKILL)
            gone.add(pid)
        await eventually(lambda: len(pool.pids) == 2 and not gone & set(pool.pids))
        assert b"tokens" in (await read(pool, "a b")).body


async def test_bodies_are_refused_while_no_process_can_start(tmp_path: Path) -> None:
    pool = ReaderPool(ReaderSpec(str(tmp_path / "nothing"), "m", SamplingDefaults(), "warning"))
    pool.start()
    try:
        with pytest.raises(ApiError, match="No process can be started") as refused:
            await read(pool, "a")
    finally:
        await pool.stop()
    assert refused.value.status == 503


async def test_a_body_right_after_the_end_of_a_process_is_read_by_the_next(model: Path) -> None:
    async with started(model) as pool:
        for lane in pool._lanes:
            assert lane.process is not None
            lane.process.kill()
        assert b"tokens" in (await read(pool, "a b")).body


async def test_a_paused_process_is_not_blamed_on_the_body(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(model) as pool:
        monkeypatch.setattr(reader_pool, "BASE_DEADLINE_S", 1.0)
        for pid in pool.pids:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ApiError) as refused:
            await read(pool, "a b")
    assert (refused.value.status, refused.value.body["error"]["code"]) == (503, "overloaded")


async def test_a_body_that_computes_until_the_deadline_is_too_costly(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(model) as pool:
        monkeypatch.setattr(reader_pool, "BASE_DEADLINE_S", 1.0)
        # On a busy machine it gets little of that second: what hangs computes nothing.
        monkeypatch.setattr(reader_pool, "BUSY_SHARE", 0.01)
        with pytest.raises(ApiError) as refused:
            await read(pool, "the quick brown fox " * 1_500_000)
    assert (refused.value.status, refused.value.body["error"]["code"]) == (413, "request_too_large")


async def test_clients_take_turns_and_the_one_with_most_waiting_is_refused_first(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_pool, "MAX_WAITING", 5)
    pool = ReaderPool(ReaderSpec(str(model), "m", SamplingDefaults(), "warning"))  # it is not started
    budget = ByteBudget(1 << 30)

    def send(client: str | None, size: int = 1 << 14) -> asyncio.Task[object]:
        room = Reservation(budget, None)
        room.grow(size)
        return asyncio.create_task(pool.read("tokenize", [], size, None, Caller(), room, client))

    giant = reader_pool.ORDINARY_BYTES + 1
    reads = [send("a", giant), send("a", giant), *(send("a") for _ in range(3)), send("b")]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await reads[4]
    assert refused.value.status == 503
    anything, ordinary = pool._lanes
    taken = [await lane._next(PLAYED) for lane in (anything, ordinary, anything, ordinary)]
    assert [(body.client, body.size == giant) for body in taken] == [
        ("a", True),
        ("b", False),
        ("a", True),
        ("a", False),
    ]
    reads[3].cancel()
    await asyncio.gather(reads[3], return_exceptions=True)
    reads.append(send("c"))
    await asyncio.sleep(0)
    left = await ordinary._next(PLAYED)
    assert left.client == "c", "the other one is no longer awaited"
    for body in (*taken, left):
        reader_pool._finish(body, ApiError(503, "over"))
    await asyncio.gather(*reads, return_exceptions=True)
    assert budget.used == 0
