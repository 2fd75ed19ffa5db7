"""One other picker's deltas in order, each once, from a state that is known to be fresh.

    asked ──snapshot──▶ in step ──a delta is missing──▶ waiting ──it comes──▶ in step
                            ▲                              │ GAP_S
                            └──────────snapshot────────────┘

The applied state is always the other picker's state at one moment: deltas are applied without a gap, and a snapshot
replaces all before it. A picker is believed only once it has answered a question of ours with the nonce in it, and then
only with higher numbers: recorded datagrams that are sent again change nothing. No clock but our own is read.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from treeline_wire.peers import NONCE_BYTES, Delta, Opened, Record, Snapshot

GAP_S = 0.03
"""Longest delay of a delta that later ones have overtaken."""
ASK_AGAIN_S = 0.2
MOST_WAITING = 256
"""Most deltas that are kept while one before them is missing."""


@dataclass(frozen=True, slots=True)
class News:
    """The news to apply: first the snapshot, if there is one, then the records."""

    snapshot: tuple[Opened, ...] | None = None
    records: tuple[Record, ...] = ()


NOTHING = News()


@dataclass(slots=True)
class Sequence:
    """The deltas of one picker; see the module. `heard_at` is when the last fresh message came."""

    heard_at: float
    in_step: bool = False
    """Whether it has answered us."""
    _next: int = 0
    _newest: int = 0
    _waiting: dict[int, tuple[Record, ...]] = field(default_factory=dict)
    _gap_since: float | None = None
    _asked_at: float = float("-inf")
    _nonce: bytes | None = None
    _parts: dict[int, Snapshot] = field(default_factory=dict)

    def on_delta(self, delta: Delta, now: float) -> News:
        """Take a delta, in any order. O(applicable records)."""
        if delta.seq < self._next or delta.seq in self._waiting:
            return NOTHING
        if delta.seq > self._newest:
            self._newest = delta.seq
            self.heard_at = now
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.clear()  # the requested snapshot will have all of them
        self._waiting[delta.seq] = delta.records
        return News(None, self._applicable(now)) if self.in_step else NOTHING

    def on_part(self, part: Snapshot, now: float) -> News:
        """Take a part of an answer; only answers to the last question count."""
        if part.nonce != self._nonce:
            return NOTHING
        self.heard_at = now
        if self._parts and (part.seq, part.parts) != (self._first.seq, self._first.parts):
            return NOTHING
        self._parts[part.part] = part
        if len(self._parts) < part.parts:
            return NOTHING
        parts = [self._parts[at] for at in range(part.parts)]
        self._nonce = None
        self._parts.clear()
        if self.in_step and part.seq < self._next - 1:
            return NOTHING  # the missing deltas have come meanwhile, and more
        self.in_step = True
        self._next = part.seq + 1
        self._newest = max(self._newest, part.seq)
        self._waiting = {seq: records for seq, records in self._waiting.items() if seq >= self._next}
        return News(tuple(opened for one in parts for opened in one.records), self._applicable(now))

    def question(self, now: float) -> bytes | None:
        """Return the nonce of a question to ask now, if any."""
        late = self._gap_since is not None and now >= self._gap_since + GAP_S
        if (self.in_step and not late) or now < self._asked_at + ASK_AGAIN_S:
            return None
        self._asked_at = now
        self._parts.clear()
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        return self._nonce

    @property
    def _first(self) -> Snapshot:
        return next(iter(self._parts.values()))

    def _applicable(self, now: float) -> tuple[Record, ...]:
        out: list[Record] = []
        while (records := self._waiting.pop(self._next, None)) is not None:
            out += records
            self._next += 1
        if self._newest < self._next:
            self._gap_since = None
        elif self._gap_since is None or out:
            self._gap_since = now
        return tuple(out)
