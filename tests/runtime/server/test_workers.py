"""What the parent tells HTTP workers, and when; and what it makes of their silence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from treeline_runtime import workers
from treeline_runtime.ipc import Addresses, Begin, EndAll, Process, StateUpdate
from treeline_runtime.messages import FinishReason, LoadUpdate
from treeline_runtime.server.service import State
from treeline_runtime.tokenizer_manager import NoReply
from treeline_runtime.workers import HttpWorkers

STOP = FinishReason("error", status=503)


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


async def test_workers_that_serve_are_waited_for_until_each_is_idle_or_has_ended(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    world = World(context, tmp_path)
    await asyncio.wait_for(world.workers.idle(), 1)  # none serves yet
    world.workers.begin(Begin({}, None))
    waiting = asyncio.create_task(world.workers.idle())
    for process in ("http-2", "scheduler", "http-2"):
        world.workers.on_idle(process)
    await world.told()
    assert not waiting.done()
    world.workers.on_idle("http-1")
    await asyncio.wait_for(waiting, 1)


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
