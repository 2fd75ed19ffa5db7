"""ZMQ messages by which a runtime reads cached pages of another one, as lists of frames: DEALER asks, ROUTER answers.

A request is `b"", b"treeline", version, message`, an answer has a fifth frame with the bytes of pages. Messages are
msgpack maps tagged "type". Whoever names a page knows its tokens and its namespace: a digest is their hash. So a reader
learns nothing from answers but whether they are cached. Functions take and return frames without an identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from .errors import WireError

VERSION: Final = b"1"
MOST_DIGESTS: Final = 4096
"""Pages that one request may name."""
MOST_REQUEST_BYTES: Final = MOST_DIGESTS * 40
WINDOW: Final = 2
"""Get requests of one peer that may be unanswered."""

_MAGIC: Final = b"treeline"

Buffer: TypeAlias = bytes | memoryview

Digests: TypeAlias = Annotated[
    list[Annotated[bytes, Meta(min_length=32, max_length=32)]], Meta(min_length=1, max_length=MOST_DIGESTS)
]


class PagesError(WireError):
    """A message in a form that no known version sends."""


class HaveRequest(Struct, frozen=True, tag="have"):
    """Asks how many of these pages are there, in order. `fingerprint`: of what computed them. `coming`: they are being
    computed, and the answer may wait until the first of them is there."""

    fingerprint: bytes
    digests: Digests
    coming: bool = False


class GetRequest(Struct, frozen=True, tag="get"):
    """Asks for pages, in order. `number` comes back with the answer."""

    fingerprint: bytes
    digests: Digests
    number: int


class Held(Struct, frozen=True, tag="held"):
    """So many of the pages are there: as many as come in order."""

    count: int


class Pages(Struct, frozen=True, tag="pages"):
    """The first of the pages asked for, by their checksums; their bytes follow each other in the fifth frame."""

    number: int
    checksums: list[int] = []


class Later(Struct, frozen=True, tag="later"):
    """A sign of life while an answer has to wait, which follows."""


Request: TypeAlias = HaveRequest | GetRequest
Answer: TypeAlias = Held | Pages | Later

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode_request(request: Request) -> list[bytes]:
    return [b"", _MAGIC, VERSION, _encoder.encode(request)]


def encode_answer(answer: Answer, data: Buffer = b"") -> list[Buffer]:
    return [b"", _MAGIC, VERSION, _encoder.encode(answer), data]


def parse_request(frames: Sequence[bytes]) -> Request | None:
    """None: in no known form; servers drop it."""
    if len(frames) != 4 or [*frames[:3]] != [b"", _MAGIC, VERSION]:
        return None
    try:
        return _requests.decode(frames[3])
    except msgspec.MsgspecError:
        return None


def parse_answer(frames: Sequence[Buffer]) -> tuple[Answer, memoryview]:
    """An answer, and the bytes of its pages, not copied. Raises `PagesError`."""
    if len(frames) != 5 or [bytes(frame) for frame in frames[:3]] != [b"", _MAGIC, VERSION]:
        raise PagesError(f"no answer about pages has this form ({len(frames)} frames)")
    try:
        return _answers.decode(frames[3]), memoryview(frames[4])
    except msgspec.MsgspecError as error:
        raise PagesError(f"a bad answer about pages: {str(error)[:200]}") from None
