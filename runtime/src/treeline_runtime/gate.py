"""The turns of clients in sending to the scheduler.

The inboxes of scheduler and detokenizer do not know clients. So a client's generations wait here, unencoded, until the
scheduler has confirmed most earlier messages. At most `WINDOW_BYTES`, and one generation of each waiting client, are
ahead of another client's generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from treeline_runtime.server.errors import rate_limited

T = TypeVar("T")

MAX_GENERATIONS_OF_CLIENT = 16_384
"""Generations of one client in flight at a rank."""
WINDOW_BYTES = 2 << 20
"""The most bytes on the way, or one larger generation: a few milliseconds to send or read."""
MARK_BYTES = WINDOW_BYTES // 4
"""Generations after which the scheduler is asked for confirmation."""


class Gate(Generic[T]):
    """Waiting items by client and id, sent in turns of clients. All requests without a client are one client, None."""

    def __init__(self, size_of: Callable[[T], int], most: int = MAX_GENERATIONS_OF_CLIENT) -> None:
        self._size_of = size_of
        self._most = most
        self._in_flight: Counter[str | None] = Counter()
        self._lines: dict[str | None, dict[str, T]] = {}
        """The waiting items. The client whose turn was longest ago is first."""
        self._sent = self._marked = self._taken = 0
        """Bytes since the start: sent, sent up to the last mark, and taken by the scheduler."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def enter(self, client: str | None, count: int) -> None:
        """Counts generations of a client as in flight, until `leave`; all or none. Raises ApiError 429."""
        if self._in_flight[client] + count > self._most:
            raise rate_limited(
                f"More than {self._most} generations in flight: prompts x n of all your requests. Wait until some have "
                "ended"
            )
        self._in_flight[client] += count

    def leave(self, client: str | None, count: int) -> None:
        self._in_flight[client] -= count
        if not self._in_flight[client]:
            del self._in_flight[client]

    def put(self, client: str | None, id: str, item: T) -> None:
        self._lines.setdefault(client, {})[id] = item

    def remove(self, client: str | None, id: str) -> bool:
        """Removes an item; returns whether it was waiting."""
        line = self._lines.get(client, {})
        found = line.pop(id, None) is not None
        if found and not line:
            del self._lines[client]
        return found

    def take(self) -> tuple[str, T] | None:
        """Returns the next item to send; None if none waits or the scheduler still has to receive too many bytes."""
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
        """Called after each `take`. Returns the argument of `taken` for when the scheduler has received everything so
        far; None if there is no need to ask it."""
        if self._sent - self._marked < MARK_BYTES:
            return None
        self._marked = self._sent
        return self._marked

    def taken(self, mark: int) -> None:
        self._taken = max(self._taken, mark)
