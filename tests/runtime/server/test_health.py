"""The probes tell whether a request would work: not more, and not less."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.fake_scheduler import Magic
from support.runtime_server import eventually, running
from treeline_runtime.args import ServerArgs
from treeline_runtime.messages import BatchTextOut, FinishReason, TextOut
from treeline_runtime.published import LoadUpdate
from treeline_runtime.server import probes as health
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.jobs import Generations
from treeline_runtime.server.probes import EngineHealth, Probes, ServerInfo
from treeline_runtime.server.service import State

BROKEN = FinishReason("error", message="it broke", status=500)
FULL = FinishReason("error", message="the queue is full", status=503)
ANSWERED = FinishReason("length")


@dataclass(frozen=True)
class Opened:
    finish: FinishReason | None

    def close(self) -> None:
        pass


class Engine:
    """The part of `Service` that a check uses: every generation ends at once, as `finish` says, or `by_rank`."""

    def __init__(self) -> None:
        self.finish: FinishReason | None = ANSWERED
        self.by_rank: dict[int | None, FinishReason | None] = {}
        self.refusal: ApiError | None = None
        self.asked = 0
        self.pooling = None
        self.state = State(ready=True, heartbeat_at={"scheduler": float("inf")})

    def admit(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def open(self, job: Generations) -> Opened:
        assert job.generations == 1
        self.asked += 1
        return Opened(self.by_rank.get(job.rank, self.finish))

    async def collect(self, inflight: Opened) -> None:
        await asyncio.sleep(0)
        if inflight.finish is None:
            await asyncio.Event().wait()
        elif inflight.finish.type == "error":
            raise ApiError(inflight.finish.status or 500, inflight.finish.message or "")


class World:
    def __init__(self) -> None:
        self.engine = Engine()
        self.now = 100.0
        self.health = EngineHealth(self.engine, clock=lambda: self.now)  # type: ignore[arg-type]

    def see(self, *finishes: FinishReason | None, rank: int = 0) -> None:
        for finish in finishes:
            self.health.on_batch(BatchTextOut([TextOut("r", "", [], finish)]), rank)


async def watching(world: World, condition: Callable[[], bool]) -> None:
    """Run the watch until `condition`."""
    task = asyncio.create_task(world.health.watch())
    for _ in range(1000):
        if condition():
            break
        await asyncio.sleep(0)
    task.cancel()
    assert condition()


async def test_failures_in_a_row_are_a_problem_only_if_the_engine_cannot_answer_us() -> None:
    world = World()
    world.see(*[BROKEN] * 8)
    await watching(world, lambda: world.engine.asked > 0)
    assert world.health.problem is None, "a client sends prompts that overflow, and the engine is fine"
    world.engine.finish = BROKEN
    world.see(*[BROKEN] * 3)
    await watching(world, lambda: world.health.problem is not None)
    assert world.health.problem == "The engine cannot answer: it broke"


@pytest.mark.parametrize(
    "finishes",
    [
        [BROKEN, BROKEN],
        [BROKEN, BROKEN, ANSWERED, BROKEN, None, BROKEN],
        [FinishReason("error", message="too long", status=400)] * 9,
        [FULL] * 9,
        [FinishReason("abort", message="aborted")] * 9,
        [FinishReason("abort", message="out of memory", status=500)] * 9,
    ],
    ids=["two", "not in a row", "refused", "queue full", "aborted", "too large"],
)
async def test_errors_of_clients_cause_no_check(finishes: list[FinishReason | None]) -> None:
    world = World()
    world.engine.finish = BROKEN
    world.see(*finishes)
    task = asyncio.create_task(world.health.watch())
    for _ in range(10):
        await asyncio.sleep(0)
    task.cancel()
    assert world.engine.asked == 0


async def test_an_engine_that_answers_again_is_healthy_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "RETRY_S", 0.0)
    world = World()
    world.engine.finish = BROKEN
    world.see(*[BROKEN] * 3)
    await watching(world, lambda: world.engine.asked > 3)
    assert world.health.problem is not None
    world.engine.finish = ANSWERED
    await watching(world, lambda: world.health.problem is None)
    world.engine.finish = BROKEN
    with pytest.raises(ApiError):
        await world.health.check()
    world.see(ANSWERED)
    assert world.health.problem is None, "a client had an answer"


async def test_no_answer_in_time_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "TIMEOUT_S", 0.0)
    world = World()
    world.engine.finish = None
    with pytest.raises(ApiError, match="no answer within 0 s"):
        await world.health.check()
    assert world.health.problem is not None


async def test_a_server_that_takes_no_new_requests_is_not_called_broken() -> None:
    world = World()
    world.engine.refusal = ApiError(503, "The server is shutting down")
    with pytest.raises(ApiError, match="shutting down"):
        await world.health.check()
    assert world.health.problem is None


async def test_a_rank_that_fails_is_not_hidden_by_a_full_or_silent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.engine.state.loads = [LoadUpdate() for _ in range(3)]
    world.engine.by_rank = {0: FULL, 1: BROKEN}
    with pytest.raises(ApiError, match=r"^The engine of rank 1 cannot answer: it broke$"):
        await world.health.check()
    world.engine.by_rank = {0: FULL}
    with pytest.raises(ApiError, match=r"^the queue is full$"):
        await world.health.check()
    assert world.health.problem is None

    monkeypatch.setattr(health, "TIMEOUT_S", 0.0)
    world.engine.by_rank = {0: None, 1: BROKEN, 2: None}
    with pytest.raises(ApiError, match="rank"):
        await world.health.check()
    for left in (2, 1, 0):
        world.see(*[BROKEN] * 3, rank=left)
        assert world.health.problem is not None
        world.see(ANSWERED, rank=left)
    assert world.health.problem is None, "all have answered"


async def test_readiness_fails_at_once_and_liveness_after_the_watchdog_timeout() -> None:
    world = World()
    info = ServerInfo(ServerArgs(model="m", watchdog_timeout=60.0), "1", 1, {}, 0.0)
    probes = Probes(world.engine, info)  # type: ignore[arg-type]
    probes.health = world.health
    world.engine.finish = BROKEN
    with pytest.raises(ApiError) as told:
        await probes.health_generate(None)  # type: ignore[arg-type]
    assert told.value.status == 503
    with pytest.raises(ApiError, match="cannot answer: it broke"):
        await probes.ready()
    world.now += 59
    assert (await probes.live()).status_code == 200
    world.now += 2
    with pytest.raises(ApiError, match="cannot answer"):
        await probes.live()


def test_a_server_whose_engine_fails_is_unready_until_it_answers_again(model: Path) -> None:
    with running(model, "--no-events", fake=True) as server, server.client() as http:

        def complete(token: int) -> int:
            body = {"input_ids": [token], "sampling_params": {"max_new_tokens": 2}}
            return http.post("/generate", json=body).status_code

        def status(path: str) -> int:
            return http.get(path).status_code

        assert [complete(Magic.BREAK) for _ in range(3)] == [200] * 3, "two tokens are all it was asked for"
        assert complete(Magic.SICKEN) == 500
        assert [status(path) for path in ("/health", "/ready", "/live")] == [200] * 3, "one may fail"
        assert [complete(50) for _ in range(2)] == [500] * 2
        answer: httpx.Response = eventually(
            lambda: (r := http.get("/health")).status_code == 503 and r, what="/health 503"
        )
        assert "The engine cannot answer: it is sick" in answer.text
        assert [status(path) for path in ("/ready", "/health_generate", "/live")] == [503, 503, 200]
        assert complete(Magic.CURE) == 200
        assert [status(path) for path in ("/health", "/health_generate")] == [200, 200]
