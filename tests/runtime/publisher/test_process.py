"""The publisher process on real sockets: live events, replay, hello, snapshot, load, and CURVE."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.publisher import Consumer, PublisherProcess, heard, receive
from support.raw_zmtp import is_ended, raw_client
from support.runtime_server import eventually, make_tokenizer
from treeline_runtime.ipc import (
    Failed,
)
from treeline_runtime.messages import DrainReq
from treeline_runtime.published import LoadUpdate, Removed
from treeline_wire import frames
from treeline_wire.events import decode_batch
from treeline_wire.load import LoadStat, TreelineLoad, decode_load
from treeline_wire.security import CurveKeys

pytestmark = pytest.mark.integration

EPOCH = PublisherProcess.EPOCH


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture
def start(tokenizer: Path) -> Iterator[Callable[..., PublisherProcess]]:
    started: list[PublisherProcess] = []
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as name:

        def start(**args: Any) -> PublisherProcess:
            started.append(PublisherProcess(Path(name), tokenizer, **args))
            return started[-1]

        yield start
        for publisher in started:
            publisher.close()


def answers(socket: zmq.Socket[bytes], request: list[bytes]) -> Iterator[frames.Reply]:
    """Yield the replies to a request, up to the last."""
    socket.send_multipart(request)
    while True:
        reply = frames.parse_reply(receive(socket))
        yield reply
        if isinstance(reply, frames.ReplayEnd | frames.SnapshotEnd | frames.Hello):
            return


def test_events_are_live_in_order_and_can_be_replayed(start: Callable[..., PublisherProcess]) -> None:
    publisher = start(kv_events_topic="kv@pod").started()
    events = publisher.subscribed()
    newest = publisher.settled()["seq"]
    publisher.store(1, 2)
    publisher.store(3, parent=2)
    publisher.update(Removed([3]))
    live = [frames.parse_live(receive(events)) for _ in range(3)]
    assert [seq for _, seq, _ in live] == [newest + 1, newest + 2, newest + 3]
    assert {topic for topic, _, _ in live} == {b"kv@pod"}

    replay = publisher.socket(zmq.DEALER, "replay_port")
    *items, end = answers(replay, frames.replay_request(newest + 1))
    assert end == frames.ReplayEnd()
    assert [(item.seq, item.payload) for item in items] == [(seq, payload) for _, seq, payload in live]  # type: ignore[union-attr]
    (hello,) = answers(replay, frames.hello_request())
    assert hello == frames.Hello(EPOCH, 0, newest + 3)


def test_a_big_snapshot_is_exact_and_does_not_hold_up_live_events(start: Callable[..., PublisherProcess]) -> None:
    publisher = start().started()
    events = publisher.subscribed()
    for first in range(100_000, 140_000, 100):
        publisher.store(*range(first, first + 100))
    before = publisher.settled()
    heard(events, before["seq"])

    client = publisher.socket(zmq.DEALER, "replay_port")
    client.setsockopt(zmq.RCVHWM, 1)
    answer = answers(client, frames.snapshot_request())
    header = next(answer)  # and no more of it is read before the event is there
    assert header == frames.SnapshotHeader(EPOCH, before["seq"], len(before["hashes"]))
    publisher.store(1, 2, 3)
    receive(events)
    publisher.update(Removed([100_099, 100_098]))

    consumer = Consumer()
    for reply in answer:
        if isinstance(reply, frames.SnapshotChunk):
            assert reply.rejected == 0
            consumer.apply(reply.events)
    assert set(consumer.pages) == set(before["hashes"])
    assert not consumer.orphans
    publisher.settled()
    for reply in answers(client, frames.replay_request(header.seq + 1)):
        if isinstance(reply, frames.ReplayItem):
            consumer.apply(decode_batch(reply.payload).events)
    assert set(consumer.pages) == set(publisher.settled()["hashes"])


def test_a_client_that_does_not_read_delays_no_other(start: Callable[..., PublisherProcess]) -> None:
    publisher = start().started()
    for number in range(3000):
        publisher.store(*range(number * 100, number * 100 + 20))
    publisher.settled()
    stalled = publisher.context.socket(zmq.DEALER)
    stalled.setsockopt(zmq.RCVHWM, 1)
    stalled.connect(f"tcp://127.0.0.1:{publisher.ports['replay_port']}")
    for _ in range(8):  # more than are answered at once
        stalled.send_multipart(frames.replay_request(0))
    quick = publisher.socket(zmq.DEALER, "replay_port")
    *items, _ = answers(quick, frames.replay_request(0))
    assert len(items) == 3000
    stalled.close(linger=0)  # leaves in the middle
    (hello,) = answers(quick, frames.hello_request())
    assert isinstance(hello, frames.Hello)


def test_nonsense_on_the_replay_socket_is_dropped(start: Callable[..., PublisherProcess]) -> None:
    publisher = start().started()
    client = publisher.socket(zmq.DEALER, "replay_port")
    for request in ([b""], [b"x" * 9], [b"", b"treeline", b"dance", b"1"], [b"", b"\xff" * 7], [b"a"] * 9):
        client.send_multipart(request)
    (hello,) = answers(client, frames.hello_request())
    assert hello == frames.Hello(EPOCH, None, None)
    snapshot = list(answers(client, frames.snapshot_request()))
    assert snapshot == [frames.SnapshotHeader(EPOCH, -1, 0), frames.SnapshotEnd()]


@pytest.mark.parametrize(("port", "kind"), [("events_port", b"SUB"), ("load_port", b"SUB"), ("replay_port", b"DEALER")])
def test_a_peer_with_an_endless_message_is_disconnected_and_others_are_served(
    start: Callable[..., PublisherProcess], port: str, kind: bytes
) -> None:
    publisher = start().started()
    events = publisher.socket(zmq.SUB, "events_port")
    client = publisher.socket(zmq.DEALER, "replay_port")
    with raw_client(publisher.ports[port], kind) as peer:
        with contextlib.suppress(OSError):
            peer.sendall(b"\x01\x00" * (1 << 17))
        assert is_ended(peer)
    (hello,) = answers(client, frames.hello_request())
    assert hello == frames.Hello(EPOCH, None, None)
    publisher.store(1)
    assert decode_batch(receive(events)[2]).events


def test_load_is_reported_in_both_forms_and_draining_with_it(start: Callable[..., PublisherProcess]) -> None:
    publisher = start().started()
    loads = publisher.socket(zmq.SUB, "load_port")

    def report(topic: bytes) -> LoadStat | TreelineLoad:
        while True:
            seen, _, payload = frames.parse_live(receive(loads))
            if seen == topic:
                return decode_load(seen, payload)

    receive(loads)
    publisher.outbox.send(LoadUpdate(running=3, waiting=2))
    assert eventually(lambda: report(b"load").num_running == 3)
    ours = report(b"treeline.load")
    assert isinstance(ours, TreelineLoad)
    assert (ours.epoch, ours.running, ours.in_flight, ours.draining) == (EPOCH, 3, 5, False)
    publisher.outbox.send(DrainReq())
    eventually(lambda: report(b"treeline.load").draining)


def test_with_keys_only_their_holders_can_listen(start: Callable[..., PublisherProcess], tmp_path: Path) -> None:
    keys = CurveKeys.generate(tmp_path / "keys")
    publisher = start(curve_dir=str(tmp_path / "keys")).started()
    assert publisher.ports["curve"] is True
    publisher.store(1)
    publisher.settled()
    stranger = publisher.socket(zmq.DEALER, "replay_port")
    with contextlib.suppress(zmq.Again):  # refused before it could ask
        stranger.send_multipart(frames.hello_request(), zmq.NOBLOCK)
    publisher.keys = keys
    (hello,) = answers(publisher.socket(zmq.DEALER, "replay_port"), frames.hello_request())
    assert hello == frames.Hello(EPOCH, 0, 0)
    assert not stranger.poll(200)
    assert receive(publisher.socket(zmq.SUB, "load_port"))


def test_a_port_taken_after_the_check_is_named(start: Callable[..., PublisherProcess]) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        publisher = start(replay_port=port)
        message = publisher.heard()
    assert isinstance(message, Failed)
    assert f"--replay-port: cannot bind 127.0.0.1:{port}" in message.message
    assert publisher.process.wait(60) == 1
    publisher.process = subprocess.Popen(["true"], stdin=subprocess.PIPE)
