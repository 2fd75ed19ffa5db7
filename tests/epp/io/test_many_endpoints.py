"""One picker and more endpoints than ZMQ's default number of sockets allows."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio
from support.epp_io import FakePublisher, small_bundle, until
from treeline_epp.endpoints import watcher
from treeline_epp.endpoints.adapters.base import EngineInfo
from treeline_epp.endpoints.engine_http import EngineError
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.watcher import EngineState, ProbePace
from treeline_epp.fleet import Fleet
from treeline_epp.index.index import Index
from treeline_epp.kvevents import connection
from treeline_epp.kvevents.connection import KvCallbacks, KvConnection, KvStats, Ticker, new_context
from treeline_epp.kvevents.states import SubscriptionState
from treeline_epp.kvevents.subscription import KvSubscription
from treeline_epp.member import Member
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.tokenizers.engine_keyers import EngineKeyers
from treeline_epp.tokenizers.watch import TokenizerSources
from treeline_epp.xds import eds
from treeline_epp.xds.eds import Eds
from treeline_wire import envoy_pb2 as pb
from treeline_wire.tokenizer import TokenizerBundle

COUNT = 150


@pytest.mark.deep
def test_more_endpoints_than_default_sockets_allow_are_live_and_heard() -> None:
    """Two thousand are followed by the same command, which takes minutes: see its committed figures."""
    argv = [sys.executable, "epp/benchmarks/follow.py", "--endpoints", str(COUNT), "--quiet-s", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["metric"]: row["value"] for row in map(json.loads, done.stdout.splitlines())}
    assert rows[f"picker.followed.{COUNT}"] == COUNT
    assert rows[f"picker.files.{COUNT}"] < 11 * COUNT + 100


def test_a_context_has_as_many_sockets_as_the_library_allows() -> None:
    context = new_context()
    try:
        assert context.get(zmq.MAX_SOCKETS) >= 20_000
    finally:
        context.destroy()


async def test_an_endpoint_without_sockets_is_reported_and_followed_later(
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
        await until(lambda: subscription.live, "it is followed")
        assert callbacks.stats.unfollowed == set()
        assert callbacks.stats.disconnects == 0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        fake.stop()
        context.destroy(linger=0)


async def test_endpoints_are_added_and_removed_in_slices() -> None:
    """No engine answers there. The test counts endpoints that appear or disappear between two turns of another task."""
    fleet = Fleet(Picker(), ModelRegistry(), Eds())
    step = 0

    async def watch() -> None:
        nonlocal step
        known: set[int] = set()
        while True:
            now = {id(member) for member in fleet.members.values()}
            step, known = max(step, len(now ^ known)), now
            await asyncio.sleep(0)

    def specs(of: str) -> tuple[EndpointSpec, ...]:
        return tuple(EndpointSpec(f"{of}{at}", "127.0.0.1:1") for at in range(400))

    async def source() -> AsyncIterator[tuple[EndpointSpec, ...]]:
        yield specs("old")
        yield specs("new")

    watching, running = asyncio.create_task(watch()), asyncio.create_task(fleet.run(source()))
    try:
        await until(lambda: len(fleet.members) == 400 and "new399" in fleet.members, "all are replaced", 60.0)
        assert 0 < step <= 32
    finally:
        watching.cancel()
        running.cancel()
        await asyncio.gather(watching, running, return_exceptions=True)


class Counted:
    """Counts the most calls between two turns of another task."""

    def __init__(self) -> None:
        self.most = self._now = 0

    def __call__(self) -> None:
        self._now += 1

    async def watch(self) -> None:
        while True:
            self.most, self._now = max(self.most, self._now), 0
            await asyncio.sleep(0)


async def test_envoy_and_the_picker_learn_of_many_endpoints_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test counts endpoints looked at, and written for Envoy, between two turns of another task."""
    looked, written, many = Counted(), Counted(), 3000
    state, entry = Member.state.fget, eds._entry
    assert state is not None
    monkeypatch.setattr(Member, "state", property(lambda member: (looked(), state(member))[1]))
    monkeypatch.setattr(eds, "_entry", lambda *args, **kwargs: (written(), entry(*args, **kwargs))[1])
    fleet = Fleet(Picker(), ModelRegistry(), Eds())
    sent = asyncio.Queue[pb.DiscoveryResponse]()

    class Envoy:
        async def write(self, response: pb.DiscoveryResponse) -> None:
            sent.put_nowait(response)

    specs = tuple(EndpointSpec(f"e{at}", f"10.0.{at >> 8}.{at & 255}:80", models=("m",)) for at in range(many))
    monkeypatch.setattr(Fleet, "_spawn", lambda _fleet, _run, _what: asyncio.create_task(asyncio.Event().wait()))
    await fleet._apply(specs)
    for member in fleet.members.values():
        member.registered, member.ranks, member.watcher.state = member.spec, (member.spec,), EngineState.READY
        fleet.picker.add_endpoint(member.spec, ready=False)
    fleet.eds.set_synced()
    stream = fleet.eds.state.connect()
    fleet.eds.state.on_request(stream, pb.DiscoveryRequest(resource_names=[eds.CLUSTER]))
    runs = looked.watch(), written.watch(), fleet._announce(), fleet._tick(), fleet.eds._write(stream, Envoy())
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        await until(lambda: all(one.ready for one in fleet.picker.endpoints.values()), "all can be chosen", 60.0)
        assert await fleet._caught_up()
        await fleet._apply(specs)
        told = 0
        while told < many:
            response = await asyncio.wait_for(sent.get(), 60)
            told = len(pb.ClusterLoadAssignment.FromString(response.resources[0].value).endpoints[0].lb_endpoints)
        assert 0 < looked.most <= 8 * 128
        assert 0 < written.most <= 128
    finally:
        for task in [*tasks, *(task for member in fleet.members.values() for task in member.tasks)]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_thousand_engines_are_probed_as_often_as_a_hundred() -> None:
    pace = ProbePace()
    pace.watch(True, 100)
    few = sum(100 / pace.pause(True, 5.0) for _ in range(200)) / 200
    pace.watch(True, 900)
    many = sum(1_000 / pace.pause(True, 5.0) for _ in range(200)) / 200
    assert 0.8 < many / few < 1.25
    assert pace.pause(False, 0.25) < 0.31  # those that start are few, and asked at once
    asked: list[int] = []
    waiting = [asyncio.create_task(_hangs(pace, asked, number)) for number in range(200)]
    await asyncio.sleep(0)
    assert 100 < len(asked) < 200
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_hanging_engines_do_not_delay_probes_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "_TURN_S", 0.01)
    pace, asked = ProbePace(), list[int]()
    hanging = [asyncio.create_task(_hangs(pace, asked, number)) for number in range(300)]
    await until(lambda: len(asked) == 300, "each is asked")
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    # Each has left its place once: as many are asked at a time as before.
    monkeypatch.setattr(watcher, "_TURN_S", 60.0)
    again = [asyncio.create_task(_hangs(pace, asked, number)) for number in range(300)]
    await asyncio.sleep(0)
    assert len(asked) - 300 == 128
    for task in again:
        task.cancel()
    await asyncio.gather(*again, return_exceptions=True)


async def _hangs(pace: ProbePace, asked: list[int], number: int) -> None:
    async with pace.asking():
        asked.append(number)
        await asyncio.Event().wait()


async def test_a_hanging_engine_does_not_delay_the_tokenizer_of_others() -> None:
    bundle = small_bundle()
    keyers = EngineKeyers(ModelRegistry(), TokenizerSources())
    info = EngineInfo(fingerprint=bundle.fingerprint)
    told: list[str] = []
    failing, serving = _Serves(None), _Serves(bundle)
    ask = [keyers.keyer(EndpointSpec(one.name, "h:1"), info, one, told.append) for one in (failing, serving)]  # type: ignore[arg-type]
    first, second = await asyncio.wait_for(asyncio.gather(*ask), 60)
    assert first is second is not None
    assert (failing.asked, serving.asked, told) == (1, 1, ["hangs"])


class _Serves:
    """An engine's tokenizer page; no answer if the engine hangs."""

    def __init__(self, bundle: TokenizerBundle | None) -> None:
        self.name = "serving" if bundle is not None else "failing"
        self.asked = 0
        self._bundle = bundle

    async def tokenizer(self) -> TokenizerBundle:
        self.asked += 1
        if self._bundle is None:
            raise EngineError("hangs")
        return self._bundle
