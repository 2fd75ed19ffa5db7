"""Long work in the event loop, in short turns; and JSON written in pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

TURN_S = 0.004

encode_json = msgspec.json.Encoder().encode


class Pacer:
    """Call `rest` between steps of long work: it lets others run when a turn is used up."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + TURN_S

    async def rest(self) -> None:
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + TURN_S


def open_object(members: Mapping[str, Any], last: str) -> bytes:
    """The beginning of a JSON object: its members, and the name of one more, whose value and `}` follow.

    `members` must not be empty.
    """
    return encode_json(members)[:-1] + b"," + encode_json(last) + b":"


def opened(value: msgspec.Struct) -> bytes:
    """The beginning of a JSON object whose last member follows in pieces: up to its value if that is None in `value`,
    or inside its brackets if it is []."""
    encoded = encode_json(value)
    return encoded[:-5] if encoded.endswith(b"null}") else encoded[:-2]


def elements(values: list[Any]) -> bytes:
    """The elements of a JSON array without its brackets."""
    return encode_json(values)[1:-1]
