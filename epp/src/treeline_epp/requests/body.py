"""The types between the proxy's protocol and the router: a request, an immediate answer, and a large body, kept in the
pieces in which it came, with a limit on the bytes that may wait at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct
from treeline_wire import headers as names

Buffer = bytes | memoryview

CHUNK_BYTES = 62_000
"""Largest chunk in a streamed body reply. Envoy refuses 64 KiB and more; peers use this value too."""
_COUNTED_FROM = 64 * 1024
"""Bytes of a body that do not count against the shared limit: small requests are not refused because of large ones."""


class Edit(Struct, frozen=True, gc=False):
    """Bytes `start` … `stop` - 1 of a body become `text`."""

    start: int
    stop: int
    text: bytes


class Body:
    """The bytes of a body as a list of pieces, each at most CHUNK_BYTES long. `len()` is in bytes.

    >>> body = Body()
    >>> body.add(b"hello "), body.add(b"world")
    (None, None)
    >>> body.slice(4, 8), [bytes(piece) for piece in body.edited([Edit(0, 5, b"good")]).pieces()]
    (b'o wo', [b'good', b' world'])
    """

    def __init__(self, pieces: Sequence[Buffer] = ()) -> None:
        self._pieces: list[Buffer] = []
        self._starts: list[int] = []
        self._tail = bytearray()  # bytes that are too few to be a piece yet
        self._size = 0
        for piece in pieces:
            self._append(piece)

    def __len__(self) -> int:
        return self._size + len(self._tail)

    def add(self, data: Buffer) -> None:
        """Append bytes. Small pieces are joined, a long one is kept as it is. O(bytes), or O(pieces)."""
        if len(data) < CHUNK_BYTES:
            self._tail += data
            if len(self._tail) >= CHUNK_BYTES:
                self._flush()
            return
        self._flush()
        self._append(data)

    def pieces(self) -> list[Buffer]:
        """Return all pieces, in order."""
        self._flush()
        return self._pieces

    def joined(self) -> bytes:
        """Return the whole body as one. O(bytes)."""
        return b"".join(self.pieces())

    def slice(self, start: int, stop: int) -> bytes:
        """Return bytes `start` … `stop` - 1. O(log pieces + bytes)."""
        return b"".join(self.parts(start, stop))

    def edited(self, edits: Sequence[Edit]) -> Body:
        """Return the body with `edits`, which are in order and do not overlap. Pieces are shared. O(pieces + edits)."""
        out: list[Buffer] = []
        at = 0
        for edit in edits:
            out += self.parts(at, edit.start)
            out.append(edit.text)
            at = edit.stop
        return Body([*out, *self.parts(at, len(self))])

    def parts(self, start: int, stop: int) -> Iterator[Buffer]:
        """Yield bytes `start` … `stop` - 1 as they are stored. O(log pieces + parts)."""
        if start >= stop:
            return
        pieces = self.pieces()
        for at in range(bisect_right(self._starts, start) - 1, len(pieces)):
            begin = self._starts[at]
            if begin >= stop:
                return
            piece = pieces[at]
            low, high = max(0, start - begin), stop - begin
            yield piece if low == 0 and high >= len(piece) else piece[low:high]

    def _flush(self) -> None:
        if self._tail:
            data, self._tail = bytes(self._tail), bytearray()
            self._append(data)

    def _append(self, data: Buffer) -> None:
        if len(data) > CHUNK_BYTES:
            view = memoryview(data)
            for start in range(0, len(data), CHUNK_BYTES):
                self._append(view[start : start + CHUNK_BYTES])
        elif data:
            self._starts.append(self._size)
            self._pieces.append(data)
            self._size += len(data)


class BodyBudget:
    """Bytes of bodies that wait for their decision, over all streams; at most `limit`.

    >>> waiting = BodyBudget(100_000)
    >>> one, two = waiting.open(), waiting.open()
    >>> one.take(150_000), two.take(150_000), two.take(10)  # the first 64 KiB of each are free
    (True, False, False)
    >>> one.close(), two.take(1), waiting.bytes
    (None, True, 84475)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0

    def open(self) -> BodyShare:
        """Open the share of a new stream."""
        return BodyShare(self)


class BodyShare:
    """One stream's share of the budget. Close it in a `finally`."""

    __slots__ = ("_counted", "_size", "_waiting")

    def __init__(self, waiting: BodyBudget) -> None:
        self._waiting = waiting
        self._size = 0
        self._counted = 0

    def take(self, size: int) -> bool:
        """Count bytes that have come. False: there is no room for them, nor for later ones."""
        waiting = self._waiting
        self._size += size
        wanted = max(0, self._size - _COUNTED_FROM) - self._counted
        if wanted > 0:
            if waiting.bytes + wanted > waiting.limit:
                return False
            waiting.bytes += wanted
            self._counted += wanted
        return True

    def close(self) -> None:
        """Release the bytes, which were sent on or dropped. May be called again."""
        self._waiting.bytes -= self._counted
        self._counted = 0
        self._size = 0


class Immediate(msgspec.Struct, frozen=True, gc=False):
    """An answer that the proxy gives to the client itself, at once. Last reply of a stream."""

    status: int
    body: bytes
    headers: list[tuple[str, bytes]]
    details: str


def path_of(headers: Mapping[str, str]) -> str:
    """Return the path of a request, without its query."""
    return headers.get(":path", "").partition("?")[0]


class RouteRequest(msgspec.Struct, frozen=True, gc=False):
    """The input of a decision. `body` is `None` when the proxy does not show it, or not all of it; it is a `Body` if it
    has more than WHOLE_BYTES.
    """

    headers: Mapping[str, str]
    body: bytes | Body | None
    subset: frozenset[str] | None
    pool: str | None = None
    shows_response: bool = False
    """Whether the proxy will show the response's body."""
    observed: bool = False
    """Whether the proxy only shows the request, and routes it by itself."""

    @property
    def id(self) -> str:
        """The proxy's id of the request."""
        return self.headers.get(names.REQUEST_ID, "")

    @property
    def path(self) -> str:
        return path_of(self.headers)
