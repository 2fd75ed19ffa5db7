"""The port that workers share: who gets which connection, and what becomes of those that nobody can take."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.epp_io import until
from support.ports import free_ports
from treeline_epp.extproc.http2_server import Http2Server
from treeline_epp.extproc.tls import Certificate, TlsError, self_signed
from treeline_epp.health import Health
from treeline_epp.workers import entrance as module
from treeline_epp.workers import link
from treeline_epp.workers import team as team_module
from treeline_epp.workers.entrance import Entrance, Handed, hand, to_shed
from treeline_epp.workers.link import Start, Status, Worker, lines
from treeline_epp.workers.team import GONE, Member, Team
from treeline_epp.xds.eds import Eds

HOST = "127.0.0.1"
CHECK = "/grpc.health.v1.Health/Check"


async def nobody_told(_ready: bool) -> None:
    pass


@contextlib.asynccontextmanager
async def served(folder: Path | None = None) -> AsyncIterator[tuple[int, list[Handed]]]:
    """The port, and two that serve its connections in turns, as workers would."""
    health = await Health.starting()
    pairs = [socket.socketpair(), socket.socketpair()]
    servers = [Http2Server(health.methods(), 1 << 16) for _ in pairs]
    handed = [
        Handed(pair[1], server, None if folder is None else Certificate(folder), lambda: None)
        for pair, server in zip(pairs, servers, strict=True)
    ]

    def give(connection: socket.socket) -> bool:
        fewest = min(range(2), key=lambda place: handed[place].taken)
        return hand(pairs[fewest][0], connection)

    (port,) = free_ports(1)
    entrance = Entrance(give)
    await entrance.start(HOST, port)
    entrance.open()
    try:
        yield port, handed
    finally:
        await entrance.stop(None)
        for one, server in zip(handed, servers, strict=True):
            one.close()
            await server.stop(0)
        for ours, _ in pairs:
            ours.close()


def channel(port: int, chain: bytes | None = None) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", "localhost")]
    if chain is None:
        return grpc.aio.insecure_channel(f"{HOST}:{port}", options)
    return grpc.aio.secure_channel(f"{HOST}:{port}", grpc.ssl_channel_credentials(chain), options)


async def answered(port: int, chain: bytes | None = None) -> bool:
    """Whether a connection of its own is answered."""
    async with channel(port, chain) as made:
        try:
            return await made.unary_unary(CHECK)(b"", timeout=60, wait_for_ready=chain is None) == b"\x08\x02"
        except grpc.aio.AioRpcError:
            return False


async def test_connections_are_handed_over_and_answered_by_each() -> None:
    async with served() as (port, handed):
        channels = [channel(port) for _ in range(6)]
        for made in channels:
            assert await made.unary_unary(CHECK)(b"", timeout=60) == b"\x08\x02"
        assert [one.taken for one in handed] == [3, 3]
        assert [one.server.connections for one in handed] == [3, 3]
        handed[0].server.shed(2)
        assert [one.server.connections for one in handed] == [1, 3]
        await until(lambda: len(handed[0].server.peers) == 1, "those without calls close")
        for made in channels:  # their clients come again
            assert await made.unary_unary(CHECK)(b"", timeout=60, wait_for_ready=True) == b"\x08\x02"
            await made.close()


async def test_a_new_certificate_is_used_by_all_for_those_who_come_then(tmp_path: Path) -> None:
    def write() -> bytes:
        key, chain = self_signed()
        (tmp_path / "tls.key").write_bytes(key)
        (tmp_path / "tls.crt").write_bytes(chain)
        return chain

    old = write()
    async with served(tmp_path) as (port, handed):
        assert [await answered(port, old) for _ in range(2)] == [True, True]
        new = write()
        assert [await answered(port, new) for _ in range(2)] == [True, True]
        assert not await answered(port, old), "it is no longer shown"
        taken = sum(one.taken for one in handed)
        with socket.create_connection((HOST, port)) as plain:
            plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            await until(lambda: sum(one.taken for one in handed) > taken, "it is handed over")
        assert await answered(port, new), "who speaks no TLS disturbs nobody"
    (tmp_path / "tls.crt").write_text("nonsense")
    with pytest.raises(TlsError):
        await Entrance(lambda _: True).start(HOST, 0, Certificate(tmp_path))


async def test_who_comes_when_nobody_can_take_it_is_turned_away() -> None:
    (port,) = free_ports(1)
    entrance = Entrance(lambda _: False)
    await entrance.start(HOST, port)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(HOST, port)
    entrance.open()
    reader, writer = await asyncio.open_connection(HOST, port)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()
    other = Entrance(lambda _: True)
    with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
        await other.start(HOST, port)
    await other.stop(None)
    await entrance.stop(None)


async def test_without_file_descriptors_accepting_rests_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.05)
    tries: list[None] = []

    class Full(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            tries.append(None)
            if len(tries) < 3:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    given: list[None] = []
    monkeypatch.setattr(module.socket, "socket", Full)
    entrance = Entrance(lambda _: bool(given.append(None)) or True)
    (port,) = free_ports(1)
    await entrance.start(HOST, port)
    entrance.open()
    _, writer = await asyncio.open_connection(HOST, port)
    await until(lambda: given, "it is accepted in the end")
    assert caplog.text.count("no connection can be accepted (Too many open files)") == 2
    writer.close()
    await entrance.stop(None)


async def test_a_worker_without_file_descriptors_loses_a_connection_says_so_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = await Health.starting()
    ours, its = socket.socketpair()
    server = Http2Server(health.methods(), 1 << 16)
    handed = Handed(its, server, None, lambda: None)
    ours.send(b"c")  # what comes where the kernel could not add the descriptor
    await until(lambda: handed.taken == 1, "it is counted, for the parent counts it, too")
    assert "a connection is lost: no file descriptor is left" in caplog.text
    client, connection = socket.socketpair(socket.AF_UNIX)
    with connection:
        assert hand(ours, connection)
    await until(lambda: handed.taken == 2, "the next one")
    client.close()
    ours.close()
    handed.close()
    await server.stop(0)


async def test_connections_of_a_flood_are_told_of_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SOON_S", 60.0)
    health = await Health.starting()
    ours, its = socket.socketpair()
    parents, link_end = socket.socketpair()
    reader, back = await asyncio.open_connection(sock=parents)
    _, writer = await asyncio.open_connection(sock=link_end)
    worker = Worker(Start(0, b"k" * 32, 0, its.detach(), ()), writer)
    server = Http2Server(health.methods(), 1 << 16)
    worker.serve(server, None)
    with socket.create_server((HOST, 0)) as door:
        clients = [socket.create_connection(door.getsockname()) for _ in range(10)]
        for _ in clients:
            with door.accept()[0] as connection:
                assert hand(ours, connection)
    await until(lambda: server.connections == 10, "all are there")
    worker.set_ready(True)  # which is told at once, and the connections with it
    said = await anext(lines(reader))
    assert isinstance(said, Status)
    assert (said.ready, said.taken, said.connections) == (True, 10, 10)
    for one in (*clients, ours):
        one.close()
    for stream in (back, writer):
        stream.close()
    await server.stop(0)


def team(count: int) -> tuple[Team, list[socket.socket]]:
    """Members that are ready, as far as they say, and what they are handed comes here."""
    pairs = [socket.socketpair() for _ in range(count)]
    made = Team([], Eds(), [ours for ours, _ in pairs], b"k", [], nobody_told)
    for member, (ours, _) in zip(made.members, pairs, strict=True):
        ours.setblocking(False)
        member.entrance, member.status = ours, Status(ready=True)
    return made, [its for _, its in pairs]


def close(made: Team, ends: list[socket.socket]) -> None:
    for one in (*(member.peer_socket for member in made.members), *ends):
        one.close()


def given(members: list[Member]) -> list[int]:
    return [member.given for member in members]


def test_a_connection_goes_to_the_worker_with_the_fewest_that_can_take_it() -> None:
    made, ends = team(3)
    first, second, third = made.members
    with socket.socket() as connection:
        assert all(made.give(connection) for _ in range(6))
        assert given(made.members) == [2, 2, 2]
        first.status = Status(ready=True, taken=2, connections=0)  # what it had is closed
        assert all(made.give(connection) for _ in range(2))
        assert given(made.members) == [4, 2, 2]
        second.silent = True
        third.status = Status(ready=False)
        assert all(made.give(connection) for _ in range(3))
        assert given(made.members) == [7, 2, 2], "not to one that hangs, nor to one that drains"
        ends[0].close()
        assert not made.give(connection), "the only one has ended"
        assert given(made.members) == [7, 2, 2]
    close(made, ends)


def test_a_worker_that_reads_nothing_gets_no_more_than_the_socket_holds() -> None:
    made, ends = team(1)
    with socket.socket() as connection:
        assert any(not made.give(connection) for _ in range(100_000)), "giving does not wait"
    close(made, ends)


@pytest.mark.parametrize(
    ("loads", "shed"),
    [
        ([], []),
        ([5], [0]),
        ([2, 0], [1, 0]),
        ([2, 1], [0, 0]),
        ([2, 2, 0], [0, 1, 0]),
        ([0, 9, 0], [0, 6, 0]),
        ([4, 0, 4, 1], [1, 0, 2, 0]),
    ],
)
def test_those_with_too_many_connections_give_some_up(loads: list[int], shed: list[int]) -> None:
    assert to_shed(loads) == shed
    left = [load - count for load, count in zip(loads, shed, strict=True)]
    for _ in range(sum(shed)):  # they come again
        left[left.index(min(left))] += 1
    assert not left or max(left) - min(left) <= 1


async def test_the_picker_is_ready_when_each_worker_was_and_until_none_is() -> None:
    made, ends = team(2)
    said: list[bool] = []

    async def on_ready(ready: bool) -> None:
        said.append(ready)

    made._on_ready = on_ready
    first, second = made.members
    for member in made.members:
        member.status = GONE
    await made._on_status(first, Status(ready=True))
    await made._on_status(first, Status(ready=True, connections=1))
    assert said == [], "the other one starts, however slowly"
    await made._on_status(second, Status(ready=True))
    await made._on_status(first, GONE)
    assert said == [True], "one that is there serves for one that is not"
    await made._on_status(second, GONE)
    await made._on_status(first, Status(ready=True))
    assert said == [True, False, True]
    close(made, ends)


async def test_a_worker_is_missed_for_its_own_silence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stood still has silenced nobody; a worker that hangs is given nothing, and killed in the end."""
    now, signals = [1000.0], list[int]()
    process: Any = SimpleNamespace(poll=lambda: None, send_signal=signals.append, pid=1)
    monkeypatch.setattr(team_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(team_module, "_LOOK_S", 0)
    made, ends = team(1)
    (member,) = made.members
    member.process, member.heard_at, member.was_ready = process, now[0], True
    looking = asyncio.create_task(made._look())

    async def passes(seconds: float) -> None:
        now[0] += seconds
        for _ in range(3):
            await asyncio.sleep(0)

    await passes(0.0)
    await passes(100.0)
    assert (member.silent, signals) == (False, [])
    for _ in range(4):
        await passes(0.9)
    assert (member.silent, made.places()[0].silent_s > 3.0, signals) == (True, True, [])
    await made._on_status(member, Status(ready=True))
    assert not member.silent
    for _ in range(23):
        await passes(0.9)
    assert (member.silent, signals) == (True, [signal.SIGKILL])
    looking.cancel()
    close(made, ends)
