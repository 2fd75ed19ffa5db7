"""Bodies that take long to read: whom they delay, and the cost for their client. The processes are simulated."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from treeline_runtime.confined.process import Late
from treeline_runtime.server import reader_pool
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.jobs import Answered, Caller, Task
from treeline_runtime.server.limits import ByteBudget, Reservation
from treeline_runtime.server.reader_pool import ORDINARY_BYTES, ReaderPool, ReaderSpec
from treeline_runtime.server.sampling import SamplingDefaults


@dataclass
class Played:
    """A pool whose processes read a body when the test allows, and take `cost_s` for each."""

    pool: ReaderPool
    cost_s: float = 0.0
    asked: list[tuple[int, int]] = field(default_factory=list)
    """Lane and size of the bodies that a process has taken."""
    free: set[int] = field(default_factory=set)
    """Sizes of the bodies that are read at once."""
    may_go: threading.Condition = field(default_factory=threading.Condition)
    """Guards `free`."""
    budget: ByteBudget = field(default_factory=lambda: ByteBudget(1 << 30))

    def let_go(self, *sizes: int) -> None:
        with self.may_go:
            self.free |= {*sizes}
            self.may_go.notify_all()

    def send(self, size: int, client: str | None) -> asyncio.Task[Task]:
        room = Reservation(self.budget, None)
        room.grow(size)
        return asyncio.create_task(self.pool.read("tokenize", [], size, None, Caller(), room, client))


class PlayedProcess(reader_pool._Process):
    """A process of a simulated pool."""

    def __init__(self, played: Played) -> None:
        self.played = played
        self.computed_s = 0.0
        self.pid = 0

    def wait_ready(self, seconds: float = 0.0) -> None:
        pass

    def alive(self) -> bool:
        return True

    def kill(self) -> None:
        pass

    def end(self) -> None:
        pass

    def cpu_s(self) -> float:
        return self.computed_s

    def read(self, body: Any, seconds: float) -> Answered:
        lane = next(lane for lane in self.played.pool._lanes if lane.process is self)
        self.played.asked.append((self.played.pool._lanes.index(lane), body.size))
        self.computed_s += self.played.cost_s
        with self.played.may_go:
            if not self.played.may_go.wait_for(lambda: body.size in self.played.free, seconds):
                raise Late
        return Answered(b"read")


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def answer(read: asyncio.Task[Task]) -> str | int:
    await asyncio.wait({read}, timeout=60)
    error = read.exception()
    if error is None:
        return "read"
    assert isinstance(error, ApiError)
    assert error.status != 429 or dict(error.headers)[b"retry-after"]
    return error.status


@contextlib.asynccontextmanager
async def playing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Played]:
    played = Played(ReaderPool(ReaderSpec("", "m", SamplingDefaults(), "warning")))
    monkeypatch.setattr(played.pool._processes, "_start", lambda: PlayedProcess(played))
    monkeypatch.setattr(reader_pool, "_end_wakes", lambda process, wake: contextlib.nullcontext())
    played.pool.start()
    try:
        yield played
    finally:
        await played.pool.stop()
        assert played.budget.used == 0


async def test_a_slow_body_and_its_client_leave_the_ordinary_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader_pool, "FIRST_TRY_S", 0.01)
    async with playing(monkeypatch) as played:
        played.cost_s = 3.0
        giant = played.send(ORDINARY_BYTES + 1, None)
        slow = [played.send(size, "slow") for size in (1, 2, 3)]
        await until(lambda: (1, 1) in played.asked)
        played.cost_s = 0.0
        played.let_go(4, 5)
        assert [await answer(played.send(size, "other")) for size in (4, 5)] == ["read", "read"]
        assert played.asked[0] == (0, ORDINARY_BYTES + 1)
        assert played.asked[1:] == [(1, 1), (1, 4), (1, 5)], "nothing of the slow client's meanwhile"
        played.let_go(ORDINARY_BYTES + 1, 1, 2, 3)
        assert [await answer(read) for read in (giant, *slow)] == ["read"] * 4
        assert played.asked[4:] == [(0, 1), (0, 2), (0, 3)]


async def test_only_the_client_whose_bodies_took_too_long_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with playing(monkeypatch) as played:
        played.cost_s = reader_pool.CLIENT_S + 1
        slow = [played.send(ORDINARY_BYTES + more, "slow") for more in (1, 2, 3)]
        await until(lambda: played.asked)
        nobody = played.send(5, None)
        played.let_go(ORDINARY_BYTES + 1)
        assert [await answer(read) for read in slow] == ["read", 429, 429]
        assert await answer(played.send(6, "slow")) == 429
        played.let_go(5, 7, 8, 9)
        assert await answer(nobody) == "read"
        for size in (7, 8, 9):
            assert await answer(played.send(size, None)) == "read", "an unnamed client is never refused"
        assert await answer(played.send(9, "other")) == "read"


async def test_bodies_that_are_quick_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with playing(monkeypatch) as played:
        played.cost_s = reader_pool.QUICK_S
        played.let_go(1)
        for _ in range(2 * int(reader_pool.CLIENT_S)):
            assert await answer(played.send(1, "busy")) == "read"
