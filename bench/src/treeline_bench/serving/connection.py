"""A keep-alive connection with one request at a time; its answer is timed.

Callbacks on a raw socket and httptools: a client library takes more time than it would measure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import httptools

from treeline_bench.serving.messages import UNFINISHED, Record
from treeline_bench.serving.stream import Answer, NotEvents

QUOTED = 300
"""Characters kept of an error's body."""


class Connection(asyncio.Protocol):
    """`ask` sends a request and waits for its end; the record has the result."""

    def __init__(self, on_token: Callable[[int], None], keep_header: str = "") -> None:
        """`on_token` gets the number of new output chunks."""
        self._keep_header = keep_header.lower().encode()
        self.closed = False
        self._on_token = on_token
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._record: Record | None = None
        self._answer: Answer | None = None
        self._refusal = b""
        self._ended: asyncio.Future[None] | None = None

    async def ask(
        self, request: bytes, record: Record, timeout_s: float, *, keep_text: bool = False, events: bool = True
    ) -> str:
        """Returns the answer's text, if kept. Fills `record`: an error is its kind, nothing is raised. An answer that
        is no stream of `events` is not parsed."""
        assert self._transport is not None
        assert self._record is None
        loop = asyncio.get_running_loop()
        self._record, self._answer, self._refusal = record, Answer(keep_text) if events else None, b""
        self._ended = loop.create_future()
        record.sent_ns = time.monotonic_ns()
        self._transport.write(request)
        deadline = loop.call_later(timeout_s, self.end, "timeout", f"no end after {timeout_s:g} s")
        try:
            await self._ended
        finally:
            deadline.cancel()
        return "" if self._answer is None else self._answer.text

    def end(self, error: str = UNFINISHED, detail: str = "") -> None:
        """Ends the running request, if any, and the connection."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()
        self._finish(error, detail)

    def _finish(self, error: str, detail: str) -> None:
        record = self._record
        if record is None or self._ended is None:
            return
        self._record = None
        record.done_ns = time.monotonic_ns()
        record.error, record.detail = error, detail[:QUOTED]
        if self._answer is not None and (usage := self._answer.usage) is not None:
            record.prompt_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
            record.cached_tokens = usage.cached_tokens
        if not self._ended.done():
            self._ended.set_result(None)

    # ---- asyncio.Protocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            cause = error.__context__
            if isinstance(cause, NotEvents):
                self.end("not a stream", str(cause))
            else:
                self.end("not HTTP", str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        finished = self._answer is not None and self._answer.finished
        if exc is None and finished:  # an answer may be as long as its connection
            self._conclude()
        else:
            self._finish("connection lost", str(exc or "closed by the server in the middle of an answer"))

    # ---- httptools ------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._record is not None and name.lower() == self._keep_header:
            self._record.header = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        record = self._record
        if record is None:
            return
        if self._parser.get_status_code() != 200:
            self._refusal += body[: QUOTED * 4 - len(self._refusal)]
            return
        if self._answer is None:
            return
        now = time.monotonic_ns()
        chunks = self._answer.feed(body)
        if chunks:
            record.tokens_ns.extend([now] * chunks)
            self._on_token(chunks)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.closed = True
            if self._transport is not None:
                self._transport.close()
        self._conclude()

    def _conclude(self) -> None:
        """The HTTP answer is complete; checks whether it is a whole answer."""
        status = self._parser.get_status_code()
        if status != 200:
            self._finish(f"HTTP {status}", self._refusal.decode(errors="replace"))
        elif self._answer is None:
            self._finish("", "")
        elif self._answer.error:
            self._finish("error in the stream", self._answer.error)
        elif not self._answer.finished:
            self._finish("cut short", "the stream ended without an end")
        elif self._answer.usage is None:
            self._finish("no usage", "the stream did not say how many tokens there were")
        else:
            self._finish("", "")
