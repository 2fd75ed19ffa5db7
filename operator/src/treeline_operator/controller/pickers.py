"""HTTP requests to pickers' admin ports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import aiohttp
from treeline_wire.signals import MOST_LINE_BYTES, PATH, SILENT_S, Signals, decode

Address = tuple[str, int]

_LISTED: Final = aiohttp.ClientTimeout(total=3.0)
_FOLLOWED: Final = aiohttp.ClientTimeout(total=None, sock_connect=3.0, sock_read=SILENT_S)
_MAX_ANSWER: Final = 32 << 20


@dataclass(slots=True)
class PickerClient:
    """Both raise OSError where there is nothing to be had."""

    session: aiohttp.ClientSession

    async def ask(self, address: Address) -> bytes:
        """A picker's list of endpoints."""
        body = bytearray()
        async with self._pieces(address, "/endpoints", _LISTED) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > _MAX_ANSWER:
                    raise ConnectionError(f"the picker at {address[0]} answered more than {_MAX_ANSWER} bytes")
        return bytes(body)

    async def lines(self, address: Address) -> AsyncIterator[Signals]:
        """A picker's stream of demand, until it ends. The length of a line and the silence between lines are bounded.
        Also raises `msgspec.MsgspecError` for unreadable lines."""
        rest = bytearray()
        async with self._pieces(address, PATH, _FOLLOWED) as pieces:
            async for piece in pieces:
                rest += piece
                *whole, rest = rest.split(b"\n")
                if whole:
                    yield decode(bytes(whole[-1]))  # each line is the whole state
                if len(rest) > MOST_LINE_BYTES:
                    raise ConnectionError(f"a line is longer than {MOST_LINE_BYTES} bytes")

    @asynccontextmanager
    async def _pieces(
        self, address: Address, path: str, limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        host, port = address
        where = f"[{host}]" if ":" in host else host
        try:
            async with self.session.get(f"http://{where}:{port}{path}", timeout=limits) as answer:
                if answer.status != 200:
                    raise ConnectionError(f"the picker at {host} answered {answer.status}")
                yield answer.content.iter_any()
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise ConnectionError(f"the picker at {host}: {str(exc) or type(exc).__name__}") from exc
