"""An OpenAI server in a thread, with answers that the test chooses: for clients that measure servers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def token(text: str = " word", finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}])


def delta(finish: str | None = None, **members: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": members, "finish_reason": finish}])


def usage(prompt: int, output: int, cached: int | None = None) -> bytes:
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return event(choices=[], usage=counts)


def prompt_tokens(body: dict[str, Any]) -> int:
    """Count a prompt's tokens: its ids, or the words of its text."""
    if "messages" in body:
        return sum(len(message["content"].split()) for message in body["messages"])
    prompt = body["prompt"]
    return len(prompt.split() if isinstance(prompt, str) else prompt)


def whole(body: dict[str, Any]) -> Iterator[bytes]:
    """Yield a correct answer in chunks."""
    count = body["max_tokens"]
    for _ in range(count):
        yield delta(content=" word") if "messages" in body else token()
    yield usage(prompt_tokens(body), count, cached=1) + DONE


Answer = Callable[[dict[str, Any]], Iterator[bytes | None] | bytes]
"""Returns a body's chunks (None: hang up; b"": wait until the test is over), or a whole HTTP answer."""


class FakeOpenAI:
    """The server. `answer` may be changed while it runs; `bodies` are the requests that it got."""

    def __init__(self, answer: Answer = whole) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        """The heads of the same requests, in lower case."""
        self.key = ""
        """Required of every request, if not empty."""
        self.models: list[str] = ["m"]
        self.connections = 0
        self.port = 0
        self.over: asyncio.Event
        self._server: asyncio.Server
        self._loop: asyncio.AbstractEventLoop

    async def start(self) -> None:
        self._loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 24)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Stop listening; connections stay."""
        closed = threading.Event()
        self.call(lambda: (self.close(), closed.set()))
        assert closed.wait(60)

    def close(self) -> None:
        self._server.close()

    def call(self, what: Callable[[], object]) -> None:
        """Call in the server's thread."""
        self._loop.call_soon_threadsafe(what)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length:")[2].split("\r\n")[0] or 0)
                body = await reader.readexactly(length)
                if not await self._reply(head, body, writer):
                    return
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has gone, or the test is over
        finally:
            writer.close()

    async def _reply(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if self.key and f"authorization: bearer {self.key}" not in head:
            writer.write(_json(401, {"error": {"message": "no such key"}}))
        elif head.startswith("get /v1/models"):
            entries = [{"id": name, "owned_by": "fake"} for name in self.models]
            writer.write(_json(200, {"data": entries}))
        elif head.startswith("get /version"):
            writer.write(_json(200, {"version": "7.1"}))
        elif head.startswith("post "):
            self.bodies.append(json.loads(body))
            self.heads.append(head)
            return await self._stream(self.answer(self.bodies[-1]), writer)
        else:
            writer.write(_json(404, {}))
        return True

    async def _stream(self, chunks: Iterator[bytes | None] | bytes, writer: asyncio.StreamWriter) -> bool:
        if isinstance(chunks, bytes):
            writer.write(chunks)
            return True
        writer.write(HEAD)
        for chunk in chunks:
            if chunk is None:
                return False
            if not chunk:
                await self.over.wait()
                return False
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()
            await asyncio.sleep(0)  # let others have a turn, also when nothing is held up
        writer.write(b"0\r\n\r\n")
        return True


def whole_answer(value: Any, status: int = 200) -> bytes:
    """Return an answer that is no stream."""
    return _json(status, value)


def _json(status: int, value: Any) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


@contextmanager
def serving(answer: Answer = whole) -> Iterator[FakeOpenAI]:
    """Run a server in a thread of its own."""
    server, ready = FakeOpenAI(answer), threading.Event()

    async def run() -> None:
        await server.start()
        ready.set()
        await server.over.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        server.call(server.over.set)
        thread.join(60)
