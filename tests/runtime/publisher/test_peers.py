"""Bounds for the peers of a publisher's sockets: their bytes, and their number."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import zmq
from support.raw_zmtp import frame, is_ended, raw_client
from support.stack import until
from treeline_runtime.publisher import peers
from treeline_runtime.publisher.peers import BYTES_A_SECOND, Peers

BURST = 4096


@contextlib.contextmanager
def bound(kind: int) -> Iterator[tuple[zmq.Socket[bytes], int, Peers]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(kind)
    try:
        sock.bind("tcp://127.0.0.1:*")
        yield sock, int(sock.last_endpoint.rpartition(b":")[2]), Peers(sock, BURST)
    finally:
        context.destroy(linger=0)


def told(members: Peers, count: int) -> None:
    """Wait until `count` peers are known; none may be disconnected."""

    def known() -> bool:
        assert not members.look(0.0)
        return len(members) == count

    until(known, f"{count} peers, not {len(members)}")


@pytest.mark.parametrize(
    ("kind", "theirs", "sends"),
    [
        (zmq.PUB, b"SUB", frame(b"\x01" + bytes(1000), more=False) * 5),
        (zmq.PUB, b"SUB", b"\x01\x00" * BURST),
        (zmq.ROUTER, b"DEALER", b"\x01\x00" * BURST),
        (zmq.ROUTER, b"DEALER", frame(bytes(BURST), more=True) * 2),
    ],
    ids=["subscriptions", "empty frames of one", "empty frames of a request", "a request"],
)
def test_a_peer_beyond_its_share_is_disconnected_and_others_stay(kind: int, theirs: bytes, sends: bytes) -> None:
    with bound(kind) as (_, port, members), raw_client(port, theirs) as other, raw_client(port, theirs) as hostile:
        told(members, 2)
        hostile.sendall(sends)
        until(lambda: members.look(0.0), "it is ended")
        assert is_ended(hostile)
        told(members, 1)
        other.sendall(frame(b"\x01a", more=False))
        told(members, 1)


def test_heartbeats_are_never_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with bound(zmq.PUB) as (_, port, members), raw_client(port, b"SUB") as peer:
        told(members, 1)
        counts = iter(range(0, 10**9, BYTES_A_SECOND))
        monkeypatch.setattr(peers.tcp_counts, "received", lambda _: next(counts))
        assert not any(members.look(float(now)) for now in range(100_000))
        monkeypatch.setattr(peers.tcp_counts, "received", lambda _: 100_000 * BYTES_A_SECOND + BURST + 1)
        assert members.look(100_000.0) == 1
        assert is_ended(peer)


def test_a_peer_may_send_many_requests() -> None:
    with bound(zmq.ROUTER) as (router, port, members), raw_client(port, b"DEALER") as peer:
        told(members, 1)
        for _ in range(3):
            peer.sendall(frame(bytes(BURST // 2), more=False))
            assert router.poll(30_000)
            router.recv(copy=False)
            members.asked(int(router.recv(copy=False).get(zmq.SRCFD)))
            assert members.look(0.0) == 0


def test_a_new_peer_is_refused_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MOST_PEERS", 2)
    with bound(zmq.PUB) as (_, port, members), contextlib.ExitStack() as stack:
        first: list[socket.socket] = [stack.enter_context(raw_client(port, b"SUB")) for _ in range(2)]
        told(members, 2)
        late = stack.enter_context(raw_client(port, b"SUB"))
        until(lambda: members.look(0.0), "it is ended")
        assert is_ended(late)
        first[0].close()
        told(members, 1)
        stack.enter_context(raw_client(port, b"SUB"))
        told(members, 2)
