"""Where workers and other pickers hear each other, and which settings are shared out between workers."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence

from treeline_epp.options import Options
from treeline_epp.peers.gossip import Address

_LOOPBACK = "127.0.0.1"
_REACHED_AT = {"0.0.0.0": _LOOPBACK, "::": "::1"}


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
