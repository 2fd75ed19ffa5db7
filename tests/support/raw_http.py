"""Requests that no client library would send: bytes over HTTP/1.1, and any ``:path`` over HTTP/2."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import h11


@dataclass
class Answer:
    """An answer; ``status`` is 0 if the connection was closed, or the stream ``reset``, without one."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    reset: bool = False


async def http1(port: int, request: bytes, *, method: bytes = b"POST", timeout_s: float = 60.0) -> Answer:
    """Send exactly these bytes and read one final answer. ``method`` decides whether the answer has a body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        parser.send(h11.EndOfMessage())
        answer = Answer()
        async with asyncio.timeout(timeout_s):
            while True:
                event = parser.next_event()
                if event is h11.NEED_DATA:
                    try:
                        parser.receive_data(await reader.read(1 << 16))
                    except ConnectionResetError:
                        parser.receive_data(b"")
                elif isinstance(event, h11.Response):
                    answer.status = event.status_code
                    answer.headers = {k.decode(): v.decode() for k, v in event.headers}
                elif isinstance(event, h11.Data):
                    answer.body += event.data
                elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                    return answer
    except h11.RemoteProtocolError:
        return Answer()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def http2(
    port: int,
    headers: Sequence[tuple[str, str]],
    body: bytes | None = None,
    *,
    end: bool = True,
    timeout_s: float = 60.0,
) -> Answer:
    """Send one request over HTTP/2 with prior knowledge, with these header fields unchanged; without ``body`` the
    headers end the stream, and without ``end`` the body does not. ``reset`` marks a stream that was reset."""
    settings = h2.config.H2Configuration(
        validate_outbound_headers=False, normalize_outbound_headers=False, header_encoding="utf-8"
    )
    connection = h2.connection.H2Connection(settings)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer, left = Answer(), memoryview(body or b"")
    try:
        connection.initiate_connection()
        connection.send_headers(1, list(headers), end_stream=body is None)
        async with asyncio.timeout(timeout_s):
            while True:
                while left and (room := _room(connection)):
                    connection.send_data(1, bytes(left[:room]), end_stream=end and len(left) <= room)
                    left = left[room:]
                writer.write(connection.data_to_send())
                await writer.drain()
                data = await reader.read(1 << 16)
                if not data:
                    return answer
                if any(_take(answer, event) for event in connection.receive_data(data)):
                    return answer
    except ConnectionError:
        return answer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _room(connection: h2.connection.H2Connection) -> int:
    return min(connection.local_flow_control_window(1), connection.max_outbound_frame_size)


def _take(answer: Answer, event: h2.events.Event) -> bool:
    """Record an event of the answer; return True for the last one."""
    if isinstance(event, h2.events.ResponseReceived):
        found = {_text(name): _text(value) for name, value in event.headers}
        answer.status = int(found.pop(":status"))
        answer.headers = found
    elif isinstance(event, h2.events.DataReceived):
        answer.body += event.data
    answer.reset = answer.reset or isinstance(event, h2.events.StreamReset)
    return isinstance(event, h2.events.StreamEnded | h2.events.StreamReset | h2.events.ConnectionTerminated)


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode()
