"""What requests of the last minutes came to, second by second and endpoint by endpoint: the console's time series.

Seconds are those of the wall clock, so that a page which has the older ones goes on after the picker was restarted.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from treeline_epp.requests.exchange import Exchange, Observer

KEPT_S = 600
MOST_ENDPOINTS = 32
"""Endpoints with figures of their own in one second; what others did is counted under an empty name."""
MOST_TTFTS = 16
"""Times to first token that one endpoint keeps of one second: with all seconds a megabyte."""
MOST_CELLS = 1000
"""In one answer: some ten milliseconds of the picker's loop."""


@dataclass(slots=True)
class Cell:
    """One endpoint in one second. Tokens are as the endpoint's answers told them."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttfts_s: array[float] = field(default_factory=lambda: array("f"))

    def counts(self) -> tuple[int, int, int, int]:
        """All but the times."""
        return self.requests, self.errors, self.prompt_tokens, self.cached_tokens


class Series(Observer):
    """The last `KEPT_S` seconds in which there were requests. A request counts when no more will be known of it."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._seconds: deque[tuple[int, dict[str, Cell]]] = deque(maxlen=KEPT_S)

    def ended(self, exchange: Exchange) -> None:
        """Count a request: at the endpoint that was picked for it, or at none where it was refused."""
        cells = self._now()
        name = "" if exchange.decision is None else exchange.decision.endpoint.name
        if name not in cells and len(cells) >= MOST_ENDPOINTS:
            name = ""
        cell = cells.setdefault(name, Cell())
        cell.requests += 1
        cell.errors += exchange.status is None or exchange.status >= 400
        reported = exchange.reported.counted()
        if reported.prompt is not None:
            cell.prompt_tokens += reported.prompt
            cell.cached_tokens += min(reported.cached or 0, reported.prompt)
        if exchange.ttft_s is not None and len(cell.ttfts_s) < MOST_TTFTS:
            cell.ttfts_s.append(exchange.ttft_s)

    def _now(self) -> dict[str, Cell]:
        second = int(self._wall())
        # A clock that is set back counts into the newest second, so that they stay in order.
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, {}))
        return self._seconds[-1][1]

    def since(self, second: int) -> list[list[object]]:
        """Cells of the whole seconds after this one, the oldest first, each as `[second, endpoint, requests, errors,
        prompt tokens, cached tokens, [times to first token]]`.

        At most `MOST_CELLS` and the rest of their second; ask for the following ones from the last second on.
        """
        now = int(self._wall())
        found: list[list[object]] = []
        for at, cells in self._seconds:
            if max(second, now - KEPT_S) < at < now:
                found += (
                    [at, name, *cell.counts(), [round(ttft, 4) for ttft in cell.ttfts_s]]
                    for name, cell in cells.items()
                )
            if len(found) >= MOST_CELLS:
                break
        return found
