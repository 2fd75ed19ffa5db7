"""What the parent tells HTTP workers, and when; and what it makes of their silence."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import zmq
from treeline_runtime import workers
from treeline_runtime.args import ServerArgs
from treeline_runtime.ipc import Addresses, Begin, EndAll, Process, StateUpdate
from treeline_runtime.messages import FinishReason, HeardReq, LoadUpdate, Reply, SleepReq, UpdateWeightsReq
from treeline_runtime.server.administration import Administration
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.http import ApiRequest
from treeline_runtime.server.metrics import Metrics
from treeline_runtime.server.service import State
from treeline_runtime.tokenizer_manager import NoReply, TokenizerManager
from treeline_runtime.workers import HttpWorkers

STOP = FinishReason("error", status=503)


async def turns() -> None:
    """Whatever can happen without anything from outside has happened."""
    for _ in range(20):
        await asyncio.sleep(0)


class Sent(list[Any]):
    def send(self, message: msgspec.Struct) -> bool:
        self.append(message)
        return True


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


class World:
    """The parent's side of two workers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        self.state = State()
        processes = [Process("http", rank) for rank in (1, 2)]
        self.workers = HttpWorkers(context, Addresses(str(folder)), processes, self.state)
        self.one, self.other = Sent(), Sent()
        self.workers.outboxes = {"http-1": self.one, "http-2": self.other}  # type: ignore[dict-item]

    async def told(self) -> list[Any]:
        """What each has been told by the next turn of the loop."""
        await asyncio.sleep(0)
        assert self.one == self.other
        told, self.one[:], self.other[:] = list(self.one), [], []
        return told


async def test_changes_of_a_turn_are_told_at_once_and_signs_of_life_after_a_while(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(context, tmp_path)
    await world.told()
    monkeypatch.setattr(workers, "ROUTINE_S", 3600.0)
    world.state.heartbeats += 1
    world.state.load = LoadUpdate(running=3)
    assert await world.told() == []
    world.state.draining = True
    world.state.problem = "it is sick"
    [told] = await world.told()
    assert isinstance(told, StateUpdate)
    assert (told.draining, told.problem, told.heartbeats, told.load.running) == (True, "it is sick", 1, 3)
    assert await world.told() == []
    monkeypatch.setattr(workers, "ROUTINE_S", 0.0)
    world.state.heartbeats += 1
    await asyncio.sleep(1e-6)  # a timer after that one
    assert [message.heartbeats for message in await world.told()] == [2]


async def test_an_end_is_told_behind_the_state_that_lets_nothing_new_begin(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    world = World(context, tmp_path)
    await world.told()
    world.state.failure = "the scheduler process was killed"
    world.workers.end_all(STOP)
    told = await world.told()
    assert [type(message) for message in told] == [StateUpdate, EndAll]
    assert told[0].failure == "the scheduler process was killed"


def test_all_that_a_state_says_is_told() -> None:
    """But that the engine is ready, which Begin says."""
    said = {field.name for field in dataclasses.fields(State) if not field.name.startswith("_")}
    assert set(StateUpdate.__struct_fields__) == said - {"ready", "on_change"}


async def test_who_asks_whether_all_have_been_told_waits_for_each_of_them(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    world = World(context, tmp_path)
    manager = TokenizerManager(Metrics("m"), Sent(), Sent())
    world.state.asleep = 2
    telling = asyncio.create_task(world.workers.told(manager))
    await turns()
    for sent in (world.one, world.other):
        assert [type(message) for message in sent[-2:]] == [StateUpdate, HeardReq]
        assert sent[-2].asleep == 2
    manager.on_reply(Reply(world.other[-1].id))
    await turns()
    assert not telling.done()
    manager.on_reply(Reply(world.one[-1].id))
    await asyncio.wait_for(telling, 60)
    world.state.failure = "a worker was killed"
    await asyncio.wait_for(world.workers.told(manager), 60)


async def test_a_worker_that_takes_nothing_is_waited_for_so_long(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "TOLD_S", 0.001)
    world = World(context, tmp_path)
    with pytest.raises(NoReply):
        await world.workers.told(TokenizerManager(Metrics("m"), Sent(), Sent()))


class Paused:
    """Administration, and a scheduler that answers whatever it is asked; `told` waits for `heard`."""

    def __init__(self) -> None:
        self.state = State(ready=True)
        self.manager = self
        self.heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked: list[Any] = []
        self.administration = Administration(self, ServerArgs(model="m"), self.told)  # type: ignore[arg-type]

    async def told(self) -> None:
        await self.heard

    async def ask(self, question: Callable[[str], Any], timeout_s: float) -> Reply:
        self.asked.append(question("q"))
        return Reply("q")

    def abort(self, name: str) -> None:
        self.asked.append(name)


def asking(body: bytes) -> ApiRequest:
    made = ApiRequest({"type": "http", "query_string": b"", "headers": []}, mock.Mock(), mock.Mock())
    made.parts = [body]
    return made


@pytest.mark.parametrize(
    ("path", "body", "expected"), [("sleep", b"", SleepReq("q")), ("update_weights", b'{"model_path": "p"}', None)]
)
async def test_the_scheduler_is_asked_once_all_workers_begin_nothing_more(
    path: str, body: bytes, expected: Any
) -> None:
    world = Paused()
    request = asking(body)
    answering = asyncio.create_task(getattr(world.administration, path)(request))
    await turns()
    assert world.asked == []
    assert (world.state.pausing, world.state.holding) == (path == "sleep", path != "sleep")
    world.heard.set_result(None)
    world.heard = asyncio.get_running_loop().create_future()
    await turns()
    assert world.state.operation is None
    assert world.asked == (["", expected] if expected else [UpdateWeightsReq("q", "p")])
    assert not answering.done(), "the workers do not know yet what came of it"
    world.heard.set_result(None)
    assert (await answering).status_code == 200
    assert (world.state.pausing, world.state.holding) == (False, False)


async def test_where_a_worker_does_not_answer_nothing_is_done() -> None:
    world = Paused()
    world.heard.set_exception(NoReply("no answer within 10 s"))
    with pytest.raises(ApiError, match="An HTTP worker does not answer: no answer within 10 s"):
        await world.administration.sleep(asking(b""))
    assert (world.asked, world.state.asleep, world.state.pausing, world.state.operation) == ([], 0, False, None)


async def test_who_is_held_back_waits_for_the_end_of_all_of_it() -> None:
    state = State(holding=True)
    waiting = asyncio.create_task(state.resumed())
    await asyncio.sleep(0)
    state.holding = False
    state.holding = True  # the next one begins in the same turn
    await turns()
    assert not waiting.done()
    state.holding = False
    await asyncio.wait_for(waiting, 60)
    await asyncio.wait_for(State().resumed(), 60)


async def test_workers_that_serve_are_waited_for_until_each_is_idle_or_has_ended(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    world = World(context, tmp_path)
    await asyncio.wait_for(world.workers.idle(), 60)  # none serves yet
    world.workers.begin(Begin({}, None))
    waiting = asyncio.create_task(world.workers.idle())
    for process in ("http-2", "scheduler", "http-2"):
        world.workers.on_idle(process)
    await world.told()
    assert not waiting.done()
    world.workers.on_idle("http-1")
    await asyncio.wait_for(waiting, 60)


async def test_a_worker_that_does_not_answer_counts_as_it_did_last(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    world = World(context, tmp_path)

    class Manager:
        def __init__(self, *silent: Sent) -> None:
            self.silent = silent

        async def samples(self, worker: Sent, timeout_s: float) -> Any:
            if any(worker is one for one in self.silent):
                raise NoReply
            return [["f", "f_total", {"rank": "1" if worker is world.one else "2"}, 5.0]]

    async def counted(*silent: Sent) -> list[str]:
        found = await world.workers.samples(Manager(*silent))  # type: ignore[arg-type]
        return sorted(sample[2]["rank"] for samples in found for sample in samples)

    assert await counted(world.other) == ["1"]
    assert await counted() == ["1", "2"]
    assert await counted(world.one, world.other) == ["1", "2"]
