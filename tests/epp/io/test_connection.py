"""A connection to a publisher, with real sockets and a scripted state machine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from support.cpu import reference_s
from support.epp_io import FakePublisher, stored, until
from treeline_epp.endpoints.adapters.base import KvSource
from treeline_epp.index.index import Index
from treeline_epp.kvevents.connection import MOST_BYTES, KvCallbacks, KvConnection, KvStats, Load, Ticker, _Sockets
from treeline_epp.kvevents.intake import SLICE_S, Turns
from treeline_epp.kvevents.reading import Answer
from treeline_epp.kvevents.subscription import KvSubscription
from treeline_wire import frames
from treeline_wire.events import BlockRemoved, BlockStored, EventBatch, encode_batch
from treeline_wire.frames import HelloRequest, ReplayRequest, Request, SnapshotRequest
from treeline_wire.load import LOAD_TOPIC, TREELINE_LOAD_TOPIC, LoadStat, TreelineLoad
from treeline_wire.security import CurveKeys


class Script:
    """A scripted subscription that records its events."""

    pod = "p"
    busy = False

    def __init__(self) -> None:
        self.connected = 0
        self.disconnected = 0
        self.ticks = 0
        self.live: list[tuple[int, EventBatch | None]] = []
        self.replies: list[Answer] = []
        self.loads: list[Load] = []
        self.troubles = 0
        self.stats = KvStats()

    def on_connected(self, now: float) -> list[Request]:
        self.connected += 1
        return [HelloRequest()]

    def on_disconnected(self, now: float) -> None:
        self.disconnected += 1

    def on_live(self, seq: int, batch: EventBatch | None, now: float) -> list[Request]:
        self.live.append((seq, batch))
        return [ReplayRequest(0)] if batch is None else []

    def on_reply(self, reply: Answer, now: float) -> list[Request]:
        self.replies.append(reply)
        return [SnapshotRequest()] if isinstance(reply, frames.Hello) else []

    def on_tick(self, now: float, in_flight: int = 0) -> list[Request]:
        assert in_flight == 3
        self.ticks += 1
        return []

    def on_load(self, load: Load) -> Sequence[Request]:
        self.loads.append(load)
        return []

    def on_trouble(self) -> None:
        self.troubles += 1

    @property
    def seqs(self) -> list[int]:
        return [seq for seq, _ in self.live]


@contextlib.asynccontextmanager
async def subscribed(source: KvSource, curve: CurveKeys | None = None) -> AsyncIterator[Script]:
    script: Any = Script()
    context = zmq.asyncio.Context()
    callbacks = KvCallbacks(script, script.on_load, script.on_trouble, lambda: 3, script.stats)
    ticker = Ticker()
    ticking = asyncio.create_task(ticker.run())
    task = asyncio.create_task(KvConnection(context, ticker, source, callbacks, curve).run())
    try:
        yield script
    finally:
        task.cancel()
        ticking.cancel()
        await asyncio.gather(task, ticking, return_exceptions=True)
        context.destroy(linger=0)


@contextlib.asynccontextmanager
async def publisher(**settings: Any) -> AsyncIterator[FakePublisher]:
    made = FakePublisher(**settings)
    try:
        yield made
    finally:
        made.stop()


async def test_a_connection_sends_hello_and_receives_everything_in_order() -> None:
    async with publisher(epoch=7) as fake, subscribed(fake.source) as script:
        await fake.subscribed()
        await until(lambda: len(script.replies) >= 4, "hello and snapshot were answered", state=lambda: script.replies)
        assert script.replies[:2] == [frames.Hello(7), frames.SnapshotHeader(7, -1, 0)]
        for i in range(200):
            await fake.store(stored(range(16 * i, 16 * i + 16)))
        await until(lambda: len(script.live) == 200, "all batches came", state=lambda: len(script.live))
        assert script.seqs == list(range(200))
        assert (script.stats.batches, script.stats.events) == (200, 200)
        await until(lambda: script.ticks >= 2, "time passes")
        assert (script.connected, script.disconnected) == (1, 0)


async def test_an_unreadable_batch_is_reported_by_number_and_counted() -> None:
    async with publisher() as fake, subscribed(fake.source) as script:
        await fake.subscribed()
        await until(lambda: script.connected, "connected")
        await fake.send(b"\xc1 not msgpack")
        await fake.store(stored(range(16)))
        await until(lambda: script.seqs == [0, 1], "both came")
        assert script.live[0] == (0, None)
        assert sum(script.stats.rejected.values()) >= 1
        await until(lambda: "ReplayRequest" in fake.asked, "the action was sent")


async def test_a_publisher_that_sends_too_many_bytes_is_disconnected_with_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with publisher() as fake, subscribed(fake.source) as script:
        await fake.subscribed()
        await until(lambda: script.connected, "connected")
        await fake.send(bytes(MOST_BYTES["events"] - 100))  # with its number and topic
        await until(lambda: script.seqs == [0], "as many as it may")
        await fake.send(bytes(MOST_BYTES["events"] + 1))
        await until(lambda: script.connected == 2, "it is disconnected, and followed again", state=lambda: script.seqs)
        await fake.subscribed()
        await fake.store(stored(range(16)))
        await until(lambda: script.seqs[1:] == [2], "what follows is heard")
        assert script.stats.disconnects == 1
        assert "sent a message of over 8388608 bytes" in caplog.text


@pytest.mark.parametrize("what", sorted(MOST_BYTES))
async def test_bytes_waiting_in_a_socket_are_bounded(what: str) -> None:
    """The picker reads nothing: soon the publisher can send no more, and memory stays constant."""
    message = bytes(MOST_BYTES[what])
    most = 16 + (128 << 20) // len(message)  # what the kernel keeps
    context, theirs = zmq.asyncio.Context(), zmq.Context()
    sockets = _Sockets(Ticker(), Any, None)  # type: ignore[arg-type]
    try:
        ends = {name: theirs.socket(zmq.ROUTER if name == "replay" else zmq.XPUB) for name in MOST_BYTES}
        for name, end in ends.items():
            end.setsockopt(zmq.LINGER, 0)
            end.setsockopt(zmq.SNDHWM, 1)
            end.setsockopt(zmq.SNDTIMEO, 1000)
            end.setsockopt(zmq.RCVTIMEO, 5000)
            end.setsockopt(zmq.ROUTER_MANDATORY if name == "replay" else zmq.XPUB_NODROP, 1)
            end.bind("tcp://127.0.0.1:*")
        ports = {name: int(end.last_endpoint.rpartition(b":")[2]) for name, end in ends.items()}
        sockets.open(context, KvSource("127.0.0.1", ports["events"], ports["replay"], ports["load"]))
        if what == "replay":
            await sockets._sockets[what].send(b"ask")

        def send_until_full() -> int:
            first = ends[what].recv_multipart()  # the message of a subscription
            head = first[:1] if what == "replay" else []
            for sent in range(most + 20):
                try:
                    ends[what].send_multipart([*head, message])
                except zmq.Again:
                    return sent
            return most + 20

        sent = await asyncio.to_thread(send_until_full)
        assert 4 <= sent <= most, f"{sent} messages of the most bytes that wait"
    finally:
        sockets.close()
        context.destroy(linger=0)
        theirs.destroy(linger=0)


async def test_load_reports_are_read_in_our_form_if_available() -> None:
    async with publisher() as fake, subscribed(fake.source) as script:
        await fake.load_subscribed()
        await fake.report(LOAD_TOPIC, LoadStat(num_running=1))
        await until(lambda: len(script.loads) == 1, "the older form, alone, counts")
        await fake.report(TREELINE_LOAD_TOPIC, TreelineLoad(running=2))
        await fake.report(LOAD_TOPIC, LoadStat(num_running=3))
        await fake.report(TREELINE_LOAD_TOPIC, TreelineLoad(running=4))
        await fake._load.send_multipart([b"load", b"\xc1"])
        await until(lambda: script.stats.rejected["bad_load"] == 1, "the last message came")
        assert script.loads == [LoadStat(num_running=1), TreelineLoad(running=2), TreelineLoad(running=4)]


async def test_a_publisher_that_dies_is_noticed_at_once_and_its_successor_is_greeted() -> None:
    first = FakePublisher(epoch=1)
    async with subscribed(first.source) as script:
        await first.subscribed()
        await until(lambda: frames.Hello(1) in script.replies, "greeted")
        first.stop()
        await until(lambda: script.disconnected == 1, "the loss is noticed")
        assert script.troubles == 1
        async with publisher(epoch=2, ports=first.ports) as second:
            await until(lambda: frames.Hello(2) in script.replies, "the successor is greeted")
            assert script.connected == 2
            await second.store(stored(range(16)))
            await until(lambda: script.seqs == [0], "and heard")


async def test_a_missing_socket_delays_a_session_by_a_second_only() -> None:
    async with publisher() as fake:
        gone = FakePublisher()
        gone.stop()
        async with subscribed(KvSource("127.0.0.1", fake.events_port, gone.replay_port, fake.load_port)) as script:
            await until(lambda: script.connected, "a session without its replay socket")


async def test_with_keys_only_publishers_with_the_pair_are_heard(tmp_path: Path) -> None:
    keys, others = CurveKeys.generate(tmp_path / "ours"), CurveKeys.generate(tmp_path / "theirs")
    async with publisher(curve=keys) as fake:
        async with subscribed(fake.source, keys) as script:
            await until(lambda: script.replies, "answered")
        async with subscribed(fake.source, others) as stranger, subscribed(fake.source, keys) as script:
            await until(lambda: script.replies, "answered")
            assert stranger.connected == 0


async def test_a_replay_leaves_time_for_everything_else_after_every_few_batches() -> None:
    index, count, calls = Index(), 400, itertools.count()
    subscription = KvSubscription(index, index.add_pod("p", "m"), None, ours=False)
    callbacks = KvCallbacks(subscription, lambda _: [], lambda: None, lambda: 0, KvStats())
    context, ticker = zmq.asyncio.Context(), Ticker()
    ticker.turns = Turns(lambda: next(calls) * SLICE_S / 4)  # four pieces of work are a slice
    async with publisher() as fake:
        for at in range(count):
            await fake.store(stored(range(16 * at, 16 * at + 16)))
        source = KvSource("127.0.0.1", fake.events_port, fake.replay_port)
        task = asyncio.create_task(KvConnection(context, ticker, source, callbacks, None).run())
        most, before, deadline = 0, 0, time.monotonic() + 60
        try:
            while subscription.next_seq != count:
                assert time.monotonic() < deadline, (subscription.state, subscription.next_seq)
                await asyncio.sleep(0)
                now = subscription.counts["applied"]
                before, most = now, max(most, now - before)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            context.destroy(linger=0)
    assert subscription.counts["replay"] == 1
    assert 1 <= most <= 5


class Texts:
    """A table of tokens whose texts are all different."""

    token_bytes = [b"%05d" % token for token in range(1 << 16)]  # noqa: RUF012


@pytest.mark.parametrize(
    "one_event", [True, pytest.param(False, marks=pytest.mark.deep)], ids=["one event", "an event each"]
)
async def test_many_removals_delay_no_other_task_and_keep_their_order(one_event: bool) -> None:
    count, rng = 30_000, random.Random(0)
    hashes = [rng.getrandbits(63) for _ in range(count)]
    tokens = [rng.randrange(1 << 16) for _ in range(count)]
    index, keys = Index(), Texts()
    pod = index.add_pod("p", "m")
    for at in range(0, count, 100):
        index.apply(pod, BlockStored(hashes[at : at + 100], None, tokens[at : at + 100], 1), keys)
    assert pod.blocks == count
    gone = rng.sample(hashes, count)
    removed = [BlockRemoved(gone)] if one_event else [BlockRemoved([block]) for block in gone]
    subscription = KvSubscription(index, pod, keys, ours=False, replays=False)
    callbacks = KvCallbacks(subscription, lambda _: [], lambda: None, lambda: 0, KvStats())
    async with publisher() as fake:
        source = KvSource("127.0.0.1", fake.source.events_port)
        context, ticker = zmq.asyncio.Context(), Ticker()
        task = asyncio.create_task(KvConnection(context, ticker, source, callbacks, None).run())
        try:
            await fake.subscribed()
            await fake.send(encode_batch(1.0, removed))
            await fake.send(encode_batch(2.0, [BlockStored(hashes[:1], None, tokens[:1], 1)]))
            longest, before = 0.0, time.thread_time()
            deadline = time.monotonic() + 60
            while pod.blocks != 1 or subscription.busy or subscription.next_seq != 2:
                assert time.monotonic() < deadline, (pod.blocks, subscription.state)
                await asyncio.sleep(0)
                now = time.thread_time()
                before, longest = now, max(longest, now - before)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            context.destroy(linger=0)
    assert index.blocks_of(pod) == {hashes[0]}, "in the order in which they were published"
    assert longest < 30 * reference_s()
