"""Header blocks of requests: decoded, checked (RFC 9113, section 8), and remembered if their meaning cannot change.

A proxy sends the same block with nearly every request. We ask it to keep no table of header fields
(`SETTINGS_HEADER_TABLE_SIZE` 0); from then on a block's meaning depends on its bytes alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from hpack import Decoder, HPACKError, OversizedHeaderListError

REMEMBERED: Final = 1024
"""Most remembered blocks."""
LONGEST: Final = 1024
"""Largest block that is remembered, in bytes."""

_PSEUDO: Final = frozenset({":method", ":scheme", ":path", ":authority"})
_REQUIRED: Final = frozenset({":method", ":scheme", ":path"})
_OF_CONNECTIONS: Final = frozenset({"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"})

_MOST_QUOTED: Final = 200
"""Most characters of an error, which may quote the whole block."""
_FIRST_TABLE: Final = 4096
"""Bytes of the table before our settings are known."""
_MOST_RESIZED: Final = 2
"""Most changes of the table's size at the beginning of a block (RFC 7541, section 4.2)."""

Fields = Mapping[str, str]


class BadBlock(Exception):
    """A block cannot be decoded: the connection's tables are lost with it."""


class TooLong(Exception):
    """A peer without a table sent more bytes of fields than we announced that we take: its stream ends."""


class Malformed(Exception):
    """A decoded block is no valid request, or no valid trailers: its stream ends."""


class FieldReader:
    """Reads the blocks of one connection, in their order."""

    def __init__(self, most_bytes: int, known: OrderedDict[bytes, Fields]) -> None:
        """Make a reader. `most_bytes` bounds a list of fields, counted as in RFC 7541, and a block. `known` is shared
        by connections.
        """
        self._most_bytes = most_bytes
        self._decoder = Decoder(max_header_list_size=most_bytes)
        self._known = known
        self.decoded = 0
        """Count of new blocks: each may take a millisecond or two."""
        self._keeps_nothing = False
        self._acknowledged = False

    def settings_acknowledged(self) -> None:
        """Apply our settings from the next block on: the peer may not make its table larger than ours, which is empty.
        Some clients keep their old table, without announcing it: that is understood.
        """
        self._acknowledged = True

    def request(self, block: bytes) -> Fields:
        """Return the fields by name, repeated ones joined by commas. Raises BadBlock, TooLong, Malformed."""
        if self._keeps_nothing:
            known = self._known.get(block)
            if known is not None:
                return known
        fields = _checked(self._read(block), is_request=True)
        self._keeps_nothing = self._decoder.header_table.maxsize == 0
        if self._keeps_nothing and len(block) <= LONGEST:
            if len(self._known) >= REMEMBERED:
                self._known.popitem(last=False)
            self._known[block] = fields
        return fields

    def trailers(self, block: bytes) -> Fields:
        """Return the trailers, as `request` does. Raises the same errors."""
        return _checked(self._read(block), is_request=False)

    def skip(self, block: bytes) -> None:
        """Read a block that is not needed, only to keep the tables in step. Raises BadBlock, TooLong."""
        self._read(block)

    def _read(self, block: bytes) -> list[tuple[bytes, bytes]]:
        self.decoded += 1
        try:
            if len(block) > self._most_bytes:
                raise OversizedHeaderListError(f"a block of {len(block)} bytes")
            resized = _resized(block)
            if resized > _MOST_RESIZED:
                raise BadBlock("the size of the table is changed more than twice")
            self._decoder.max_allowed_table_size = 0 if self._acknowledged and resized else _FIRST_TABLE
            return list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            if self._acknowledged and self._decoder.header_table.maxsize == 0:
                raise TooLong from None  # without a table, the rest of the block changes nothing
            raise BadBlock(str(error)) from None
        except HPACKError as error:
            raise BadBlock(str(error)[:_MOST_QUOTED] or type(error).__name__) from None


def _resized(block: bytes) -> int:
    """Count the changes of the table's size in a block, up to one more than allowed."""
    at = count = 0
    while count <= _MOST_RESIZED and at < len(block) and block[at] & 0xE0 == 0x20:
        count += 1
        goes_on = block[at] & 0x1F == 0x1F
        at += 1
        while goes_on and at < len(block):  # an integer: the decoder refuses a long one
            goes_on = block[at] >= 0x80
            at += 1
    return count


def _checked(fields: list[tuple[bytes, bytes]], *, is_request: bool) -> Fields:
    found: dict[str, str] = {}
    regular = False
    for raw_name, raw_value in fields:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name[:1] == ":":
            if regular or not is_request or name not in _PSEUDO or name in found:
                raise Malformed(f"{name!r} does not belong there")
            found[name] = value
            continue
        regular = True
        if not name or name != name.lower():
            raise Malformed(f"{name!r} is no name of a field")
        if name in _OF_CONNECTIONS or (name == "te" and value != "trailers"):
            raise Malformed(f"{name!r} belongs to connections of HTTP/1")
        if "\r" in value or "\n" in value or "\0" in value:
            raise Malformed(f"{name!r} has a line break in it")
        found[name] = f"{found[name]},{value}" if name in found else value
    if is_request and not (found.keys() >= _REQUIRED and found[":path"]):
        raise Malformed("no method, scheme or path")
    return found


def length_of(text: str | None) -> int | None:
    """Return a `content-length`, or None without one. Raises Malformed."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise Malformed("content-length")
    return int(text)
