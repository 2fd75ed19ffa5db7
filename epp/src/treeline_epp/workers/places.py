"""Which ports a parent keeps for its workers, and which settings are shared out between them."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence

from treeline_epp.extproc.http2_server import Certificate
from treeline_epp.options import Options
from treeline_epp.peers.gossip import Address

_LOOPBACK = "127.0.0.1"
_REACHED_AT = {"0.0.0.0": _LOOPBACK, "::": "::1"}


class Kept:
    """A port that workers share: bound so that nobody else takes it, and not listened on, so that no connection comes
    here instead of to a worker."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    async def start(self, host: str, port: int, tls: Certificate | None = None) -> None:
        """Raises OSError, and what `tls` raises: workers will need both."""
        if tls is not None:
            tls.context()
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind(address)

    async def stop(self, _grace_s: float | None) -> None:
        """Give it away."""
        if self._socket is not None:
            self._socket.close()


def own_places(options: Options) -> list[Address]:
    """Where each worker hears others: on the ports from --peer-port on where there are other pickers, else on any of
    loopback."""
    if options.peers:
        return [(options.host, options.peer_port + index) for index in range(options.workers)]
    return [(_LOOPBACK, 0)] * options.workers


def names_of(options: Options, sockets: Sequence[socket.socket]) -> list[Address]:
    """Whom each worker tells: the workers beside it, and those of the other pickers, which have as many."""
    beside = [sock.getsockname()[:2] for sock in sockets]
    if options.peers:
        beside = [(_REACHED_AT.get(host, host), port) for host, port in beside]
    return [*beside, *((host, port + index) for host, port in options.peers for index in range(options.workers))]


def for_one(options: Options) -> Options:
    """The settings of one worker: what bounds memory is shared out, and what the parent has said is not said again."""
    share = max(options.max_body_bytes, options.max_waiting_body_bytes // options.workers)
    return dataclasses.replace(options, max_waiting_body_bytes=share, ignored=())
