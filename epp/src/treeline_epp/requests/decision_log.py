"""The last decisions, for people to look at: what was decided, what came of each endpoint in it, and the beginnings of
the prompts that they were for."""

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
"""Of a prefix key that are kept: with all decisions 2 MB."""
_LONGEST = 256
"""Clients choose the ids of their requests, and the salts in the names of namespaces: no more of one is kept, and
nothing of the prompt where its namespace is longer."""
_SHARE = 50.0
"""Looking at all endpoints of a decision takes milliseconds where there are a thousand: so long a pause follows, as a
multiple of what it took."""


class Noted(msgspec.Struct, frozen=True, gc=False):
    """A decision, numbered from 1. `at` is in seconds since 1970; `key` is the beginning of the prompt's key."""

    number: int
    at: float
    told: dict[str, Any]
    """As `Decision.explain` tells it."""
    endpoints: list[dict[str, Any]] | None
    """All of them, where that was looked at."""
    namespace: str | None
    key: bytes
    key_bytes: int


class DecisionLog:
    """The last `KEPT`. `add` takes twenty microseconds, so it is called only where somebody may look."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._kept: deque[Noted] = deque(maxlen=KEPT)
        self._explain_at = float("-inf")
        self.count = 0
        """How many there have been."""

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
        """Those that are kept, the oldest first."""
        return tuple(self._kept)

    def since(self, number: int, most: int) -> list[Noted]:
        """At most so many of those after `number`, the newest first."""
        found: list[Noted] = []
        for noted in reversed(self._kept):
            if noted.number <= number or len(found) >= most:
                break
            found.append(noted)
        return found

    def listing(self, last: int = 20) -> list[dict[str, Any]]:
        """The newest first, as plain data: each with the endpoints that came out best, and all of them (`endpoints`)
        where that was looked at."""
        found = []
        for noted in self.since(0, last):
            record: dict[str, Any] = {"at": round(noted.at, 3), **noted.told}
            if noted.endpoints is not None:
                record["endpoints"] = noted.endpoints
            found.append(record)
        return found
