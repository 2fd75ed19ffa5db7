"""Peers that speak ZMTP byte by byte, to send what ZMQ never would: endless messages."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def frame(data: bytes, *, more: bool) -> bytes:
    """Return one frame of a message."""
    return bytes([2 | more]) + len(data).to_bytes(8, "big") + data


def _greet(peer: socket.socket, kind: bytes) -> None:
    peer.sendall(_GREETING)
    left = 64
    while left:
        left -= len(peer.recv(left))
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    peer.sendall(bytes([4, len(ready)]) + ready)


def raw_client(port: int, kind: bytes) -> socket.socket:
    """Connect to a ZMQ socket on this machine, as a socket of this kind."""
    peer = socket.create_connection(("127.0.0.1", port))
    peer.settimeout(30)
    _greet(peer, kind)
    return peer


def is_ended(peer: socket.socket) -> bool:
    """Wait until the other side has closed the connection."""
    try:
        while peer.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def raw_publisher(talk: Callable[[socket.socket], None], kind: bytes = b"PUB") -> Iterator[tuple[int, threading.Event]]:
    """Run a publisher and yield its port; `talk` is called with each connection after the handshake, and the event is
    set when the peer has closed one."""
    ended = threading.Event()

    def serve(peer: socket.socket) -> None:
        with peer:
            try:
                _greet(peer, kind)
                talk(peer)
                while peer.recv(1 << 16):
                    pass
            except OSError:
                pass
            ended.set()

    def accept() -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(peer,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield server.getsockname()[1], ended
        finally:
            server.shutdown(socket.SHUT_RDWR)
