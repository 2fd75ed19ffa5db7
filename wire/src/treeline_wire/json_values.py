"""How many values a JSON document has, and how many of them take long, counted without reading it.

A number takes msgspec 10 ns to read, but up to 150 µs where its digits and exponent do not fit into the fast way that
simdjson and others have: 8 kB of them hold an event loop for 50 ms.
"""

from __future__ import annotations

from typing import Final

SLOW: Final = 64
"""Values that a number with an exponent, or each 20 digits of one, count as."""
MAX_SLOW: Final = 64
"""Such numbers that are read while others wait."""
_SHAPES: Final = bytes.maketrans(b"123456789E", b"000000000e")


def mask_escapes(data: bytes) -> bytes:
    """The same length, with escaped quotes and backslashes in strings made harmless. O(bytes) at memory speed."""
    if b"\\" not in data:
        return data
    return data.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def count_values(data: bytes) -> int:
    """How many values a JSON document has, or a few more; more for each that takes long. O(bytes) at memory speed."""
    bare = outside_strings(data)
    return 1 + bare.count(b",") + bare.count(b"[") + bare.count(b"{") + SLOW * slow_numbers(bare)


def outside_strings(data: bytes) -> bytes:
    """A JSON document without its strings. O(bytes) at memory speed."""
    return b"".join(mask_escapes(data).split(b'"')[::2])


def slow_numbers(data: bytes) -> int:
    """Numbers that take long to read, in strings too; a few more for long ones. O(bytes) at memory speed."""
    shapes = data.translate(_SHAPES)
    return shapes.count(b"0e") + shapes.count(20 * b"0")
