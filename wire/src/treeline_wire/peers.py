"""Messages between the pickers of a pool: their requests, and how these went on.

A message is the content of a datagram before sealing: a msgpack array that begins with its kind. It has at most
`MOST_BYTES`, so that no network splits the datagram.

A *mark* is a 40-bit hash of a prompt's beginning, defined by the pickers. `ref` names an endpoint by a hash of its name
and address (`endpoint_ref`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from .errors import WireError

VERSION: Final = 1
MOST_BYTES: Final = 1152
"""The most bytes of a message: IPv6's minimum packet of 1,280 bytes less headers and seal."""
_HEAD_BYTES: Final = 32
MOST_MARKS: Final = 6
MARK_BITS: Final = 40
REF_BYTES: Final = 4
SENDER_BYTES: Final = 6
NONCE_BYTES: Final = 8
MOST_PARTS: Final = 4096
MOST_ID: Final = (1 << 48) - 1

Id = Annotated[int, Meta(ge=0, le=MOST_ID)]
Number = Annotated[int, Meta(ge=0, lt=1 << 56)]
Mark = Annotated[int, Meta(ge=0, lt=1 << MARK_BITS)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class PeerMessageError(WireError):
    """Bytes that are not a picker's message."""


class How(IntEnum):
    """The way in which another picker's request went on."""

    PREFILLED = 0
    """Its answer began with its first token."""
    ANSWERED = 1
    """Its answer began, but the end of its prefill is unknown."""
    FAILED = 2
    """The endpoint will not hold its prompt: an error, another endpoint, or the client disconnected."""
    OVERLOADED = 3
    """Refused because the endpoint is full."""


class Opened(Struct, frozen=True, gc=False, array_like=True, tag=1):
    """A request was sent to an endpoint. `tokens` are left to prefill, expected to take `prefill_ms`; `age_ms`: how
    long ago it was sent. `rank`: the one that holds most of the prompt. `marks`: beginnings of the prompt that will be
    cached then, the longest last. `session`: a mark of its session, or 0.
    """

    id: Id
    ref: Annotated[bytes, Meta(min_length=REF_BYTES, max_length=REF_BYTES)]
    tokens: Number
    prefill_ms: Number
    age_ms: Number = 0
    rank: Number = 0
    marks: Annotated[tuple[Mark, ...], Meta(max_length=MOST_MARKS)] = ()
    session: Mark = 0


class Closed(Struct, frozen=True, gc=False, array_like=True, tag=0):
    """The end of a request's reservation."""

    id: Id
    how: How


Record: TypeAlias = Opened | Closed


class Delta(Struct, frozen=True, array_like=True, tag=1):
    """The changes since the previous delta; `seq` counts from 1. Without records it is a heartbeat."""

    seq: Number
    records: tuple[Record, ...] = ()


class Ask(Struct, frozen=True, array_like=True, tag=2):
    """Asks for all open requests. `whom` is the picker asked; the answer repeats `nonce`."""

    whom: Annotated[bytes, Meta(min_length=SENDER_BYTES, max_length=SENDER_BYTES)]
    nonce: Nonce


class Snapshot(Struct, frozen=True, array_like=True, tag=3):
    """One of `parts` parts of all open requests after delta `seq`, for the asker with this nonce."""

    nonce: Nonce
    seq: Number
    part: Number
    parts: Annotated[int, Meta(ge=1, le=MOST_PARTS)]
    records: tuple[Opened, ...] = ()


class Leave(Struct, frozen=True, array_like=True, tag=4):
    """The sender stops; its requests no longer count."""


Message: TypeAlias = Delta | Ask | Snapshot | Leave

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def endpoint_ref(name: str, address: str) -> bytes:
    """Returns an endpoint's name on the wire, the same at all pickers without agreement on numbers."""
    return hashlib.blake2b(f"{name}\0{address}".encode(), digest_size=REF_BYTES).digest()


def encode(message: Message) -> bytes:
    """Encodes a message. Raises ValueError for one that is too large: see `packed`."""
    out = _encode(message)
    if len(out) > MOST_BYTES:
        raise ValueError(f"a message of {len(out)} bytes: at most {MOST_BYTES}")
    return out


def packed(records: Sequence[Record]) -> list[int]:
    """Splits records, in order, into the fewest messages; returns the number of records in each. O(records)."""
    counts, room = [], 0
    for record in records:
        size = len(_encode(record))
        if size > room:
            counts.append(0)
            room = MOST_BYTES - _HEAD_BYTES
        counts[-1] += 1
        room -= size
    return counts


def decode(data: bytes) -> Message:
    """Decodes a message. Raises `PeerMessageError`. O(bytes)."""
    if len(data) > MOST_BYTES:
        raise PeerMessageError(f"a message of {len(data)} bytes: at most {MOST_BYTES}")
    try:
        message: Message = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerMessageError(str(error)[:200]) from None
    if isinstance(message, Snapshot) and message.part >= message.parts:
        raise PeerMessageError(f"part {message.part} of {message.parts}")
    return message
