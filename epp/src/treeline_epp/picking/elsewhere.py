"""What a picker is told of the other pickers of its pool, and tells them: the seam that `treeline_epp.peers` fills."""

from __future__ import annotations

from typing import Protocol

from treeline_epp.index.pods import Match
from treeline_epp.picking.decision import Outcome
from treeline_epp.picking.lease import Lease


class Elsewhere(Protocol):
    """The requests that go by other pickers."""

    def opened(self, lease: Lease, now: float) -> None:
        """The others are to know of this lease."""
        ...

    def closed(self, lease: Lease, outcome: Outcome, *, began: bool) -> None:
        """They are to know how it ended. `began`: with the first token, by the endpoint that was picked; otherwise an
        outcome of HEADERS says nothing of its prefill."""
        ...

    def foreseen(self, match: Match, scope: str, namespace: str | None, key: bytes, now: float) -> Match:
        """The match, and what the requests that others have sent are expected to leave in caches."""
        ...
