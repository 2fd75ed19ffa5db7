"""Encoding of single protobuf fields around given bytes, without the library's copy for each level.

The format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from typing import Any

_LENGTH_DELIMITED = 2


def field_numbers(descriptor: Any, *names: str) -> tuple[int, ...]:
    """Return the numbers of a path of fields, each in the message of the one before."""
    numbers = []
    for name in names:
        found = descriptor.fields_by_name[name]
        numbers.append(found.number)
        descriptor = found.message_type
    return tuple(numbers)


def field(number: int, value: bytes) -> bytes:
    """Return a field of bytes, text or a message.

    >>> field(1, b"ab")
    b'\\n\\x02ab'
    """
    return field_head(number, len(value)) + value


def field_head(number: int, size: int) -> bytes:
    """Return the bytes before the `size` bytes of such a field."""
    return _packed(number << 3 | _LENGTH_DELIMITED) + _packed(size)


def _packed(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
