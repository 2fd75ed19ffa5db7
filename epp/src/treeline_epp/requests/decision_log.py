"""The last decisions, for people to look at: what was decided, and what came of each endpoint in it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec

from treeline_epp.picking.decision import Decision
from treeline_epp.picking.explanation import Explanation
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request

KEPT = 500
_LONGEST = 256
"""Clients choose the ids of their requests: no more of one is kept."""
_SHARE = 50.0
"""Looking at all endpoints of a decision takes milliseconds where there are a thousand: so long a pause follows, as a
multiple of what it took."""


class DecisionLog:
    """The last `KEPT`. `add` takes twenty microseconds, so it is called only where somebody may look."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._explain_at = float("-inf")

    def explained(self, picker: Picker, request: Request, now: float) -> Explanation | None:
        """What is to be decided of a request, with all endpoints; None where the last one was a moment ago."""
        began = self._clock()
        if began < self._explain_at:
            return None
        found = picker.explain(request, now)
        took = self._clock() - began
        self._explain_at = began + took * (1.0 + _SHARE)
        return found

    def add(self, decision: Decision, explained: Explanation | None = None) -> None:
        """A request was given a destination."""
        record = {"at": round(self._wall(), 3), **decision.explain()}
        record["request_id"] = record["request_id"][:_LONGEST]
        if explained is not None:
            record["endpoints"] = msgspec.to_builtins(explained.endpoints)
        self._kept.append(record)

    def listing(self, last: int = 20) -> list[dict[str, Any]]:
        """The newest first, as plain data: each with the endpoints that came out best, and all of them (`endpoints`)
        where that was looked at."""
        return list(islice(reversed(self._kept), last))
