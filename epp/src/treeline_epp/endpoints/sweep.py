"""Asking all engines once more what they serve, because a request named a model that none is known to have.

An engine that pushes its load is asked seldom, and may have got a model since. A client that asks for a name that no
engine has could keep a picker busy with sweeps. So there is one at a time, spread over time, and the next one comes no
sooner than the engines would be asked anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

MIN_INTERVAL_S: Final = 1.0
EACH_SECOND: Final = 50.0
"""Engines asked on average, however often something is missed. Asking one takes a third of a millisecond."""
AT_ONCE: Final = 16
"""Engines asked at each beat of the fleet."""


class Sweep:
    """See the module. Names are those of endpoints."""

    def __init__(self) -> None:
        self._due: deque[str] = deque()
        self._again_at = float("-inf")

    def due(self, now: float) -> bool:
        """None is under way, nor was lately."""
        return not self._due and now >= self._again_at

    def begin(self, names: Sequence[str], now: float) -> None:
        """Something was missed: ask these, unless a sweep is under way or was lately."""
        if self.due(now):
            self._due.extend(names)
            self._again_at = now + max(MIN_INTERVAL_S, len(names) / EACH_SECOND)

    def take(self) -> list[str]:
        """Those to be asked at this beat; each once, some may have gone meanwhile."""
        return [self._due.popleft() for _ in range(min(AT_ONCE, len(self._due)))]
