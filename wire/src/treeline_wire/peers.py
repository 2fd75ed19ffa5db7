"""What the pickers of one pool tell each other: requests that they have sent somewhere, and how these went on.

A message is a datagram's content, before it is sealed: msgpack, an array that begins with the number of its kind. Sizes
are bounded on both sides: a message has at most `MOST_BYTES`, so that it fits a datagram that no network splits.

A *mark* is 40 bits of a hash of a prompt's beginning; who computes it from which bytes is the pickers' business. `ref`
names an endpoint by a hash of its name and address (`endpoint_ref`).
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
"""Bytes of a message: what is left of IPv6's least packet of 1,280 bytes beside its headers, UDP's and a seal."""
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


class Opened(Struct, frozen=True, gc=False, array_like=True, tag=1):
    """A request was sent to an endpoint. `tokens` it has to prefill there, which should take `prefill_ms`; `age_ms` is
    how long ago that was, where it is sent later. `rank` is the one that holds most of the prompt. `marks` are of
    beginnings of the prompt that will be held then, the longest last. `session` is a mark of the session that it
    belongs to, 0 where it belongs to none.
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
    """A request that was opened needs no more of what it was expected to."""

    id: Id
    how: How


Record: TypeAlias = Opened | Closed


class Delta(Struct, frozen=True, array_like=True, tag=1):
    """What has happened since the delta before; `seq` counts them from 1. One without records says: still here."""

    seq: Number
    records: tuple[Record, ...] = ()


class Ask(Struct, frozen=True, array_like=True, tag=2):
    """Send me all that is open. `whom` is the one that is asked, `nonce` will be in the answer."""

    whom: Annotated[bytes, Meta(min_length=SENDER_BYTES, max_length=SENDER_BYTES)]
    nonce: Nonce


class Snapshot(Struct, frozen=True, array_like=True, tag=3):
    """One of `parts` parts of all that was open after delta `seq`, for who asked with this nonce."""

    nonce: Nonce
    seq: Number
    part: Number
    parts: Annotated[int, Meta(ge=1, le=MOST_PARTS)]
    records: tuple[Opened, ...] = ()


class Leave(Struct, frozen=True, array_like=True, tag=4):
    """The sender ends; nothing of it counts any more."""


Message: TypeAlias = Delta | Ask | Snapshot | Leave

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def endpoint_ref(name: str, address: str) -> bytes:
    """How an endpoint is named on the wire: the same at all pickers, without their having agreed on numbers."""
    return hashlib.blake2b(f"{name}\0{address}".encode(), digest_size=REF_BYTES).digest()


def encode(message: Message) -> bytes:
    """Raises ValueError for what is too large: see `packed`."""
    out = _encode(message)
    if len(out) > MOST_BYTES:
        raise ValueError(f"a message of {len(out)} bytes: at most {MOST_BYTES}")
    return out


def packed(records: Sequence[Record]) -> list[int]:
    """How many of the records, in order, go into each of as few messages as they need. O(records)."""
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
    """Raises `PeerMessageError`. O(bytes)."""
    if len(data) > MOST_BYTES:
        raise PeerMessageError(f"a message of {len(data)} bytes: at most {MOST_BYTES}")
    try:
        message: Message = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerMessageError(str(error)[:200]) from None
    if isinstance(message, Snapshot) and message.part >= message.parts:
        raise PeerMessageError(f"part {message.part} of {message.parts}")
    return message
