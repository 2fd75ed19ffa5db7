"""One picker and more endpoints than ZMQ's default number of sockets allows."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
import zmq
import zmq.asyncio
from support.epp_io import FakePublisher, until
from treeline_epp.endpoints.watcher import ProbePace
from treeline_epp.index.index import Index
from treeline_epp.kvevents import connection
from treeline_epp.kvevents.connection import KvCallbacks, KvConnection, KvStats, Ticker, new_context
from treeline_epp.kvevents.states import SubscriptionState
from treeline_epp.kvevents.subscription import KvSubscription

COUNT = 150


def test_more_endpoints_than_default_sockets_allow_are_live_and_heard() -> None:
    """Two thousand are followed by the same command, which takes minutes: see its committed figures."""
    argv = [sys.executable, "epp/benchmarks/follow.py", "--endpoints", str(COUNT), "--quiet-s", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["metric"]: row["value"] for row in map(json.loads, done.stdout.splitlines())}
    assert rows[f"picker.followed.{COUNT}"] == COUNT
    assert rows[f"picker.files.{COUNT}"] < 11 * COUNT + 100


def test_a_context_has_all_sockets_that_the_library_can_have() -> None:
    context = new_context()
    try:
        assert context.get(zmq.MAX_SOCKETS) >= 20_000
    finally:
        context.destroy()


async def test_an_endpoint_for_which_no_sockets_are_left_is_told_and_followed_when_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_RETRY_S", 0.05)
    fake, ticker, context = FakePublisher(), Ticker(), zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, 14)
    others = [context.socket(zmq.PAIR) for _ in range(10)]
    index = Index()
    subscription = KvSubscription(index, index.add_pod("e0", "model"), None)
    callbacks = KvCallbacks(subscription, lambda _load: (), lambda: None, lambda: 0, KvStats())
    task = asyncio.create_task(KvConnection(context, ticker, fake.source, callbacks, None).run())
    try:
        await until(lambda: callbacks.stats.unfollowed == {"e0"}, "it is told")
        assert subscription.state is SubscriptionState.DISCONNECTED
        for sock in others:
            sock.close()
        await until(lambda: subscription.live, "it is followed", 20.0)
        assert callbacks.stats.unfollowed == set()
        assert callbacks.stats.disconnects == 0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        fake.stop()
        context.destroy(linger=0)


async def test_a_thousand_engines_are_asked_as_often_as_a_hundred() -> None:
    pace = ProbePace()
    pace.watch(True, 100)
    few = sum(100 / pace.pause(True, 5.0) for _ in range(200)) / 200
    pace.watch(True, 900)
    many = sum(1_000 / pace.pause(True, 5.0) for _ in range(200)) / 200
    assert 0.8 < many / few < 1.25
    assert pace.pause(False, 0.25) < 0.31  # those that start are few, and asked at once
    waiting = [asyncio.ensure_future(pace.asking.acquire()) for _ in range(200)]
    await asyncio.sleep(0)
    assert sum(task.done() for task in waiting) < 200
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
