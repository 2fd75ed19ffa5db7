"""Operations on several ranks: which are asked, and what is told when some of them have done it and others not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from treeline_runtime.args import ServerArgs
from treeline_runtime.gate import WINDOW_BYTES
from treeline_runtime.messages import (
    AdminReq,
    FlushReq,
    GenerateReq,
    LoadAdapterReq,
    Reply,
    SamplingParams,
    SleepReq,
    StartProfileReq,
    StopProfileReq,
    UnloadAdapterReq,
    WakeReq,
)
from treeline_runtime.server import administration
from treeline_runtime.server.administration import Administration
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.limits import Limits
from treeline_runtime.server.metrics import Metrics
from treeline_runtime.server.service import Service, State
from treeline_runtime.tokenizer_manager import DpRank, InflightRequest, NoReply, TokenizerManager

BUSY = {"busy": True}


class World:
    """Ranks that answer at once, as `answers` says by rank: a message of refusal, BUSY, None for no answer, or ""."""

    def __init__(self, ranks: int = 3) -> None:
        self.model_name = "m"
        self.answers: dict[int, Any] = {}
        self.asked: list[tuple[int, type]] = []
        self.manager = TokenizerManager(Metrics("m", ranks), [DpRank(self._sender(r), self) for r in range(ranks)])
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
        if not isinstance(message, AdminReq):
            return
        self.asked.append((rank, type(message)))
        answer = self.answers.get(rank, "")
        if answer is None:
            return
        data = BUSY if answer is BUSY else {"path": f"/trace-{rank}"} if isinstance(message, StopProfileReq) else None
        reply = Reply(message.id, not answer, "busy" if answer is BUSY else answer, data)
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


def asked(query: dict[str, str] | None = None, **body: Any) -> Any:
    return SimpleNamespace(query_params=query or {}, json_object=lambda: body)


async def test_after_an_update_of_some_ranks_requests_are_refused_until_all_have_the_same_weights() -> None:
    world = World()
    service = Service("m", None, None, world.manager, Metrics("m", 3), world.state, None, limits=Limits(9, 9, 3))  # type: ignore[arg-type]
    service.admit()
    world.answers = dict.fromkeys(range(3), "no such folder")
    with pytest.raises(ApiError, match="no such folder"):
        await world.engine.update_weights(asked(model_path="/new"))
    service.admit()
    world.answers = {1: "no memory"}
    for _ in range(2):
        with pytest.raises(ApiError, match=r"Refused by rank 1: no memory .*: 0, 2\)$"):
            await world.engine.update_weights(asked(model_path="/new"))
        with pytest.raises(ApiError, match="ranks have different weights: repeat /update_weights") as refused:
            service.admit()
        assert refused.value.status == 503
    assert world.state.model_path is None
    world.answers = {}
    await world.engine.update_weights(asked(model_path="/new"))
    service.admit()
    assert world.state.model_path == "/new"


async def test_a_flush_asks_only_ranks_that_are_left_and_names_those_that_have_done_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(administration, "POLL_S", 0.0)
    world = World()
    world.answers = {1: BUSY}
    with pytest.raises(ApiError, match=r"^Refused by rank 1: busy \(ranks that have done it: 0, 2\)$") as refused:
        await world.engine.flush_cache(asked())
    assert refused.value.body["error"]["code"] == "cache_busy"
    world.asked.clear()
    task = asyncio.create_task(world.engine.flush_cache(asked({"timeout": "3600"})))
    for _ in range(50):
        await asyncio.sleep(0)
    world.answers = {}
    assert (await task).status_code == 200
    assert len(world.asked) > 4
    assert {rank for rank, _ in world.asked[3:]} == {1}
    assert {type for _, type in world.asked} == {FlushReq}


async def test_a_profile_ends_at_the_ranks_where_it_still_runs() -> None:
    world = World()
    world.answers = {0: "no profile is running"}
    answer = await world.engine.stop_profile(asked())
    assert json.loads(b"".join(answer._pieces)) == {"paths": ["/trace-1", "/trace-2"]}
    world.answers = dict.fromkeys(range(3), "no profile is running")
    with pytest.raises(ApiError, match=r"^Refused by rank 0: no profile is running \(.*: none\)$"):
        await world.engine.stop_profile(asked())


async def test_a_profile_that_a_rank_refuses_is_stopped_at_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    world = World()
    world.answers = {1: "a profile is running"}
    with pytest.raises(ApiError, match=r"^Refused by rank 1: a profile is running \(ranks that have done it: none\)$"):
        await world.engine.start_profile(asked())
    assert world.asked == [*((rank, StartProfileReq) for rank in range(3)), (0, StopProfileReq), (2, StopProfileReq)]


async def test_a_rank_with_a_long_queue_delays_no_other_and_only_until_the_limit_of_time() -> None:
    world = World()
    inflight = world.manager.open([GenerateReq("r", [1] * (WINDOW_BYTES // 4), SamplingParams())], rank=0)
    waiting = world.manager.open([GenerateReq("s", [1], SamplingParams())], rank=0)
    assert (await world.manager.ask(world.manager.ranks[1], WakeReq)).ok
    with pytest.raises(NoReply, match="no answer within 0 s"):
        await world.manager.ask(world.manager.ranks[0], WakeReq, timeout_s=0.0)
    inflight.close()
    waiting.close()
    assert (await world.manager.ask(world.manager.ranks[0], WakeReq)).ok
    assert world.asked == [(1, WakeReq), (0, WakeReq)]


async def test_ranks_fall_asleep_at_one_level() -> None:
    world = World()
    world.answers = {1: "no memory"}
    with pytest.raises(ApiError, match="no memory"):
        await world.engine.sleep(asked({"level": "1"}))
    world.answers = {}
    with pytest.raises(ApiError, match=r"^Rank 0 sleeps at level 1: ask for that level, or /wake_up first$"):
        await world.engine.sleep(asked({"level": "2"}))
    assert world.state.sleeping == {0: 1, 2: 1}
    await world.engine.sleep(asked({"level": "1"}))
    assert world.state.sleeping == {0: 1, 1: 1, 2: 1}


async def test_ranks_that_sleep_are_known_one_by_one() -> None:
    state = State()
    assert state.asleep == 0
    state.sleeping[1] = 2
    assert state.asleep == 2
    state.sleeping.pop(1)
    assert state.asleep == 0


async def test_an_adapter_is_loaded_or_unloaded_by_one_caller_at_a_time() -> None:
    world = World()
    world.state.adapters = {"a": "digest"}
    world.answers = {1: None}
    loading = asyncio.create_task(world.engine.load_adapter(asked(lora_name="a", lora_path="a")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    engine = world.engine
    for other in (
        engine.unload_adapter(asked(lora_name="a")),
        engine.load_adapter(asked(lora_name="a", lora_path="b")),
    ):
        with pytest.raises(ApiError, match="is being loaded or unloaded") as refused:
            await other
        assert refused.value.status == 409
    with pytest.raises(ApiError, match="does not answer"):
        await loading
    assert {kind for _, kind in world.asked} == {LoadAdapterReq}
    world.answers = {}
    await world.engine.unload_adapter(asked(lora_name="a"))
    assert world.state.adapters == {}


async def test_a_load_that_failed_is_undone_where_it_succeeded_and_where_it_may_still_succeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def at_once(look: Callable[..., object], *of: object) -> object:
        return look(*of)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    world = World()
    world.answers = {1: None, 2: "no such folder"}
    loading = asyncio.create_task(world.engine.load_adapter(asked(lora_name="a", lora_path="a")))
    for _ in range(50):
        await asyncio.sleep(0)
    world.answers = {}
    with pytest.raises(ApiError, match="rank 1 does not answer"):
        await loading
    assert world.asked[3:] == [(0, UnloadAdapterReq), (1, UnloadAdapterReq)]
    assert world.state.adapters == {}
