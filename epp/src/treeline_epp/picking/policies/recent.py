"""A dictionary that forgets what was used least recently: for state by something that clients name."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """At most `room` values by their keys.

    >>> last = Recent(2)
    >>> for key in "aabc":
    ...     last.put(key, key.upper())
    >>> last.get("a"), last.get("b"), last.get("c")
    (None, 'B', 'C')
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """The value, which counts as used now; None without one. O(1)."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Set a value. O(1)."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._room:
            self._values.popitem(last=False)
