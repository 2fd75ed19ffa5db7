"""An HTTP client for short requests to engines: one kept connection for each server, without TLS. A thousand engines
cost a thousand requests; the number of open connections costs nothing.

`AnswerReader` reads the answers and documents their bounds. Redirects are answers like any other: no engine chooses
with whom the picker talks. Proxy settings of the environment are ignored: the client asks only loopback and cluster
addresses, and a proxy would be in the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Final, cast
from urllib.parse import quote

from treeline_epp.endpoints.http_answer import Answer, AnswerReader, BrokenOff, HttpError, HttpTimeout
from treeline_epp.endpoints.spec import split_address

IDLE_S: Final = 60.0
"""Longest that a connection is kept without a request: its server may have gone without closing it."""
_TARGET_SAFE: Final = "/?#[]@!$&'()*+,;=:%~"
Buffer = bytes | memoryview


def _ignored() -> None:
    pass


class HttpClient:
    """A pool of connections; see the module. `bearer` gives the API key to send, "" for none.

    Two requests to one server at the same time have a connection each, of which one is kept.
    """

    def __init__(self, bearer: Callable[[], str] = lambda: "") -> None:
        self._bearer = bearer
        self._kept: dict[str, _Connection] = {}
        """By address, in the order of last use."""
        self._closed = False

    async def get(self, address: str, path: str, *, within_s: float, most: int, accept: str = "*/*") -> Answer:
        """Return the whole answer to a GET, whose body may have `most` bytes; `address` as in `EndpointSpec`.

        If a kept connection closes before any byte of an answer, the request is sent again, once, on a new one: servers
        close idle connections. Raises `HttpError`.
        """
        head = self._head("GET", address, path, {"accept": accept})

        async def asked() -> Answer:
            kept = self._kept.pop(address, None)
            if kept is not None and kept.open:
                try:
                    return await self._ask(address, kept, [head], AnswerReader(most))
                except _Unanswered:
                    pass
            return await self._ask(address, await _connect(address), [head], AnswerReader(most))

        return await _within(within_s, asked())

    async def post(
        self,
        address: str,
        path: str,
        headers: Mapping[str, str],
        body: list[Buffer],
        *,
        within_s: float,
        most: int,
        sent: Callable[[], None] = _ignored,
    ) -> Answer:
        """Return the whole answer to a POST of JSON, as `get` does, but on a new connection and never sent again: the
        engine gets it once. The pieces of `body` leave the list as they are sent; then `sent` is called. Raises
        `HttpError`.
        """
        length = {"content-type": "application/json", "content-length": str(sum(map(len, body)))}
        body.insert(0, self._head("POST", address, path, {**headers, **length}))

        async def asked() -> Answer:
            return await self._ask(address, await _connect(address), body, AnswerReader(most), sent)

        return await _within(within_s, asked())

    async def close(self) -> None:
        """Close the kept connections; those in use are closed after their answers."""
        self._closed = True
        for connection in self._kept.values():
            connection.close()
        self._kept.clear()

    async def _ask(
        self,
        address: str,
        connection: _Connection,
        request: list[Buffer],
        reader: AnswerReader,
        sent: Callable[[], None] = _ignored,
    ) -> Answer:
        try:
            answer = await connection.ask(request, reader, sent)
        except BaseException:
            connection.close()
            raise
        if answer.keeps and connection.open and address not in self._kept and not self._closed:
            self._keep(address, connection)
        else:
            connection.close()
        return answer

    def _keep(self, address: str, connection: _Connection) -> None:
        """Keep a connection, and close those unused for `IDLE_S`: engines come and go under new addresses."""
        connection.used_at = asyncio.get_running_loop().time()
        self._kept[address] = connection
        while (oldest := next(iter(self._kept.items())))[1].used_at < connection.used_at - IDLE_S:
            oldest[1].close()
            del self._kept[oldest[0]]

    def _head(self, method: str, address: str, path: str, headers: Mapping[str, str]) -> bytes:
        fields = {"host": address, "accept-encoding": "identity", **headers}
        if key := self._bearer():
            fields["authorization"] = f"Bearer {key}"
        lines = [f"{method} {quote(path, safe=_TARGET_SAFE)} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
        return "\r\n".join([*lines, "\r\n"]).encode("latin-1", "replace")


async def _within(seconds: float, answer: Coroutine[None, None, Answer]) -> Answer:
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise HttpTimeout(f"no whole answer within {seconds:g} s") from None
    except _Unanswered as error:
        raise error.why from None
    except OSError as error:
        raise HttpError(str(error) or repr(error)) from error


class _Unanswered(Exception):
    """The connection ended before any byte of an answer; `why` is the error if the connection was new."""

    def __init__(self, why: HttpError) -> None:
        super().__init__(str(why))
        self.why = why


async def _connect(address: str) -> _Connection:
    host, port = split_address(address)
    _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, int(port or 80))
    return connection


class _Connection(asyncio.Protocol):
    """A connection that takes one request at a time."""

    def __init__(self) -> None:
        self.used_at = 0.0
        self._transport: asyncio.Transport | None = None
        self._reader: AnswerReader | None = None
        self._answered: asyncio.Future[Answer] | None = None
        self._unsent: list[Buffer] = []
        self._sent: Callable[[], None] = _ignored
        self._full = False

    @property
    def open(self) -> bool:
        """Whether it can take a request."""
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, request: list[Buffer], reader: AnswerReader, sent: Callable[[], None]) -> asyncio.Future[Answer]:
        """Send a request, whose pieces leave the list; the future is its answer. Calls `sent` when the system has all
        of it. Raises `HttpError` and `_Unanswered`.
        """
        assert self._transport is not None
        assert self._reader is None, "one request at a time"
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._reader, self._answered, self._unsent, self._sent = reader, answered, request, sent
        if self._transport.is_closing():  # no callback will come
            self._settle(_Unanswered(BrokenOff("it ended the connection, or spoke, before it was asked")))
        else:
            self._send()
        return answered

    def _send(self) -> None:
        assert self._transport is not None
        while self._unsent and not self._full:
            self._transport.write(self._unsent.pop(0))
        if self._reader is not None and not self._full:
            self._sent()

    def close(self) -> None:
        """Close the connection at once; what is still in flight is lost."""
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's side -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._send()

    def data_received(self, data: bytes) -> None:
        if self._reader is None:  # no request is open
            self.close()
            return
        try:
            answer = self._reader.feed(data)
        except HttpError as error:
            self._settle(error)
            self.close()
            return
        if answer is not None:
            self._settle(answer)

    def connection_lost(self, error: Exception | None) -> None:
        if (reader := self._reader) is None:
            return
        try:
            if error is not None:
                raise HttpError(str(error) or repr(error))
            self._settle(reader.end())
        except HttpError as broken:
            self._settle(broken if reader.heard else _Unanswered(broken))

    def _settle(self, what: Answer | Exception) -> None:
        answered, self._answered, self._reader, self._sent = self._answered, None, None, _ignored
        if self._unsent or self._full:  # it answered before it had read the request
            self.close()
        if answered is None or answered.done():  # the caller has gone
            return
        if isinstance(what, Answer):
            answered.set_result(what)
        else:
            answered.set_exception(what)
