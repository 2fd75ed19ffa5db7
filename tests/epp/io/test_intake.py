"""Publishers are disconnected for too many frames, too many bytes, or a message that does not end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.epp_io import stored, until
from support.raw_zmtp import frame, raw_publisher
from treeline_epp.endpoints.adapters.base import KvSource
from treeline_epp.kvevents import connection
from treeline_epp.kvevents.connection import LOOKED_AT, MOST_BYTES, Ticker
from treeline_epp.kvevents.intake import Intake, IntakeError

from .test_connection import publisher, subscribed

MIB = 1 << 20


def endless(peer: socket.socket) -> None:
    """Send one message in frames of 1 MiB, twice the bytes that a message may have."""
    for _ in range(2 * MOST_BYTES["events"] // MIB):
        peer.sendall(frame(bytes(MIB), more=True))


def empty(peer: socket.socket) -> None:
    """Send empty frames with that many bytes of headers."""
    for _ in range(2 * MOST_BYTES["events"] // MIB):
        peer.sendall(b"\x01\x00" * (MIB // 2))


def many(peer: socket.socket) -> None:
    """Send a message of six frames."""
    peer.sendall(5 * frame(b"", more=True) + frame(b"", more=False))


def in_parts(peer: socket.socket) -> None:
    """Send three frames, each of them small enough."""
    part = bytes(MOST_BYTES["load"] // 2)
    peer.sendall(2 * frame(part, more=True) + frame(part, more=False))


@pytest.mark.parametrize(
    ("what", "talk", "why"),
    [
        ("events", endless, "it sent over 8388608 bytes without a whole message (events)"),
        ("events", empty, "it sent over 8388608 bytes without a whole message (events)"),
        ("replay", endless, "it sent over 8388608 bytes without a whole message (replay)"),
        ("load", empty, "it sent over 65536 bytes without a whole message (load)"),
        ("load", endless, "it is gone, or sent a message of over 65536 bytes (load)"),
        ("events", many, "it sent a message of over 5 frames (events)"),
        ("replay", many, "it sent a message of over 5 frames (replay)"),
        ("load", in_parts, "it sent a message of over 65536 bytes (load)"),
    ],
)
async def test_a_publisher_whose_message_is_too_long_is_disconnected_and_others_go_on(
    what: str, talk: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = b"ROUTER" if what == "replay" else b"PUB"
    async with publisher() as other, publisher() as fake, subscribed(other.source) as heard:
        await other.subscribed()
        with raw_publisher(talk, kind) as (port, ended):
            ports = {"events": fake.events_port, "replay": fake.replay_port, "load": fake.load_port, what: port}
            source = KvSource("127.0.0.1", *(ports[name] for name in ("events", "replay", "load")))
            async with subscribed(source) as script:
                await until(lambda: script.disconnected, "its session ends", 30, lambda: script.connected)
                assert await asyncio.to_thread(ended.wait, 30), "it is disconnected"
                assert why in caplog.text
                await until(lambda: script.disconnected > 1, "it is followed again, and ended")
        await other.store(stored(range(16)))
        await until(lambda: heard.seqs == [0], "another is heard", 30)
        assert heard.disconnected == 0


async def test_a_connection_that_is_gone_before_its_handshake_is_noticed_ends_the_session() -> None:
    talks = iter([endless, lambda _: None])
    with raw_publisher(lambda peer: next(talks)(peer)) as (port, ended), contextlib.ExitStack() as others:
        async with publisher() as fake:
            source = KvSource("127.0.0.1", fake.events_port, fake.replay_port, port)
            async with subscribed(source) as script:
                await asyncio.sleep(0)  # the sockets connect; what becomes of that is not looked at before
                assert ended.wait(30), "ZMQ ends a connection for a frame that is too long"
                for _ in range(20):  # one of them has its number now
                    others.enter_context(socket.create_connection(("127.0.0.1", fake.events_port)))
                await until(lambda: script.disconnected, "its session ends", 30)


async def test_the_loss_of_the_replay_socket_alone_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    def hang_up(peer: socket.socket) -> None:
        peer.recv(1)
        peer.shutdown(socket.SHUT_RDWR)

    async with publisher() as fake:
        with raw_publisher(hang_up, b"ROUTER") as (port, _):
            async with subscribed(KvSource("127.0.0.1", fake.events_port, port)) as script:
                await until(lambda: script.disconnected, "its session ends", 30)
                assert "it is gone, or sent a message of over 8388608 bytes (replay)" in caplog.text


STALLED = """
import sys, time, zmq
from treeline_epp.kvevents.connection import _SOCKET_OPTIONS
context = zmq.Context()
ours, theirs = context.socket(zmq.SUB), context.socket(zmq.XPUB)
for option, value in _SOCKET_OPTIONS.items():
    ours.setsockopt(option, value)
theirs.bind("tcp://127.0.0.1:*")
lost = ours.get_monitor_socket(zmq.Event.DISCONNECTED)
ours.subscribe(b"")
ours.connect(theirs.last_endpoint)
theirs.recv()
for number in range(100):
    theirs.send(b"%d" % number)
print("lost" if lost.poll(5000) else "kept", flush=True)
for number in range(100):
    assert ours.poll(30_000) and ours.recv() == b"%d" % number
print("all came")
context.destroy(linger=0)
"""


@pytest.mark.deep
def test_messages_that_wait_for_long_end_neither_the_connection_nor_the_process() -> None:
    run = subprocess.run([sys.executable, "-c", STALLED], capture_output=True, text=True, timeout=90)
    assert (run.returncode, run.stdout.split("\n")[:2]) == (0, ["kept", "all came"]), run.stderr


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            yield ours, theirs


def begun(ours: socket.socket, most_bytes: int = 1000) -> Intake:
    intake = Intake(most_bytes)
    intake.begin(ours.fileno())
    return intake


def test_messages_before_the_noticed_handshake_count() -> None:
    with pair() as (ours, theirs):
        theirs.sendall(bytes(MIB + 2000))
        ours.recv(MIB + 2000, socket.MSG_WAITALL)
        intake = begun(ours)
        with pytest.raises(IntakeError, match="over 1000 bytes without a whole message"):
            intake.look()


def test_messages_read_before_the_noticed_handshake_do_not_count() -> None:
    with pair() as (ours, theirs):
        theirs.sendall(bytes(MIB + 2000))
        ours.recv(MIB + 2000, socket.MSG_WAITALL)
        intake = Intake(1000)
        intake.read = True
        intake.begin(ours.fileno())
        intake.look()
        intake.look()


def test_bytes_in_the_kernel_do_not_count() -> None:
    with pair() as (ours, theirs):
        intake = begun(ours)
        for _ in range(3):
            theirs.sendall(bytes(MIB))
            intake.look()
            ours.recv(MIB, socket.MSG_WAITALL)
            intake.read = True
            intake.look()
        theirs.sendall(bytes(MIB + 2000))
        intake.look()
        ours.recv(MIB, socket.MSG_WAITALL)
        intake.look()
        ours.recv(2000, socket.MSG_WAITALL)
        with pytest.raises(IntakeError, match="over 1000 bytes without a whole message"):
            intake.look()


def test_a_new_connection_with_a_reused_number_is_another() -> None:
    with pair() as (ours, _), pair() as (later, _):
        intake = begun(ours)
        intake.look()
        number = ours.detach()
        os.dup2(later.fileno(), number)
        with pytest.raises(IntakeError, match="gone"):
            intake.look()
        os.close(number)
        with pytest.raises(IntakeError, match="gone"):
            intake.look()


async def test_each_tick_checks_some_of_many_publishers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TICK_S", 0.0)
    ticker, ticks, looks = Ticker(), Counter[int](), Counter[int]()
    with contextlib.ExitStack() as stack:
        for number in range(3 * LOOKED_AT):

            def call(look: bool, number: int = number) -> None:
                ticks[number] += 1
                looks[number] += look

            stack.enter_context(ticker.calling(call))
        task = asyncio.create_task(ticker.run())
        await until(lambda: ticks.total() >= 8 * 3 * LOOKED_AT, "eight ticks", 30)
        task.cancel()
    assert all(ticks[number] // 4 <= looks[number] <= ticks[number] // 4 + 1 for number in range(3 * LOOKED_AT))
