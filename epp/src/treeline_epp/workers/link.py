"""What a worker and its parent say to each other, over a socket pair: one JSON object a line.

The parent begins with `Start`. A worker sends a `Status` whenever something has changed, and every second to show that
it is well; the parent answers what Envoy knows by then. Where the connection ends the other process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeAlias

import msgspec

from treeline_epp.extproc.http2_server import Certificate, Http2Server
from treeline_epp.peers.gossip import Address
from treeline_epp.workers.entrance import Handed
from treeline_epp.xds.eds import Eds

BEAT_S = 1.0
SOON_S = 0.02
"""Connections that come in a flood are told of together: a line costs the more, the more endpoints there are."""
MOST_LINE = 16 << 20
"""A line names each endpoint once."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """`key` seals what workers (and other pickers) tell each other, from the socket `peer_fd`, to `peers`. Connections
    come through the socket `entrance_fd` (`entrance.py`)."""

    index: int
    key: bytes
    peer_fd: int
    entrance_fd: int
    peers: tuple[Address, ...]


class Selectable(msgspec.Struct, frozen=True, tag="selectable"):
    """The endpoints that may be named to Envoy: see `xds.eds`."""

    addresses: frozenset[str]


class Shed(msgspec.Struct, frozen=True, tag="shed"):
    """So many connections are to be given up: others have fewer."""

    connections: int


class Status(msgspec.Struct, frozen=True, tag="status"):
    """`ready` to take requests; `metrics_port` and `admin_port` are its pages, on loopback, 0 before they are there.
    `endpoints` are to be announced to Envoy (address → draining) once it is `synced`. Of the connections that it was
    handed it has `taken` so many; `connections` are open now, without those that it gives up."""

    ready: bool = False
    taken: int = 0
    connections: int = 0
    metrics_port: int = 0
    admin_port: int = 0
    synced: bool = False
    endpoints: dict[str, bool] = {}


Line: TypeAlias = Start | Selectable | Shed | Status

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def encode(line: Line) -> bytes:
    """With its end."""
    return msgspec.json.encode(line) + b"\n"


async def lines(reader: asyncio.StreamReader) -> AsyncIterator[Line]:
    """Until the other end is closed, or says what makes no sense."""
    with contextlib.suppress(ConnectionError, ValueError):  # msgspec's errors and a line without end are ValueErrors
        while line := await reader.readline():
            yield _decoder.decode(line)


class ParentsEds(Eds):
    """The `Eds` of a worker: its parent is the one that Envoys are subscribed to. `changed` is called when there is
    something to tell it."""

    def __init__(self) -> None:
        super().__init__()
        self.endpoints: dict[str, bool] = {}
        self.synced = False
        self.changed: Callable[[], None] = lambda: None
        self._selectable: frozenset[str] = frozenset()

    def announce(self, endpoints: Mapping[str, bool]) -> None:
        """See `xds.eds.Eds`."""
        if endpoints != self.endpoints:
            self.endpoints = dict(endpoints)
            self.changed()

    def set_synced(self) -> None:
        """See `xds.eds.Eds`."""
        self.synced = True
        self.changed()

    def selectable(self, address: str) -> bool:
        """As far as the parent has told."""
        return address in self._selectable and not self.endpoints.get(address, True)

    def on_selectable(self, addresses: frozenset[str]) -> None:
        """The parent has told."""
        self._selectable = addresses
        self.on_ack()


class Worker:
    """A worker's end of the link, and what differs for it from a picker of one process."""

    def __init__(self, start: Start, writer: asyncio.StreamWriter) -> None:
        self.start = start
        self.eds = ParentsEds()
        self.eds.changed = self._tell
        self._writer = writer
        self._status = Status()
        self._handed: Handed | None = None
        self._telling: asyncio.TimerHandle | None = None

    def serves_pages(self, metrics_port: int, admin_port: int) -> None:
        """They are there."""
        self._status = msgspec.structs.replace(self._status, metrics_port=metrics_port, admin_port=admin_port)
        self._tell()

    def serve(self, server: Http2Server, tls: Certificate | None) -> None:
        """Take the connections that are handed over. Raises what `tls` raises."""
        self._handed = Handed(socket.socket(fileno=self.start.entrance_fd), server, tls, self._tell_soon)

    def set_ready(self, ready: bool) -> None:
        """It takes requests, or takes no more."""
        self._status = msgspec.structs.replace(self._status, ready=ready)
        self._tell()

    async def follow(self, reader: asyncio.StreamReader) -> None:
        """Until the parent is no more."""
        beating = asyncio.create_task(self._beat())
        try:
            async for line in lines(reader):
                if isinstance(line, Selectable):
                    self.eds.on_selectable(line.addresses)
                elif isinstance(line, Shed) and self._handed is not None:
                    self._handed.server.shed(line.connections)
                    self._tell()
        finally:
            beating.cancel()
            self._told()
            if self._handed is not None:
                self._handed.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._tell()

    def _tell_soon(self) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(SOON_S, self._tell)

    def _told(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None

    def _tell(self) -> None:
        self._told()
        status = msgspec.structs.replace(self._status, synced=self.eds.synced, endpoints=self.eds.endpoints)
        if (handed := self._handed) is not None:
            status = msgspec.structs.replace(status, taken=handed.taken, connections=handed.server.connections)
        if not self._writer.is_closing():
            self._writer.write(encode(status))
