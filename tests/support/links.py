"""Links that a test can break: ports of 127.0.0.2 that lead to the same ports of 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable

NEAR, FAR = "127.0.0.1", "127.0.0.2"


class Links:
    """Owns a thread with all connections, until `close`."""

    def __init__(self, ports: Iterable[int]) -> None:
        self._cut = set[int]()
        self._thaw = dict[int, asyncio.Event]()
        self._open: dict[int, set[asyncio.StreamWriter]] = defaultdict(set)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        for port in ports:
            self._do(asyncio.start_server(lambda *ends, at=port: self._serve(at, *ends), FAR, port))

    def _do(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)  # type: ignore[arg-type]

    async def _serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        self._open[port] |= ends
        with contextlib.suppress(OSError):
            if port not in self._cut:
                far_reader, far_writer = await asyncio.open_connection(NEAR, port)
                ends.add(far_writer)
                self._open[port].add(far_writer)
                await asyncio.gather(self._pass(port, reader, far_writer), self._pass(port, far_reader, writer))
        self._open[port] -= ends
        for end in ends:
            end.transport.abort()

    async def _pass(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if port in self._thaw:
                    await self._thaw[port].wait()
                writer.write(data)
                await writer.drain()
        if not writer.is_closing():
            writer.write_eof()

    def cut(self, *ports: int) -> None:
        """Reset the connections of these ports, and all that come, until `mend`."""

        async def work() -> None:
            self._cut.update(ports)
            for port in ports:
                for end in self._open[port]:
                    end.transport.abort()

        self._do(work())

    def freeze(self, *ports: int) -> None:
        """Let nothing pass on these ports until `mend`; connections stay open."""

        async def work() -> None:
            self._thaw |= {port: asyncio.Event() for port in ports}

        self._do(work())

    def mend(self) -> None:
        async def work() -> None:
            for thaw in self._thaw.values():
                thaw.set()
            self._thaw.clear()
            self._cut.clear()

        self._do(work())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
