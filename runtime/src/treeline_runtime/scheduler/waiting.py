"""Who of those who wait is next: kept as they come and leave, so that a step pays for those it looks at."""

from __future__ import annotations

from collections.abc import Iterator

from treeline_runtime.core import Req
from treeline_runtime.scheduler.policy import MATCH_LIMIT, Policy, View
from treeline_runtime.scheduler.ranked import Ranked


class WaitingOrder:
    """Who has waited `starvation_bound` seconds or more, the oldest first; then the others as the policy has it."""

    def __init__(self, policy: Policy, view: View, starvation_bound: float) -> None:
        self._policy = policy
        self._view = view
        self._bound = starvation_bound
        self._others = Ranked()
        self._overdue = Ranked()
        self._since = Ranked()
        """The others, by when they would have begun to wait if they had waited once."""
        self._count = 0

    def put(self, req: Req, *, front: bool = False) -> None:
        """Behind all others that wait, or before them, where the policy makes no difference."""
        self._count += 1
        place = -self._count if front else self._count
        self._others.put(req, (self._policy.rank(req, self._view), place))
        self._since.put(req, (req.waiting_since - req.waited_s,))

    def leave(self, req: Req) -> None:
        """If it waits."""
        for queue in (self._others, self._overdue, self._since):
            queue.leave(req)

    def in_order(self, now: float) -> Iterator[Req]:
        """Those who were given may leave meanwhile; nobody may come."""
        while (longest := self._since.first()) is not None and now - longest[0][0] >= self._bound:
            req = longest[1]
            self.leave(req)
            self._overdue.put(req, (req.arrival,))
        yield from self._overdue
        reorder = self._policy.reorder
        if reorder is None or len(self._others) > MATCH_LIMIT:
            yield from self._others
        else:
            yield from reorder(list(self._others), self._view)
