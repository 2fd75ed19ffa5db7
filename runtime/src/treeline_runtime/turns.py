"""A queue in which clients take turns: what one of them sends does not delay another's by more than one piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Holds at most `most` items. None is a client, too: everybody whom the edge has not named."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lines: dict[str | None, deque[T]] = {}
        """The items of each client that has some. The client whose turn was longest ago is first."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def put(self, client: str | None, item: T) -> T | None:
        """Add an item. → the item for which there is no room now: the last one of the client that has most."""
        self._lines.setdefault(client, deque()).append(item)
        if len(self) <= self._most:
            return None
        fullest = max(self._lines, key=lambda name: (len(self._lines[name]), name == client))
        dropped = self._lines[fullest].pop()
        self._forget_if_empty(fullest)
        return dropped

    def put_back(self, client: str | None, item: T) -> None:
        """Add an item that was taken before: it is the next one of its client."""
        self._lines.setdefault(client, deque()).appendleft(item)

    def take(self, fits: Callable[[T], bool]) -> T | None:
        """Remove the first item that fits, of the first client that has one."""
        for client, line in self._lines.items():
            for index, item in enumerate(line):
                if fits(item):
                    del line[index], self._lines[client]
                    if line:
                        self._lines[client] = line
                    return item
        return None

    def remove(self, client: str | None, item: T) -> None:
        """Raises ValueError if it does not wait."""
        line = self._lines.get(client, deque())
        line.remove(item)
        self._forget_if_empty(client)

    def drop(self, client: str | None) -> list[T]:
        """Remove all items of a client."""
        return list(self._lines.pop(client, ()))

    def _forget_if_empty(self, client: str | None) -> None:
        if not self._lines[client]:
            del self._lines[client]
