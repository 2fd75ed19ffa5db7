"""A reader of the answer to one GET (HTTP/1.1, RFC 9112), without I/O. It bounds bytes, pieces and headers, for any
server.

Nothing of an answer is used before it is whole. A few interim responses (1xx) are skipped; more are an error, since
each costs as much as an answer. A body has a length, comes in chunks, or lasts until the connection ends. The grammar
is llhttp's, strict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import httptools
from msgspec import Struct

HEAD_BYTES: Final = 64 << 10
"""Most bytes before a body, interim responses included."""
MOST_INTERIM: Final = 8
_FEW_PIECES, _PIECE_BYTES = 256, 256
"""An answer may have this many pieces or chunks, and more if they have this size on average: each costs as much as a
hundred kilobytes."""


class HttpError(Exception):
    """The server could not be reached, or its answer is invalid."""


class HttpTimeout(HttpError):
    """No whole answer arrived in time."""


class NotHttp(HttpError):
    """The server speaks another protocol, or its answer broke off."""


class BrokenOff(NotHttp):
    """The connection ended before the answer did."""


class BadAnswer(HttpError):
    """An answer whose body exceeds the bounds: it is too long, or compressed although we did not ask for that: a few
    kilobytes may unpack to gigabytes.
    """


class Answer(Struct, frozen=True):
    """A whole answer. Names of headers are in lower case; the values of a repeated header are joined by commas.
    `keeps`: the connection can take another request.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    keeps: bool


class AnswerReader:
    """Reads one answer whose body may have `most` bytes. After an error it cannot be used again."""

    def __init__(self, most: int) -> None:
        self.heard = 0  # bytes
        self._most = most
        self._pieces = self._interim = self._head_bytes = 0
        self._status = 0  # of the answer itself, once its headers are there
        self._fields: dict[str, list[str]] = {}
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._whole = self._keeps = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> Answer | None:
        """Take more bytes; return the answer once it is whole. Raises `HttpError`."""
        self.heard += len(data)
        self._count_piece()
        if self.heard > HEAD_BYTES + 2 * self._most:  # chunk lines and trailers are shorter than the body
            raise BadAnswer(f"the answer is longer than {self._most} bytes")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if isinstance(ours := error.__context__, HttpError):
                raise ours from None
            raise
        except httptools.HttpParserError as error:
            if not self._whole:
                raise NotHttp(f"no HTTP/1.1: {error} in {data[:60]!r}") from None
            self._keeps = False  # bytes after the answer are no answer to a request of ours
        if not self._status and self._head_bytes + len(data) > HEAD_BYTES:
            raise HttpError(f"the part before the body is longer than {HEAD_BYTES} bytes")
        self._head_bytes += 0 if self._status else len(data)
        return self._answer() if self._whole else None

    def end(self) -> Answer:
        """Take the end of the connection. Raises `BrokenOff` if that leaves no answer."""
        sized = "content-length" in self._headers or "transfer-encoding" in self._headers
        if not self._status or sized:
            raise BrokenOff("the answer broke off" if self.heard else "the connection was closed without an answer")
        return self._answer()

    def _answer(self) -> Answer:
        return Answer(self._status, self._headers, bytes(self._body), self._keeps)

    def _count_piece(self) -> None:
        self._pieces += 1
        if self._pieces > _FEW_PIECES + self.heard // _PIECE_BYTES:
            raise (BadAnswer if self._status else HttpError)("the answer comes in crumbs")

    # --- callbacks of the parser --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._whole:
            self._keeps = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._status:  # a trailer, or a header of bytes after the answer
            return
        self._fields.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip(" \t"))

    def on_headers_complete(self) -> None:
        if self._whole:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._interim += 1
            self._fields.clear()
            if status == 101 or self._interim > MOST_INTERIM:
                raise HttpError("a switch of protocols" if status == 101 else "interim responses without end")
            return
        self._headers = {name: ", ".join(values) for name, values in self._fields.items()}
        if self._headers.get("content-encoding", "identity").lower() != "identity":
            raise BadAnswer("the answer is encoded, which was not asked for")
        if (coding := self._headers.get("transfer-encoding", "chunked")).lower() != "chunked":
            raise NotHttp(f"transfer-encoding {coding[:60]!r}")
        if (length := self._headers.get("content-length", "")).isdecimal() and int(length[:16]) > self._most:
            raise BadAnswer(f"the answer is longer than {self._most} bytes")
        self._status = status

    def on_chunk_header(self) -> None:
        if not self._whole:
            self._count_piece()

    def on_body(self, piece: bytes) -> None:
        if self._whole:
            return
        if len(self._body) + len(piece) > self._most:
            raise BadAnswer(f"the answer is longer than {self._most} bytes")
        self._body += piece

    def on_message_complete(self) -> None:
        if self._status and not self._whole:
            self._whole, self._keeps = True, self._parser.should_keep_alive()
