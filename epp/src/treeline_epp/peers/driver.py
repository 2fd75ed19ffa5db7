"""The UDP socket by which pickers exchange their requests in flight, with every address of every peer's name.

It uses datagrams, because then no connection to changing peers must be kept or opened again: a lost one is noticed by
its number, and its content requested again (`gossip.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice
from typing import cast

from treeline_epp.metrics import Sample
from treeline_epp.peers.gossip import Address, Gossip, Outgoing

log = logging.getLogger(__name__)

RESOLVE_S = 5.0
"""Seconds until a new address of a peer's name is noticed; the new peer itself is noticed as soon as it sends."""
_TICK_S = 0.05
_MOST_ADDRESSES = 256
_BUFFER_BYTES = 4 << 20
_AT_ONCE, _PAUSE_S = 64, 0.002
"""Datagrams of a long snapshot that are sent at once, and the pause between: the receiver needs room for them."""


class _Socket(asyncio.DatagramProtocol):
    def __init__(self, gossip: Gossip) -> None:
        self._gossip = gossip
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.DatagramTransport | None = None
        self._flushing: asyncio.TimerHandle | None = None
        self.targets: frozenset[Address] = frozenset()
        gossip.own.wake = self._wake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        self.send(self._gossip.on_datagram(data, (address[0], address[1]), time.monotonic()))

    def send(self, outgoing: Iterable[Outgoing]) -> None:
        left = iter(outgoing)
        gossip = self._gossip
        for datagram, to in islice(left, _AT_ONCE):
            if self._transport is None or self._transport.is_closing():
                return
            for address in (to,) if to is not None else self.targets.union(gossip.addresses):
                gossip.counts["sent"] += 1
                self._transport.sendto(datagram, address)
        rest = list(left)
        if rest:
            self._loop.call_later(_PAUSE_S, self.send, rest)

    def close(self) -> None:
        """Close the socket after the data in its buffer."""
        if self._transport is not None:
            self._transport.close()

    def _wake(self, urgent: bool) -> None:
        """Flush soon, at the earliest after the loop has handled its ready tasks."""
        if self._flushing is not None:
            self._flushing.cancel()
        self._flushing = self._loop.call_later(self._gossip.due_in(time.monotonic(), urgent=urgent), self._flush)

    def _flush(self) -> None:
        self._flushing = None
        self.send(self._gossip.flush(time.monotonic()))


def bound(host: str, port: int) -> socket.socket:
    """Bind a socket for `talking`. Raises OSError if the port cannot be used."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.asynccontextmanager
async def talking(gossip: Gossip, sock: socket.socket, peers: Sequence[Address]) -> AsyncIterator[None]:
    """Exchange messages with the pickers at all addresses of these names, and send a goodbye at the end."""
    sock.setblocking(False)
    family = sock.family
    _, protocol = await asyncio.get_running_loop().create_datagram_endpoint(lambda: _Socket(gossip), sock=sock)
    tasks = [asyncio.create_task(_tick(gossip, protocol)), asyncio.create_task(_resolve(protocol, family, peers))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        protocol.send([*gossip.flush(time.monotonic()), *gossip.leave()])
        gossip.own.wake = lambda _urgent: None
        protocol.close()


async def _tick(gossip: Gossip, protocol: _Socket) -> None:
    while True:
        try:
            protocol.send(gossip.tick(time.monotonic()))
        except Exception:
            log.exception("the exchange with other pickers failed; it is tried again")
        await asyncio.sleep(_TICK_S)


async def _resolve(protocol: _Socket, family: int, peers: Sequence[Address]) -> None:
    """Keep the addresses up to date. A name that does not resolve (yet) adds none; its old addresses stay."""
    loop = asyncio.get_running_loop()
    known: dict[Address, frozenset[Address]] = {}
    failing: set[Address] = set()
    while True:
        for host, port in peers:
            try:
                found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_DGRAM)
            except (OSError, UnicodeError) as error:  # the latter for an impossible host name
                if (host, port) not in failing:
                    failing.add((host, port))
                    log.warning("peers %s:%d: %s; it is looked up again every %g s", host, port, error, RESOLVE_S)
                continue
            failing.discard((host, port))
            known[host, port] = frozenset((str(entry[4][0]), int(entry[4][1])) for entry in found)
        protocol.targets = frozenset(islice(sorted(frozenset().union(*known.values())), _MOST_ADDRESSES))
        await asyncio.sleep(RESOLVE_S)


def samples(gossip: Gossip) -> Iterator[Sample]:
    """Yield samples for the metrics page."""
    yield "gauge", "peers", "Other pickers whose requests in flight this picker knows.", {}, gossip.in_step
    text = "Requests in flight of other pickers, as far as this picker knows."
    yield "gauge", "peer_requests", text, {}, gossip.elsewhere
    text = "Requests of other pickers at endpoints that this picker does not know."
    yield "counter", "peer_requests_unplaced", text, {}, gossip.unplaced
    for what, text in (
        ("received", "Datagrams received on the port for other pickers."),
        ("refused", "Datagrams refused: not sealed with the pickers' key, no message, or one too many."),
        ("sent", "Datagrams sent to other pickers."),
    ):
        yield "counter", f"peer_datagrams_{what}", text, {}, gossip.counts[what]
    text = "Bytes sent to each of the other pickers."
    yield "counter", "peer_bytes", text, {}, gossip.told_bytes
    text = "Times that another picker's whole state was fetched, because it was new or a message was lost."
    yield "counter", "peer_snapshots", text, {}, gossip.counts["snapshots"]
