"""The audit: every answered request says how much of its prompt was cached; compare that with what the index said.

One error means little: between pick and prefill a pod may have evicted the blocks. It is believed for that prefix only
(`AuditResult.CAP_HIT`: see `Index.cap_hit`). Errors across unrelated prefixes mean that the index is wrong about the
pod as a whole, after lost removals for instance: it is built anew (`AuditResult.REBUILD`), not more often than a
back-off allows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

TOLERANCE_BLOCKS = 2
"""Blocks by which a report may differ from the prediction before it counts as an error."""
UNRELATED_ERRORS = 3
"""Errors on so many different prefixes within WINDOW_S, and for at least half of the requests, are one too many."""
WINDOW_S = 30.0
BACKOFF_S = 10.0
MAX_BACKOFF_S = 300.0


class AuditResult(Enum):
    """What an observation leads to."""

    AGREED = "agreed"
    CAP_HIT = "cap_hit"
    REBUILD = "rebuild"


@dataclass(slots=True)
class Audit:
    """The audit of one endpoint. Readable: `checked`, `over` and `under` count requests, by kind of error."""

    checked: int = 0
    over: int = 0
    under: int = 0
    _seen: deque[tuple[float, int | None]] = field(default_factory=deque)
    _backoff: float = BACKOFF_S
    _quiet_until: float = float("-inf")

    def observe(
        self, confirmed: int, predicted: int, reported: int, block_size: int, prefix: int, now: float
    ) -> AuditResult:
        """Compare tokens: events said `confirmed`, with routing history `predicted` ≥ that; the engine `reported`.

        `prefix` identifies the prompt's beginning: equal for related prompts. O(requests in the window).
        """
        self.checked += 1
        tolerance = TOLERANCE_BLOCKS * max(1, block_size)
        over = reported < confirmed - tolerance
        under = reported > predicted + tolerance
        self.over += over
        self.under += under
        seen = self._seen
        seen.append((now, prefix if over or under else None))
        while seen[0][0] < now - WINDOW_S:
            seen.popleft()
        if not (over or under):
            return AuditResult.AGREED
        errors = [at for _, at in seen if at is not None]
        if len(set(errors)) >= UNRELATED_ERRORS and 2 * len(errors) >= len(seen) and self.allow(now):
            return AuditResult.REBUILD
        return AuditResult.CAP_HIT if over else AuditResult.AGREED

    def allow(self, now: float) -> bool:
        """May a rebuild begin now? If so it is counted as begun: the next one must wait, longer each time."""
        if now < self._quiet_until:
            return False
        if now > self._quiet_until + MAX_BACKOFF_S:
            self._backoff = BACKOFF_S
        self._quiet_until = now + self._backoff
        self._backoff = min(2 * self._backoff, MAX_BACKOFF_S)
        self._seen.clear()
        return True
