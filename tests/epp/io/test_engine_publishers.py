"""The picker follows the engines' own publishers over real sockets: the `ZmqEventPublisher` of vLLM and of SGLang,
behind their own caches, through late joins, gaps and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq.asyncio
from support.engine_caches import KEYS, RELEASES, Traffic
from support.engine_wheels import needs_engine_wheels
from support.epp_io import until
from support.ports import free_ports
from treeline_epp.endpoints.adapters.base import KvSource
from treeline_epp.index.index import Index
from treeline_epp.kvevents.connection import KvCallbacks, KvConnection, KvStats, Ticker
from treeline_epp.kvevents.subscription import KvSubscription

pytestmark = [needs_engine_wheels, pytest.mark.integration, pytest.mark.deep]

TOPIC = "kv@pod@model"


class Engine:
    """A cache and its publisher on two ports; `live` and `replay` stay the same for every process of it."""

    def __init__(self, name: str, seed: int) -> None:
        self._make = RELEASES[name]
        self._traffic = Traffic(seed)
        self.live, self.replay = free_ports(2)
        self.start()

    def start(self) -> None:
        self.cache = self._make()
        made: Any = self.cache.events.ZmqEventPublisher
        made = type("Hurried", (made,), {"SHUTDOWN_TIMEOUT": 0.3})
        rank = {"data_parallel_rank", "attn_dp_rank"} & inspect.signature(made).parameters.keys()
        sockets = {"endpoint": f"tcp://*:{self.live}", "replay_endpoint": f"tcp://*:{self.replay}"}
        self._publisher = made(topic=TOPIC, **sockets, **dict.fromkeys(rank, 0))
        self._published = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._traffic.step(self.cache)
            batch = self.cache.batch()
            if batch.events:
                self._publisher.publish(batch)
                self._published += 1

    async def told(self) -> None:
        """Wait until its thread has sent everything. A subscriber that joins before may miss the last batch without
        noticing a gap."""
        await until(lambda: len(self._publisher._buffer) == self._published, "all batches are sent")

    def stop(self) -> None:
        self._publisher.shutdown()

    async def restart(self) -> None:
        """Start another process on the same ports, which knows nothing of the previous one."""
        self.stop()
        await until(self._ports_are_free, "the sockets are closed")
        self.start()

    def _ports_are_free(self) -> bool:
        try:
            with contextlib.ExitStack() as stack:
                for port in (self.live, self.replay):
                    probe = stack.enter_context(socket.socket())
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port))
        except OSError:
            return False
        return True


class Follower:
    """The picker's side of one publisher. Its knowledge stays while it is disconnected."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.index = Index()
        self.pod = self.index.add_pod("pod", "model")
        self.stats = KvStats()
        self.subscription = KvSubscription(self.index, self.pod, KEYS, ours=False)

    @contextlib.asynccontextmanager
    async def hearing(self) -> AsyncIterator[None]:
        context, ticker = zmq.asyncio.Context(), Ticker()
        source = KvSource("127.0.0.1", self.engine.live, self.engine.replay, None, "kv@")
        callbacks = KvCallbacks(self.subscription, lambda _: [], lambda: None, lambda: 0, self.stats)
        connection = KvConnection(context, ticker, source, callbacks, None)
        tasks = [asyncio.create_task(job) for job in (ticker.run(), connection.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            context.destroy(linger=0)

    async def agrees(self, when: str) -> None:
        def state() -> object:
            subscription = self.subscription
            held = self.engine.cache.blocks()
            return len(held), len(self.index.blocks_of(self.pod)), subscription.state, dict(subscription.counts)

        await until(
            lambda: self.subscription.live and self.index.blocks_of(self.pod) == self.engine.cache.blocks(),
            f"the index holds what the engine holds, {when}",
            state=state,
        )
        assert not self.stats.rejected
        assert not self.pod.skipped
        self.index.check()


@pytest.mark.parametrize("name", RELEASES)
async def test_the_index_equals_the_engines_cache_whenever_the_picker_joined(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(name, seed=5)
    follower = Follower(engine)
    try:
        engine.run(30)
        await engine.told()
        async with follower.hearing():
            await follower.agrees("replayed from the beginning")
            assert follower.subscription.counts["replay"] == 1
            engine.run(30)
            await follower.agrees("heard live")
            assert follower.subscription.counts["replay"] == 1
        follower.subscription.on_disconnected(0.0)
        engine.run(30)
        await engine.told()
        async with follower.hearing():
            await follower.agrees("after what was missed")
            assert not follower.subscription.applied.partial
            await engine.restart()
            engine.run(12)
            await engine.told()
            engine.run(1)
            await follower.agrees("in its next life")
            assert not follower.subscription.applied.partial
    finally:
        engine.stop()
    assert "Invalid replay request" not in caplog.text
