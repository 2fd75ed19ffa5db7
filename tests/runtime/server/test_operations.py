"""Operations on several ranks: which are asked, and what is told when some of them have done it and others not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from treeline_runtime.args import ServerArgs
from treeline_runtime.messages import GenerateReq, Reply, SamplingParams, SleepReq, UpdateWeightsReq, WakeReq
from treeline_runtime.server import administration
from treeline_runtime.server.administration import Administration
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.metrics import Metrics
from treeline_runtime.server.service import State
from treeline_runtime.tokenizer_manager import InflightRequest, Rank, TokenizerManager

BUSY = {"busy": True}


class World:
    """Ranks that answer at once, as `answers` says by rank: a message of refusal, BUSY, None for no answer, or ""."""

    def __init__(self, ranks: int = 3) -> None:
        self.answers: dict[int, Any] = {}
        self.asked: list[tuple[int, type]] = []
        self.manager = TokenizerManager(Metrics("m", ranks), [Rank(self._sender(r), self) for r in range(ranks)])
        self.state = State(ready=True, heartbeat_at={"scheduler": 0.0})
        self.engine = Administration(self, ServerArgs(model="m", dp_size=ranks, start_timeout=0.1))  # type: ignore[arg-type]

    def _sender(self, rank: int) -> Any:
        class Sender:
            def send(_self, message: msgspec.Struct) -> bool:
                self.take(rank, message)
                return True

        return Sender()

    def send(self, message: msgspec.Struct) -> bool:
        return True

    def take(self, rank: int, message: Any) -> None:
        if not isinstance(message, SleepReq | WakeReq | UpdateWeightsReq):
            return
        self.asked.append((rank, type(message)))
        answer = self.answers.get(rank, "")
        if answer is None:
            return
        reply = Reply(message.id, not answer, "busy" if answer is BUSY else answer, BUSY if answer is BUSY else None)
        asyncio.get_running_loop().call_soon(self.manager.on_reply, reply)

    async def carry_out(self, question: Callable[[str], Any], ranks: Sequence[int] = (0, 1, 2)) -> list[int]:
        done = list[int]()
        self.done = done
        await self.engine._carry_out(question, done.append, ranks)
        return done


async def test_all_ranks_are_asked_and_a_refusal_tells_which_have_done_it() -> None:
    world = World()
    assert await world.carry_out(SleepReq) == [0, 1, 2]
    world.answers = {1: "no memory"}
    with pytest.raises(ApiError, match=r"^Refused by rank 1: no memory \(ranks that have done it: 0, 2\)$") as refused:
        await world.carry_out(WakeReq)
    assert (refused.value.status, world.done) == (400, [0, 2])


async def test_a_rank_that_does_not_answer_is_named() -> None:
    world = World()
    world.answers = {2: None}
    with pytest.raises(ApiError, match=r"The scheduler of rank 2 does not answer: .* have done it: 0, 1") as refused:
        await world.carry_out(SleepReq)
    assert (refused.value.status, world.done) == (503, [0, 1])
    assert not world.state.unheard


async def test_only_busy_ranks_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration, "POLL_S", 0.0)
    world = World()
    world.answers = {1: BUSY}
    task = asyncio.create_task(world.carry_out(SleepReq))
    for _ in range(50):
        await asyncio.sleep(0)
    world.answers = {}
    assert sorted(await task) == [0, 1, 2]
    assert len(world.asked) > 4
    assert {rank for rank, _ in world.asked[3:]} == {1}


async def test_no_rank_begins_while_another_still_has_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration, "POLL_S", 0.0)
    world = World()
    inflight: InflightRequest = world.manager.open([GenerateReq("r", [1], SamplingParams())], rank=2)
    task = asyncio.create_task(world.carry_out(SleepReq))
    for _ in range(50):
        await asyncio.sleep(0)
    assert world.asked == [], "a caller who leaves now has changed nothing"
    inflight.close()
    assert await task == [0, 1, 2]


async def test_ranks_that_sleep_are_known_one_by_one() -> None:
    state = State()
    assert state.asleep == 0
    state.sleeping[1] = 2
    assert state.asleep == 2
    state.sleeping.pop(1)
    assert state.asleep == 0
