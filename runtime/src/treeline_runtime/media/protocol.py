"""What a process that decodes images is asked and answers; without its imports, which take seconds."""

from __future__ import annotations

import struct
from typing import Final

import msgspec

PIECE_BYTES: Final = 8 << 20
MOST: Final = struct.Struct(">I")
"""Precedes an image: the most tokens that it may take."""


class Made(msgspec.Struct, tag=True):
    """`count`: tokens in the prompt."""

    count: int
    grid: tuple[int, int, int]
    shape: tuple[int, ...]


class Unreadable(msgspec.Struct, tag=True):
    """`why` is for the client."""

    why: str


class Refused(Exception):
    """The item cannot be read; the text is for the client."""
