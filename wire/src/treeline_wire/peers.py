"""What the pickers of one pool tell each other: requests that they have sent somewhere, and how these went on.

A message is a datagram's content, before it is sealed. Its first byte is the kind; numbers are LEB128 varints, those of
records are differences from the record before (zigzag), since they are given out in order. Sizes are bounded on both
sides: a message has at most `MOST_BYTES`, so that it fits a datagram that no network splits.

A *mark* is 40 bits of a hash of a prompt's beginning; who computes it from which bytes is the pickers' business. `ref`
names an endpoint by a hash of its name and address (`endpoint_ref`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, TypeAlias

from msgspec import Struct

from .errors import WireError

VERSION: Final = 1
MOST_BYTES: Final = 1152
"""Bytes of a message: what is left of IPv6's least packet of 1,280 bytes beside its headers, UDP's and a seal."""
MOST_MARKS: Final = 6
MARK_BYTES: Final = 5
REF_BYTES: Final = 4
SENDER_BYTES: Final = 6
NONCE_BYTES: Final = 8
MOST_PARTS: Final = 4096
MOST_ID: Final = (1 << 48) - 1
_MOST_VARINT: Final = 8
_DELTA, _ASK, _SNAPSHOT, _LEAVE = 1, 2, 3, 4
_OPENED, _CLOSED = 0, 1
_HAS_LENGTH, _HAS_AGE, _HAS_RANK, _HAS_SESSION = 2, 4, 8, 128


class PeerMessageError(WireError):
    """Bytes that are no message of another picker."""


class How(IntEnum):
    """How a request of another picker went on."""

    PREFILLED = 0
    """Its answer has begun, with its first token."""
    ANSWERED = 1
    """Its answer has begun, which says nothing of its prefill."""
    FAILED = 2
    """The endpoint will not hold its prompt: an error, another endpoint, or the client went away."""
    OVERLOADED = 3
    """Refused for want of room."""


class Opened(Struct, frozen=True, gc=False):
    """A request was sent to an endpoint. `tokens` it has to prefill there, which should take `prefill_ms`; `age_ms` is
    how long ago that was, where it is sent later. `rank` is the one that holds most of the prompt. `marks` are of
    beginnings of the prompt that will be held then, the longest last; the whole prompt has `length` bytes and the mark
    `tail`, 0 where it is not known. `session` is a mark of the session that it belongs to, 0 where it belongs to none.
    """

    id: int
    ref: bytes
    tokens: int
    prefill_ms: int
    age_ms: int = 0
    rank: int = 0
    marks: tuple[int, ...] = ()
    length: int = 0
    tail: int = 0
    session: int = 0


class Closed(Struct, frozen=True, gc=False):
    """A request that was opened needs no more of what it was expected to."""

    id: int
    how: How


Record: TypeAlias = Opened | Closed


class Delta(Struct, frozen=True):
    """What has happened since the delta before; `seq` counts them from 1. One without records says: still here."""

    seq: int
    records: tuple[Record, ...] = ()


class Ask(Struct, frozen=True):
    """Send me all that is open. `whom` is the one that is asked, `nonce` will be in the answer."""

    whom: bytes
    nonce: bytes


class Snapshot(Struct, frozen=True):
    """One of `parts` parts of all that was open after delta `seq`, for who asked with this nonce."""

    nonce: bytes
    seq: int
    part: int
    parts: int
    records: tuple[Opened, ...] = ()


class Leave(Struct, frozen=True):
    """The sender ends; nothing of it counts any more."""


Message: TypeAlias = Delta | Ask | Snapshot | Leave


def endpoint_ref(name: str, address: str) -> bytes:
    """How an endpoint is named on the wire: the same at all pickers, without their having agreed on numbers."""
    return hashlib.blake2b(f"{name}\0{address}".encode(), digest_size=REF_BYTES).digest()


def encode(message: Message) -> bytes:
    """Raises ValueError for what is out of bounds, its size included: see `packed`."""
    match message:
        case Delta(seq, records):
            out = bytes((_DELTA,)) + varint(seq) + b"".join(_encoded(records))
        case Ask(whom, nonce):
            out = bytes((_ASK,)) + whom + nonce
        case Snapshot(nonce, seq, part, parts, opened):
            head = bytes((_SNAPSHOT,)) + nonce + varint(seq) + varint(part) + varint(parts)
            out = head + b"".join(_encoded(opened))
        case Leave():
            out = bytes((_LEAVE,))
    if len(out) > MOST_BYTES:
        raise ValueError(f"a message of {len(out)} bytes: at most {MOST_BYTES}")
    return out


def packed(records: Sequence[Record]) -> list[int]:
    """How many of the records, in order, go into each of as few messages as they need. O(records)."""
    room = MOST_BYTES - 32
    counts, used, before = [0], 0, 0
    for record in records:
        size = len(_record(record, before))
        if used + size > room:
            counts.append(0)
            used, size = 0, len(_record(record, 0))
        counts[-1] += 1
        used += size
        before = record.id
    return counts if records else []


def decode(data: bytes) -> Message:
    """Raises `PeerMessageError`. O(bytes)."""
    if len(data) > MOST_BYTES:
        raise PeerMessageError(f"a message of {len(data)} bytes: at most {MOST_BYTES}")
    reader = _Reader(data)
    kind = reader.byte()
    message: Message
    if kind == _DELTA:
        message = Delta(reader.varint(), tuple(reader.records()))
    elif kind == _ASK:
        message = Ask(reader.take(SENDER_BYTES), reader.take(NONCE_BYTES))
    elif kind == _SNAPSHOT:
        message = reader.snapshot()
    elif kind == _LEAVE:
        message = Leave()
    else:
        raise PeerMessageError(f"unknown kind {kind}")
    if reader.left:
        raise PeerMessageError(f"{reader.left} bytes after the end")
    return message


def _encoded(records: Sequence[Record]) -> list[bytes]:
    out, before = [], 0
    for record in records:
        out.append(_record(record, before))
        before = record.id
    return out


def _record(record: Record, before: int) -> bytes:
    """The first byte has the record's type in its lowest bit. Above it: how a request was closed; or which optional
    numbers of an opened one follow, and how many marks."""
    step = record.id - before
    number = varint(2 * step if step >= 0 else -2 * step - 1)
    if isinstance(record, Closed):
        return bytes((_CLOSED | record.how << 1,)) + number
    if len(record.marks) > MOST_MARKS or record.length < 0:
        raise ValueError("too many marks, or a length below 0")
    first = _OPENED | len(record.marks) << 4
    given = (_HAS_LENGTH, record.length), (_HAS_AGE, record.age_ms), (_HAS_RANK, record.rank)
    for flag, value in (*given, (_HAS_SESSION, record.session)):
        first |= flag if value else 0
    parts = [
        bytes((first,)),
        number,
        record.ref,
        varint(record.tokens),
        varint(record.prefill_ms),
        varint(record.age_ms) if record.age_ms else b"",
        varint(record.rank) if record.rank else b"",
        *(mark.to_bytes(MARK_BYTES, "big") for mark in record.marks),
    ]
    if record.length:
        parts += [varint(record.length), record.tail.to_bytes(MARK_BYTES, "big")]
    if record.session:
        parts.append(record.session.to_bytes(MARK_BYTES, "big"))
    return b"".join(parts)


def varint(value: int) -> bytes:
    """A number below 2⁵⁶ in LEB128. Raises ValueError."""
    if value < 0 or value >> 7 * _MOST_VARINT:
        raise ValueError(f"{value} is out of bounds")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Reader:
    """Reads one message from its beginning to its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        at = self._at
        self._at = end = at + count
        if end > len(self._data):
            raise PeerMessageError("the message ends too soon")
        return self._data[at:end]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        data, at, value = self._data, self._at, 0
        for shift in range(0, 7 * _MOST_VARINT, 7):
            if at >= len(data):
                raise PeerMessageError("the message ends too soon")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self._at = at
                return value
        raise PeerMessageError("a number is too long")

    def records(self) -> list[Record]:
        out: list[Record] = []
        before = 0
        while self.left:
            first, number = self.byte(), self.varint()
            before += -(number + 1 >> 1) if number & 1 else number >> 1
            if not 0 <= before <= MOST_ID:
                raise PeerMessageError(f"a record has the number {before}")
            out.append(self._closed(before, first) if first & 1 else self._opened(before, first))
        return out

    def snapshot(self) -> Snapshot:
        nonce, seq, part, parts = self.take(NONCE_BYTES), self.varint(), self.varint(), self.varint()
        if not part < parts <= MOST_PARTS:
            raise PeerMessageError(f"part {part} of {parts}")
        opened: list[Opened] = []
        for record in self.records():
            if not isinstance(record, Opened):
                raise PeerMessageError("a snapshot has what is open, and nothing else")
            opened.append(record)
        return Snapshot(nonce, seq, part, parts, tuple(opened))

    def _closed(self, id: int, first: int) -> Closed:
        if first >> 1 not in How.__members__.values():
            raise PeerMessageError(f"unknown way to end: {first >> 1}")
        return Closed(id, How(first >> 1))

    def _opened(self, id: int, first: int) -> Opened:
        count = first >> 4 & 7
        if count > MOST_MARKS:
            raise PeerMessageError(f"{count} marks: at most {MOST_MARKS}")
        ref = self.take(REF_BYTES)
        tokens, prefill_ms = self.varint(), self.varint()
        age_ms = self.varint() if first & _HAS_AGE else 0
        rank = self.varint() if first & _HAS_RANK else 0
        packed = self.take(count * MARK_BYTES)
        marks = tuple(int.from_bytes(packed[at : at + MARK_BYTES], "big") for at in range(0, len(packed), MARK_BYTES))
        length = tail = 0
        if first & _HAS_LENGTH:
            length, tail = self.varint(), int.from_bytes(self.take(MARK_BYTES), "big")
        session = int.from_bytes(self.take(MARK_BYTES), "big") if first & _HAS_SESSION else 0
        return Opened(id, ref, tokens, prefill_ms, age_ms, rank, marks, length, tail, session)
