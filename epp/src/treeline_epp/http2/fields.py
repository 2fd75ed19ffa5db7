"""Header blocks of requests: decoded, checked (RFC 9113, section 8), and remembered where they always mean the same.

A proxy sends the same block with nearly every request. We ask it to keep no table of header fields
(`SETTINGS_HEADER_TABLE_SIZE` 0), so once it does, a block's meaning depends on nothing but its bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from hpack import Decoder, HPACKError, OversizedHeaderListError

REMEMBERED: Final = 1024
"""Blocks."""
LONGEST: Final = 1024
"""Bytes of a block that is remembered."""

_PSEUDO: Final = frozenset({":method", ":scheme", ":path", ":authority"})
_REQUIRED: Final = frozenset({":method", ":scheme", ":path"})
_OF_CONNECTIONS: Final = frozenset({"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"})

_MOST_QUOTED: Final = 200
"""Characters of an error, which may quote the whole block."""
_FIRST_TABLE: Final = 4096
"""Bytes: before our settings are known."""

Fields = Mapping[str, str]


class BadBlock(Exception):
    """A block cannot be decoded: the connection's tables are lost with it."""


class TooLong(BadBlock):
    """More bytes of fields than we said that we take."""


class Malformed(Exception):
    """A block that was decoded is no request, or no trailers: its stream ends."""


class FieldReader:
    """Reads the blocks of one connection, in their order."""

    def __init__(self, most_bytes: int, known: OrderedDict[bytes, Fields]) -> None:
        """most_bytes: of a list of fields, counted as RFC 7541 does. known: shared by connections."""
        self._decoder = Decoder(max_header_list_size=most_bytes)
        self._known = known
        self._keeps_nothing = False
        self._acknowledged = False

    def settings_acknowledged(self) -> None:
        """From the next block on the peer may not make its table larger than ours, which is empty. Some clients go on
        with the table that they had, without a word: that is understood."""
        self._acknowledged = True

    def request(self, block: bytes) -> Fields:
        """Fields by name, those that come more than once joined by commas. Raises BadBlock, Malformed."""
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
        """As `request`."""
        return _checked(self._read(block), is_request=False)

    def skip(self, block: bytes) -> None:
        """A block that nobody wants: the tables go on. Raises BadBlock."""
        self._read(block)

    def _read(self, block: bytes) -> list[tuple[bytes, bytes]]:
        resized = self._acknowledged and block[:1] and block[0] & 0xE0 == 0x20
        self._decoder.max_allowed_table_size = 0 if resized else _FIRST_TABLE
        try:
            return list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise TooLong(str(error)) from None
        except HPACKError as error:
            raise BadBlock(str(error)[:_MOST_QUOTED] or type(error).__name__) from None


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
    """A `content-length`, if there is one. Raises Malformed."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise Malformed("content-length")
    return int(text)
