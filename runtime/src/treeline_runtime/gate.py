"""Generations on their way to the scheduler: clients take turns, and few bytes are on the way at a time.

The inboxes of the scheduler and of the detokenizer are queues that know nothing of clients. So what one client sends at
once waits here, before it is encoded, and goes on as the scheduler says that it has taken what went before: another
client's generation waits for `WINDOW_BYTES`, and for one generation of each client that waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_GENERATIONS_OF_CLIENT = 16_384
"""In flight, at one HTTP process."""
WINDOW_BYTES = 2 << 20
"""On the way at most, or one generation that is larger: a few milliseconds for the process that sends or reads them."""
MARK_BYTES = WINDOW_BYTES // 4
"""After so many the scheduler is asked to say when it has come so far."""


class TooManyGenerations(Exception):
    """The client has as many in flight as it may have."""


class Gate(Generic[T]):
    """Items by client and id. None is a client, too: everybody whom the edge has not named."""

    def __init__(self, size_of: Callable[[T], int], most: int = MAX_GENERATIONS_OF_CLIENT) -> None:
        self._size_of = size_of
        self._most = most
        self._in_flight: Counter[str | None] = Counter()
        self._lines: dict[str | None, dict[str, T]] = {}
        """What waits. The client whose turn was longest ago is first."""
        self._sent = self._marked = self._taken = 0
        """Bytes since the beginning: that have gone, up to the last mark, and that the scheduler has taken."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def enter(self, client: str | None, count: int) -> None:
        """So many more of a client's are in flight, until `leave`. Raises TooManyGenerations; then none is."""
        if self._in_flight[client] + count > self._most:
            raise TooManyGenerations
        self._in_flight[client] += count

    def leave(self, client: str | None, count: int) -> None:
        self._in_flight[client] -= count
        if not self._in_flight[client]:
            del self._in_flight[client]

    def put(self, client: str | None, id: str, item: T) -> None:
        self._lines.setdefault(client, {})[id] = item

    def remove(self, client: str | None, id: str) -> bool:
        """→ whether it waited here."""
        line = self._lines.get(client, {})
        found = line.pop(id, None) is not None
        if found and not line:
            del self._lines[client]
        return found

    def take(self) -> tuple[str, T] | None:
        """What goes now; None: nothing waits, or too much is on its way."""
        if not self._lines or self._sent - self._taken >= WINDOW_BYTES:
            return None
        client = next(iter(self._lines))
        line = self._lines.pop(client)
        id = next(iter(line))
        item = line.pop(id)
        if line:
            self._lines[client] = line
        self._sent += self._size_of(item)
        return id, item

    def mark(self) -> int | None:
        """After each `take`: what to call `taken` with once the scheduler has what went until now; None: don't ask."""
        if self._sent - self._marked < MARK_BYTES:
            return None
        self._marked = self._sent
        return self._marked

    def taken(self, mark: int) -> None:
        self._taken = max(self._taken, mark)
