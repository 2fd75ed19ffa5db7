"""A fast parser of `ProcessingRequest`: it avoids protobuf's objects for messages in the form that Envoy writes.

It knows the fields that are used here, each at most once and in its shortest form. At anything else (an unknown or
repeated field, text that must be checked, bytes that end too soon) it gives up, and protobuf reads the message instead
(`convert.read`). So a message has one meaning and one list of errors; tests check that both parsers agree.

Tags below are `field number << 3 | wire type`, in one byte: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

from google.protobuf import json_format, struct_pb2
from google.protobuf.message import DecodeError
from treeline_wire import envoy_pb2 as pb
from treeline_wire import headers as names

from treeline_epp.extproc.state import BodyMode, Kind, Message
from treeline_epp.requests.body import Buffer
from treeline_epp.requests.isolation import ROUTING_KEY
from treeline_epp.requests.subset import NOTHING, parse_subset

USED_HEADERS: Final = frozenset(
    {
        ":authority",
        ":method",
        ":path",
        ":status",
        "content-encoding",
        "content-length",
        "content-type",
        names.CACHED_TOKENS,
        names.CLIENT,
        names.DESTINATION,
        names.FAIRNESS_ID,
        names.FAIRNESS_ID_LLMD,
        names.FORK,
        names.FORWARDED_FOR,
        names.ISOLATION,
        names.MODEL_REWRITE,
        names.MODEL_REWRITE_LLMD,
        names.OBJECTIVE,
        names.OBJECTIVE_LLMD,
        names.OVERLOADED,
        names.PROMPT_TOKENS,
        names.RANK,
        names.REQUEST_ID,
        names.SELECTION,
        names.SESSION_ID,
        names.TRACEPARENT,
        names.TRACESTATE,
        ROUTING_KEY,
        *names.ENGINES,
    }
)
"""The headers that every picker reads; other headers are not converted."""

_KINDS = {
    field.number << 3 | 2: Kind(field.name)
    for field in pb.ProcessingRequest.DESCRIPTOR.oneofs_by_name["request"].fields
}
_HEADERS = frozenset({Kind.REQUEST_HEADERS, Kind.RESPONSE_HEADERS})
_BODIES = frozenset({Kind.REQUEST_BODY, Kind.RESPONSE_BODY})
_FIRST, _THIRD = 1 << 3 | 2, 3 << 3 | 2
"""The tags of fields 1 and 3 with a length."""
_METADATA, _OBSERVABILITY, _PROTOCOL = 8 << 3 | 2, 10 << 3, 11 << 3 | 2
_BODY_END, _HEADERS_END = 2 << 3, 3 << 3

_VIEWED_FROM = 16 * 1024
"""Bytes of a body from which a view of the message is cheaper than a copy."""
_REMEMBERED_BYTES = 1024
"""Metadata and settings up to this size are remembered by their bytes: a proxy sends few different ones."""

_UNUSED = ("", "")
_LONGEST_ENTRY: Final = 0x7F + 2
_REMEMBERED_ENTRIES: Final = 4096
_NOT_REMEMBERED: Final = {
    b"authorization",
    b"cookie",
    b"x-api-key",
    b"x-request-id",
    b"x-session-id",
    b"x-smg-routing-key",
    b"traceparent",
    b"tracestate",
}
"""Headers that differ from request to request, and secrets, which must not stay in memory."""

Metadata = tuple[frozenset[str] | None, str | None, str | None]
NO_METADATA: Metadata = (None, None, None)
Modes = tuple[BodyMode, BodyMode]


class _Unexpected(Exception):
    """A message in another form than Envoy writes: protobuf must read it."""


class WireReader:
    """Parses messages from their bytes. It reads the headers of `USED_HEADERS` and `wanted` (lower-case names)."""

    def __init__(self, wanted: Iterable[str] = ()) -> None:
        more = {name.encode(): name for name in wanted if name not in USED_HEADERS}
        self._used = {name.encode(): name for name in USED_HEADERS} | more
        self._not_remembered = _NOT_REMEMBERED | more.keys()
        self._known: dict[bytes, tuple[str, str]] = {}
        """Entries of header lists by their bytes, with tag and length: a proxy sends nearly the same list each time."""

    def uses(self, name: str) -> bool:
        """Return whether this header is converted."""
        return name.encode("utf-8", "surrogatepass") in self._used

    def read(self, data: bytes) -> Message | None:
        """Return the message, or `None` where protobuf must read it. A large body is a view of `data`. O(bytes of
        headers).
        """
        try:
            return self._read(data)
        except (_Unexpected, IndexError, DecodeError):
            return None

    def _read(self, data: bytes) -> Message:
        at, size = 0, len(data)
        kind: Kind | None = None
        begin = end = 0
        metadata: Metadata | None = None
        modes: Modes | None = None
        observed: bool | None = None
        while at < size:
            tag = data[at]
            if tag == _OBSERVABILITY:
                if observed is not None:
                    raise _Unexpected
                observed, at = _flag(data, at + 1), at + 2
                continue
            length = data[at + 1]
            at += 2
            if length > 0x7F:
                length, at = _long(data, at - 1)
            stop = at + length
            if stop > size:
                raise _Unexpected
            if tag in _KINDS and kind is None:
                kind, begin, end = _KINDS[tag], at, stop
            elif tag == _METADATA and metadata is None:
                metadata = (_known_metadata if length <= _REMEMBERED_BYTES else metadata_of)(data[at:stop])
            elif tag == _PROTOCOL and modes is None:
                modes = (_known_modes if length <= _REMEMBERED_BYTES else modes_of)(data[at:stop])
            else:
                raise _Unexpected
            at = stop
        if kind is None:
            raise _Unexpected
        subset, pool, served = metadata or NO_METADATA
        if kind in _BODIES:
            body, ends = _body(data, begin, end)
            return Message(kind, ends, data=body, subset=subset, pool=pool, modes=modes, observed=observed or False)
        headers, ends = self._header_list(data, begin, end)
        if kind in _HEADERS:
            return Message(kind, ends, headers, b"", subset, pool, served, modes, observed or False)
        if ends:
            raise _Unexpected  # trailers have no such field
        return Message(kind, subset=subset, pool=pool, modes=modes, observed=observed or False)

    def _header_list(self, data: bytes, at: int, end: int) -> tuple[dict[str, str], bool]:
        """Parse `HttpHeaders` or `HttpTrailers` between `at` and `end`."""
        headers: dict[str, str] | None = None
        ends: bool | None = None
        while at < end:
            tag = data[at]
            if tag == _HEADERS_END and ends is None:
                ends, at = _flag(data, at + 1), at + 2
            elif tag == _FIRST and headers is None:
                length = data[at + 1]
                at += 2
                if length > 0x7F:
                    length, at = _long(data, at - 1)
                if at + length > end:
                    raise _Unexpected
                headers = self._headers(data, at, at + length)
                at += length
            else:
                raise _Unexpected
        if at != end:
            raise _Unexpected
        return headers or {}, ends or False

    def _headers(self, data: bytes, at: int, end: int) -> dict[str, str]:
        """Parse a `HeaderMap` between `at` and `end`, a list of `HeaderValue`s. The last one of a name counts."""
        found: dict[str, str] = {}
        known = self._known
        while at < end:
            length = data[at + 1]
            # A remembered entry was whole, with its tag and length: the same bytes are one, too.
            stop = at + 2 + length
            entry = known.get(data[at:stop])
            if entry is None:
                entry, stop = self._entry(data, at, end)
            if entry is not _UNUSED:
                found[entry[0]] = entry[1]
            at = stop
        if at != end:
            raise _Unexpected
        return found

    def _entry(self, data: bytes, at: int, end: int) -> tuple[tuple[str, str], int]:
        """Parse one entry (a `HeaderValue` of a key and a raw value, with tag and length) at `at`; return also its
        end.
        """
        if data[at] != _FIRST:
            raise _Unexpected
        length, key_at = data[at + 1], at + 2
        if length > 0x7F:
            length, key_at = _long(data, at + 1)
        stop = key_at + length
        if stop > end or data[key_at] != _FIRST:
            raise _Unexpected
        length, name_at = data[key_at + 1], key_at + 2
        if length > 0x7F:
            length, name_at = _long(data, key_at + 1)
        name_end = value_at = name_at + length
        if name_end > stop:
            raise _Unexpected
        if name_end < stop:
            length, value_at = data[name_end + 1], name_end + 2
            if length > 0x7F:
                length, value_at = _long(data, name_end + 1)
            if data[name_end] != _THIRD or value_at + length != stop:
                raise _Unexpected
        raw_name = data[name_at:name_end]
        name = self._used.get(raw_name)
        if name is None and not raw_name.isascii():
            raise _Unexpected
        entry = _UNUSED if name is None else (name, data[value_at:stop].decode("latin-1"))
        if raw_name not in self._not_remembered and stop - at <= _LONGEST_ENTRY:
            if len(self._known) >= _REMEMBERED_ENTRIES:
                self._known.clear()
            self._known[data[at:stop]] = entry
        return entry, stop


def _body(data: bytes, at: int, end: int) -> tuple[Buffer, bool]:
    """Parse an `HttpBody` between `at` and `end`."""
    body: Buffer | None = None
    ends: bool | None = None
    while at < end:
        tag = data[at]
        if tag == _BODY_END and ends is None:
            ends, at = _flag(data, at + 1), at + 2
        elif tag == _FIRST and body is None:
            length = data[at + 1]
            at += 2
            if length > 0x7F:
                length, at = _long(data, at - 1)
            stop = at + length
            if stop > end:
                raise _Unexpected
            body = memoryview(data)[at:stop] if length >= _VIEWED_FROM else data[at:stop]
            at = stop
        else:
            raise _Unexpected
    if at != end:
        raise _Unexpected
    return b"" if body is None else body, ends or False


def _flag(data: bytes, at: int) -> bool:
    value = data[at]
    if value > 1:
        raise _Unexpected
    return value == 1


def _long(data: bytes, at: int) -> tuple[int, int]:
    """Parse a length of up to four bytes at `at`; return also its end."""
    byte = data[at]
    value = byte & 0x7F
    shift = 7
    while byte > 0x7F:
        if shift > 21:
            raise _Unexpected
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift += 7
    return value, at + 1


def metadata_of(serialized: bytes) -> Metadata:
    """Return `(subset hint, pool, served endpoint)`, None for each that `Metadata` lacks. Raises `DecodeError`."""
    metadata = pb.Metadata.FromString(serialized).filter_metadata
    subset: frozenset[str] | None = None
    pool: str | None = None
    served: str | None = None
    if names.LB_SUBSET in metadata:
        hint = metadata[names.LB_SUBSET].fields
        if names.SUBSET in hint:
            subset = _subset(hint[names.SUBSET])
    if names.LB in metadata:
        chosen = metadata[names.LB].fields
        if names.SERVED in chosen:
            served = chosen[names.SERVED].string_value or None
        if names.POOL_METADATA in chosen:
            pool = chosen[names.POOL_METADATA].string_value or None
    return subset, pool, served


def _subset(hint: struct_pb2.Value) -> frozenset[str]:
    """Return the endpoints that a hint allows; none for a hint without JSON form (NaN or infinity)."""
    try:
        return parse_subset(json_format.MessageToDict(hint))
    except (json_format.Error, ValueError, RecursionError):
        return NOTHING


def modes_of(serialized: bytes) -> Modes:
    """Return the `(request, response)` body modes of a `ProtocolConfiguration`. Raises `DecodeError`."""
    config = pb.ProtocolConfiguration.FromString(serialized)
    return _mode(config.request_body_mode), _mode(config.response_body_mode)


def _mode(value: int) -> BodyMode:
    try:
        return BodyMode(value)
    except ValueError:
        return BodyMode.NONE


_known_metadata = functools.lru_cache(maxsize=1024)(metadata_of)
_known_modes = functools.lru_cache(maxsize=64)(modes_of)
