"""What clients have used of a time that all share: who has used too much of it waits until enough is given back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class ClientSeconds:
    """A client may use `most` seconds, and gets back `back` of one in each second. None is a client, too: everybody
    whom the edge has not named."""

    def __init__(self, most: float, back: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._back = back
        self._clock = clock
        self._used: dict[str | None, tuple[float, float]] = {}
        """Of clients: seconds, and when they were counted."""

    def charge(self, client: str | None, seconds: float) -> None:
        """It has used so many."""
        self._used = {each: used for each, used in self._used.items() if self.owed(each) > 0}
        self._used[client] = self.owed(client) + seconds, self._clock()

    def owed(self, client: str | None) -> float:
        """What it has used and not been given back."""
        seconds, when = self._used.get(client, (0.0, 0.0))
        return max(seconds - self._back * (self._clock() - when), 0.0)

    def wait_s(self, client: str | None) -> int:
        """0 where it may use some; else whole seconds until it may."""
        too_many = self.owed(client) - self._most
        return max(math.ceil(too_many / self._back), 1) if too_many > 0 else 0
