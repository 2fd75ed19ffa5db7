"""The last decisions, for people: each with the scores of its endpoints, and the beginning of its prompt."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from treeline_epp.picking.decision import Decision
from treeline_epp.picking.explanation import Explanation
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request

KEPT = 500
PROMPT_BYTES = 4096
"""Most bytes of a prefix key that are kept: 2 MB for all decisions."""
_LONGEST = 256
"""Most characters of a request's id and of a namespace that are kept: clients choose both. Of a prompt with a longer
namespace nothing is kept."""
_SHARE = 50.0
"""Pause after an explanation, as a multiple of its time: with a thousand endpoints it takes milliseconds."""


class Noted(msgspec.Struct, frozen=True, gc=False):
    """A decision, numbered from 1. `at` is in seconds since 1970; `key` is the beginning of the prompt's key."""

    number: int
    at: float
    told: dict[str, Any]
    """The record of `Decision.explain`."""
    endpoints: list[dict[str, Any]] | None
    """All endpoints, if they were explained."""
    namespace: str | None
    key: bytes
    key_bytes: int


class DecisionLog:
    """The last `KEPT` decisions. `add` takes twenty microseconds, so it is called only if a page shows the log."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._kept: deque[Noted] = deque(maxlen=KEPT)
        self._explain_at = float("-inf")
        self.count = 0
        """The number of decisions so far."""

    def explained(self, picker: Picker, request: Request, now: float) -> Explanation | None:
        """Return the explanation of a request with all endpoints; None shortly after the last one."""
        began = self._clock()
        if began < self._explain_at:
            return None
        found = picker.explain(request, now)
        took = self._clock() - began
        self._explain_at = began + took * (1.0 + _SHARE)
        return found

    def add(self, decision: Decision, explained: Explanation | None = None) -> None:
        """Add a decision: a request was given a destination."""
        self.count += 1
        request = decision.request
        told, key, space = decision.explain(), request.key or b"", request.namespace
        told["request_id"] = told["request_id"][:_LONGEST]
        kept_bytes = PROMPT_BYTES if space is None or len(space) <= _LONGEST else 0
        self._kept.append(
            Noted(
                self.count,
                self._wall(),
                told,
                None if explained is None else msgspec.to_builtins(explained.endpoints),
                space if kept_bytes else None,
                key[:kept_bytes],
                len(key),
            )
        )

    def all(self) -> tuple[Noted, ...]:
        """Return the kept decisions, the oldest first."""
        return tuple(self._kept)

    def since(self, number: int, most: int) -> list[Noted]:
        """Return at most `most` decisions after `number`, the newest first."""
        found: list[Noted] = []
        for noted in reversed(self._kept):
            if noted.number <= number or len(found) >= most:
                break
            found.append(noted)
        return found

    def listing(self, last: int = 20) -> list[dict[str, Any]]:
        """Return the last decisions as plain data, the newest first: each with its best endpoints, and with all of them
        (`endpoints`) if they were explained.
        """
        found = []
        for noted in self.since(0, last):
            record: dict[str, Any] = {"at": round(noted.at, 3), **noted.told}
            if noted.endpoints is not None:
                record["endpoints"] = noted.endpoints
            found.append(record)
        return found
