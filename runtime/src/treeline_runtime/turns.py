"""Sharing between clients: a queue in which they take turns, so that one delays another by at most one item, and a
budget of seconds for each.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Holds at most `most` items. All items without a client belong to one client, None."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lines: dict[str | None, deque[T]] = {}
        """The items of each client that has some. The client whose turn was longest ago is first."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def put(self, client: str | None, item: T) -> T | None:
        """Adds an item. Returns the item that no longer fits: the last one of the client with most."""
        self._lines.setdefault(client, deque()).append(item)
        if len(self) <= self._most:
            return None
        fullest = max(self._lines, key=lambda name: (len(self._lines[name]), name == client))
        dropped = self._lines[fullest].pop()
        self._forget_if_empty(fullest)
        return dropped

    def put_back(self, client: str | None, item: T) -> None:
        """Puts an item back as its client's next."""
        self._lines.setdefault(client, deque()).appendleft(item)

    def take(self, fits: Callable[[T], bool]) -> T | None:
        """Removes the first item that fits, of the first client with one."""
        for client, line in self._lines.items():
            for index, item in enumerate(line):
                if fits(item):
                    del line[index], self._lines[client]
                    if line:
                        self._lines[client] = line
                    return item
        return None

    def remove(self, client: str | None, item: T) -> None:
        """Raises ValueError if it is not in the queue."""
        line = self._lines.get(client, deque())
        line.remove(item)
        self._forget_if_empty(client)

    def drop(self, client: str | None) -> list[T]:
        return list(self._lines.pop(client, ()))

    def _forget_if_empty(self, client: str | None) -> None:
        if not self._lines[client]:
            del self._lines[client]


class ClientSeconds:
    """A client may use `most` seconds of shared time; every second gives `back` seconds back. All work without a client
    belongs to one client, None."""

    def __init__(self, most: float, back: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._back = back
        self._clock = clock
        self._used: dict[str | None, tuple[float, float]] = {}
        """Client → seconds used, and when they were counted."""

    def charge(self, client: str | None, seconds: float) -> None:
        self._used = {each: used for each, used in self._used.items() if self.owed(each) > 0}
        self._used[client] = self.owed(client) + seconds, self._clock()

    def owed(self, client: str | None) -> float:
        """Seconds used and not yet given back."""
        seconds, when = self._used.get(client, (0.0, 0.0))
        return max(seconds - self._back * (self._clock() - when), 0.0)

    def wait_s(self, client: str | None) -> int:
        """Whole seconds until the client may use time again; 0 if it may now."""
        too_many = self.owed(client) - self._most
        return max(math.ceil(too_many / self._back), 1) if too_many > 0 else 0
