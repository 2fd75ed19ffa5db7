"""The peers of a publisher's socket: their number, and the little they may send.

ZMQ bounds a frame, but not the frames of a message, a peer's subscriptions (some 40 bytes per byte) or the number of
peers. So the kernel's count of received bytes is checked often, and a connection over its share is ended, which frees
its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import zmq
from treeline_wire import tcp_counts
from zmq.utils.monitor import parse_monitor_message

LOOK_S: Final = 0.1
MOST_PEERS: Final = 256
"""Peers of one socket: pickers and their workers. Later ones are disconnected."""
BYTES_A_SECOND: Final = 64
"""A CURVE heartbeat has 42; other projects' subscribers may send some."""


@dataclass(slots=True)
class _Peer:
    connection: int
    since: float
    sent: int = 0
    asked: bool = False
    """Whether it has sent an answered request since the last check."""


class Peers:
    """The peers of a bound socket. `burst`: bytes that a peer may send at once."""

    def __init__(self, sock: zmq.Socket[bytes], burst: int) -> None:
        self._burst = burst
        self._monitor = sock.get_monitor_socket(zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
        self._peers: dict[int, _Peer] = {}
        """Peers by the file descriptor of their connection."""

    def __len__(self) -> int:
        return len(self._peers)

    def asked(self, fd: int) -> None:
        """Renews the allowance of a peer that has sent an answered request."""
        if peer := self._peers.get(fd):
            peer.asked = True

    def close(self) -> None:
        """Call it before the socket is closed."""
        self._monitor.close()

    def look(self, now: float) -> int:
        """Checks all peers; returns how many connections were ended."""
        ended = 0
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            fd = int(event["value"])
            if event["event"] == zmq.Event.DISCONNECTED:
                self._peers.pop(fd, None)
            else:
                try:
                    self._peers[fd] = _Peer(tcp_counts.identity(fd), now)
                except OSError:  # it has gone
                    self._peers.pop(fd, None)
        # After all events are read, because only they tell that a number belongs to another connection now.
        for fd in list(self._peers)[MOST_PEERS:]:
            del self._peers[fd]
            ended += _end(fd)
        for fd, peer in list(self._peers.items()):
            try:
                if tcp_counts.identity(fd) != peer.connection:
                    continue  # an event will report that it has gone
                sent = tcp_counts.received(fd)
            except OSError:
                continue
            if peer.asked:
                peer.asked, peer.sent, peer.since = False, sent, now
            elif sent - peer.sent > self._burst + BYTES_A_SECOND * (now - peer.since):
                ended += _end(fd)
                del self._peers[fd]
        return ended


def _end(fd: int) -> bool:
    """Ends a connection; returns whether it existed."""
    try:
        tcp_counts.end(fd)
    except OSError:
        return False
    return True
