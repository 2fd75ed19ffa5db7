"""Who of those who wait is next: kept as they come and leave, so that a step pays for those it looks at."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from treeline_runtime.core import Req
from treeline_runtime.scheduler.policy import MATCH_LIMIT, Policy, View
from treeline_runtime.scheduler.ranked import Ranked


class WaitingOrder:
    """The clients of the edge take turns, first the one that was served longest ago: a client with a thousand requests
    delays the first request of another by one. The order of a client's own requests is that of `_ClientOrder`."""

    def __init__(self, policy: Policy, view: View, starvation_bound: float) -> None:
        self._policy = policy
        self._view = view
        self._bound = starvation_bound
        self._clients: dict[str | None, _ClientOrder] = {}
        """Those who wait, in the order of their turns."""

    def put(self, req: Req, *, front: bool = False) -> None:
        """Behind all others of its client that wait, or before them, where the policy makes no difference."""
        if req.client not in self._clients:
            self._clients[req.client] = _ClientOrder(self._policy, self._view, self._bound)
        self._clients[req.client].put(req, front=front)

    def leave(self, req: Req) -> None:
        """It waits no longer. Its client's next request comes after those of others."""
        order = self._clients.pop(req.client)
        order.leave(req)
        if len(order):
            self._clients[req.client] = order

    def advance(self, client: str | None) -> None:
        """It has its next turn now."""
        order = self._clients.pop(client)
        self._clients = {client: order, **self._clients}

    def firsts(self, now: float) -> Iterator[Req]:
        """The first request of each client, in the order of their turns."""
        return (next(order.in_order(now)) for order in self._clients.values())

    def in_order(self, now: float, may_come: Callable[[str | None], bool] = lambda _: True) -> Iterator[Req]:
        """While this goes on, requests that it gave may leave, and none may be put. `may_come` says before each turn of
        a client whether it has this turn; after a no it has no more."""
        turns = deque((client, order.in_order(now)) for client, order in self._clients.items())
        while turns:
            client, order = turns.popleft()
            if may_come(client) and (req := next(order, None)) is not None:
                yield req
                turns.append((client, order))


class _ClientOrder:
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

    def __len__(self) -> int:
        return len(self._others) + len(self._overdue)

    def put(self, req: Req, *, front: bool = False) -> None:
        self._count += 1
        place = -self._count if front else self._count
        self._others.put(req, (self._policy.rank(req, self._view), place))
        self._since.put(req, (req.waiting_since - req.waited_s,))

    def leave(self, req: Req) -> None:
        for queue in (self._others, self._overdue, self._since):
            queue.leave(req)

    def in_order(self, now: float) -> Iterator[Req]:
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
