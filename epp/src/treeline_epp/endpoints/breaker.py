"""The breaker: an endpoint that answers nothing but errors is left out for a while, however ready it says it is.

Such an endpoint would otherwise draw everybody: it is idle, and quick. Errors in a row open the breaker; when its time
is up one request tries the endpoint, and its answer closes the breaker or opens it again, for longer each time.
"""

from __future__ import annotations

from dataclasses import dataclass

ERRORS = 3
"""Errors in a row, with no other answer between them. One or two may be the requests' own fault."""
OPEN_S = 1.0
MAX_OPEN_S = 30.0


@dataclass(slots=True)
class Breaker:
    """The breaker of one endpoint. Readable: `errors`, those in a row."""

    errors: int = 0
    _pause: float = OPEN_S
    _until: float = float("-inf")

    @property
    def tripped(self) -> bool:
        """Is the endpoint known to fail? It stays so until it answers."""
        return self.errors >= ERRORS

    @property
    def closed_until(self) -> float:
        """Until when no request may go there; in the past if any may."""
        return self._until if self.tripped else float("-inf")

    def on_pick(self, now: float) -> None:
        """A request goes there. If it is the one that tries, others wait for what comes of it."""
        if self.tripped:
            self._until = now + self._pause

    def on_error(self, now: float) -> None:
        """It failed a request."""
        self.errors += 1
        if self.tripped:
            self._until = now + self._pause
            self._pause = min(2 * self._pause, MAX_OPEN_S)

    def on_answer(self) -> None:
        """It answered one."""
        self.errors = 0
        self._pause = OPEN_S
