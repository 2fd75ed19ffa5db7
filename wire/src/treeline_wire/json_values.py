"""How many values a JSON document has, told without reading it."""

from __future__ import annotations


def mask_escapes(data: bytes) -> bytes:
    """The same length, with escaped quotes and backslashes in strings made harmless. O(bytes) at memory speed."""
    if b"\\" not in data:
        return data
    return data.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def count_values(data: bytes) -> int:
    """How many values a JSON document has, or a few more. O(bytes) at memory speed."""
    masked = mask_escapes(data)
    bare = b"".join(masked.split(b'"')[::2])
    return 1 + bare.count(b",") + bare.count(b"[") + bare.count(b"{")
