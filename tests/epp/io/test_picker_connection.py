"""The one connection between Envoy and the picker, shared by all clients: no client can end it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.epp_io import data_plane, engines, until

pytestmark = [pytest.mark.integration, pytest.mark.deep]


class Relay:
    """A relay between Envoy and the picker; while `reading` is not set, Envoy's data stay unread."""

    def __init__(self) -> None:
        self.reading = asyncio.Event()
        self.reading.set()
        self.connections = self.picker_port = 0
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._socket.bind(("127.0.0.1", 0))

    def patch(self, bootstrap: dict[str, Any]) -> None:
        (cluster,) = [c for c in bootstrap["static_resources"]["clusters"] if c["name"] == "ext_proc"]
        (host,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        address = host["endpoint"]["address"]["socket_address"]
        self.picker_port, address["port_value"] = address["port_value"], self._socket.getsockname()[1]

    async def _connected(self, envoy: asyncio.StreamReader, to_envoy: asyncio.StreamWriter) -> None:
        self.connections += 1
        picker, to_picker = await asyncio.open_connection("127.0.0.1", self.picker_port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, may: asyncio.Event | None) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(1 << 16):
                    if may is not None:
                        await may.wait()
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pump(envoy, to_picker, self.reading), pump(picker, to_envoy, None))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._connected, sock=self._socket)
        try:
            yield
        finally:
            self.reading.set()
            server.close()


async def test_many_cancelled_requests_do_not_end_the_busy_pickers_connection(
    tmp_path: Path,
) -> None:
    relay = Relay()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: edge\r\nx-request-id: {'x' * 30_000}\r\ncontent-length: 9\r\n\r\n"
    async with (
        relay.running(),
        engines(1) as fakes,
        data_plane(tmp_path, fakes, patch=relay.patch, message_timeout_s=600) as plane,
    ):
        assert (await plane.complete()).status_code == 200

        async def stat(name: str) -> int:
            (value,) = (await plane.envoy.stats(f"cluster.ext_proc.{name}$")).values()
            return value

        relay.reading.clear()
        waits = asyncio.create_task(plane.complete())
        for _ in range(10):  # the kernel has room for those of the first rounds
            opened = [
                (await asyncio.open_connection("127.0.0.1", plane.envoy.config.listen_port))[1] for _ in range(200)
            ]
            for writer in opened:
                writer.write(head.encode())

            async def all_are_asked(count: int = 1 + len(opened)) -> bool:
                return await stat("upstream_rq_active") == count

            async def none_is() -> bool:
                return await stat("upstream_rq_active") <= 1

            await until(all_are_asked, "the picker is asked for each", 60)
            for writer in opened:
                writer.transport.abort()
            await until(none_is, "Envoy has heard that nobody waits for them", 60)
        relay.reading.set()
        assert (await waits).status_code == 200
        assert relay.connections == 1
