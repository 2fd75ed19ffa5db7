"""Requests and answers of a process that decodes media; without its imports, which take seconds."""

from __future__ import annotations

import struct
from typing import Final

import msgspec
from treeline_wire.media import Kind

PIECE_BYTES: Final = 8 << 20
HEAD: Final = struct.Struct(">BI")
"""Precedes an item: its kind's place in `KINDS`, and the most tokens that it may take."""
KINDS: Final[tuple[Kind, ...]] = ("image", "video", "audio")


class Made(msgspec.Struct, tag=True):
    """`count`: tokens in the prompt."""

    count: int
    grid: tuple[int, int, int]
    shape: tuple[int, ...]
    seconds: float = 1.0
    """In a video, the seconds from a frame of the grid to the next."""
    times: tuple[float, ...] = ()
    """The second of each frame, if a video's frames stand apart."""


class Unreadable(msgspec.Struct, tag=True):
    """`why` is for the client."""

    why: str


class Refused(Exception):
    """The item cannot be read; the text is for the client."""


def check_room(count: int, most: int) -> None:
    """Raises Refused for an item of more tokens than it may take."""
    if count > most:
        raise Refused(f"it takes {count} tokens of the context, which has room for {most}")
