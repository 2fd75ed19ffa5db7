"""Sockets that HTTP workers share."""

from __future__ import annotations

import contextlib
import socket
import sys

import pytest
from treeline_runtime import listeners
from treeline_runtime.args import ServerArgs
from treeline_runtime.listeners import ListenError, address, join, listen, listening

ARGS = ServerArgs(model="m", port=0, metrics_port=None, admin_port=None, http_workers=3)


def accepted(*sockets: socket.socket) -> list[int]:
    """How many new connections each has."""
    counts = [0] * len(sockets)
    for index, one in enumerate(sockets):
        with contextlib.suppress(BlockingIOError):
            while True:
                one.accept()[0].close()
                counts[index] += 1
    return counts


def connect(to: socket.socket, count: int) -> None:
    for _ in range(count):
        socket.create_connection(address(to)).close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux spreads connections")
def test_a_socket_has_its_part_of_the_connections_once_it_listens() -> None:
    with listening(ARGS) as made:
        first, others = made.http, made.workers
        assert {address(one) for one in others} == {address(first)}
        connect(first, 64)
        assert accepted(first) == [64], "nobody has to wait for a worker that is not there yet"
        for other in others:
            other.listen()
        connect(first, 64)
        counts = accepted(first, *others)
        assert sum(counts) == 64
        assert all(counts), "each has some (but for once in 10^11)"
        for shared in (False, True):
            with pytest.raises(ListenError, match=r"--port: cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
                listen(*address(first), "", shared=shared)
    assert [one.fileno() for one in (first, *others)] == [-1] * 3


def test_where_connections_are_not_spread_all_take_from_one_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "SPREADS", False)
    with listening(ARGS) as made:
        connect(made.http, 2)
        assert accepted(made.workers[1], made.http) == [2, 0]
        with pytest.raises(ListenError, match="Address already in use"):
            listen(*address(made.http), "", shared=True)


def test_a_socket_of_its_own_cannot_be_joined() -> None:
    with (
        contextlib.closing(listen("127.0.0.1", 0, "")) as alone,
        pytest.raises(OSError, match="Address already in use"),
    ):
        join(alone)


@pytest.mark.parametrize("host", ["nosuch.invalid", "a" * 70, "", "127.0.0.1:80", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_says_what_to_give(host: str) -> None:
    with pytest.raises(ListenError, match=r"^--metrics-host: .* is no address of this machine: give 127\.0\.0\.1 "):
        listen(host, 0, "metrics-")
