"""What containers say in their logs: lines of JSON among others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")


def last_line(text: str, decode: Callable[[str], T]) -> T | None:
    """The last line that `decode` takes. Others may be anything: they are a container's."""
    for line in reversed(text.splitlines()):
        try:
            return decode(line)
        except (msgspec.MsgspecError, RecursionError):
            continue
    return None
