"""Flow control: requests that find no room wait here, and go on in their order.

Sans-IO: the clock is given, and a driver calls `pump` every few milliseconds while requests wait (`assembly.py`). A
request comes to `admit`. If no request waits before it, it is decided at once, at no cost; only if there is no room
(`Saturated`), or no endpoint at all (`NoEndpoints`), does it become a `Ticket`. Each ticket is finished exactly once:
by its turn, the end of its time, the end of the picker, or because its caller no longer wants it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from typing import Generic, NamedTuple

from treeline_epp.flow.fair_queue import FairQueue
from treeline_epp.flow.settings import FlowSettings
from treeline_epp.flow.ticket import R, Target, Ticket
from treeline_epp.picking.decision import FlowRefused, NoEndpoints, PickError, Saturated
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request

log = logging.getLogger(__name__)

OUTCOMES = ("dispatched", "refused", "expired", "cancelled", "shutting_down", "failed", "displaced", "queue_full")
"""The ways in which a ticket ends; `displaced`: by a flow that had less waiting; `queue_full`: no room for a ticket."""

MOST_AT_ONCE = 16
"""Most decisions before others get a turn: some milliseconds."""
MOST_ENDED = 64
"""Most requests refused, for a long wait or because the picker stops, before others get a turn."""
MOST_LOOKS = 64
"""Most looks for room before others get a turn, if requests wait for many models: milliseconds with many endpoints."""
_MOST_POOLS = 1000


class Held(NamedTuple):
    """The requests that wait for one pool, their prompts' `uncached_tokens`, and the longest wait, `oldest_s`."""

    requests: int
    bytes: int
    uncached_tokens: int
    oldest_s: float


class Queue(FairQueue):
    """The requests that wait for one pool, and for each target the reason, from the last look."""

    def __init__(self) -> None:
        super().__init__()
        self.why: dict[Target, PickError] = {}
        self.blocked: dict[Target, PickError] = {}
        """The reasons found by this round of looks so far."""

    def note(self, *, whole: bool) -> None:
        """Keep this round's reasons; `whole`: it has looked at all targets, so older reasons are dropped."""
        self.why = self.blocked if whole else self.why | self.blocked

    def begin(self) -> None:
        """Begin a round of looks."""
        self.blocked = {}
        self.rewind()

    def saturated(self) -> bool:
        """Return whether a request waits for room, and not for an endpoint."""
        return any(isinstance(self.why.get(target), Saturated) for _, target in self.targets())


class FlowControl(Generic[R]):
    """The waiting requests of all pools. `cost` is a decision's size in tokens of prompt and output; `dispatched` is
    called with the seconds that a request waited, when its turn has come.
    """

    def __init__(
        self,
        settings: FlowSettings,
        picker: Picker,
        clock: Callable[[], float],
        cost: Callable[[R], float],
        dispatched: Callable[[float], None] = lambda _waited_s: None,
    ) -> None:
        self.settings = settings
        self.woken: Callable[[], None] = lambda: None
        """Called when a request begins to wait."""
        self.outcomes: Counter[str] = Counter()
        """Counts of tickets by outcome."""
        self._picker = picker
        self._clock = clock
        self._cost = cost
        self._dispatched = dispatched
        self._queues: dict[str | None, Queue] = {}
        self._by_limit: dict[float, OrderedDict[Ticket[R], None]] = {}
        """All waiting tickets by time limit, the oldest first: tickets with one limit expire in this order."""
        self._pools: set[str] = set()
        """Pools for which a request has ever waited: their metrics return to 0 and stay."""
        self._closed = False

    @property
    def waiting(self) -> bool:
        """Whether any request waits."""
        return bool(self._queues)

    def admit(self, asked: Request, flow: str, size: int, decide: Callable[[], R]) -> R | Ticket[R]:
        """Return the result of `decide` if the request may go on at once, else its ticket; `decide` is then called at
        its turn, which may have come when this returns.

        `flow` is the request's flow, `size` its body in bytes. Raises the errors of `decide`, and `FlowRefused`.
        """
        queue = self._queues.get(asked.pool)
        if queue is not None and asked.sheddable and queue.saturated():
            raise Saturated("requests wait for this pool that are more urgent", 1.0)
        why: PickError | None = None
        try:
            if queue is None or not queue.waits(asked.priority):
                return decide()
            self._picker.check_room(asked, self._clock())
        except (Saturated, NoEndpoints) as error:
            if self._may_not_wait(asked, error):
                raise
            why = error
        if self._closed:
            raise shutting_down()
        ticket = self._hold(asked, flow, size, decide, why)
        if why is None:  # there is room: for this one, if those before it wait for other endpoints
            try:
                self.pump()
            except Exception:
                if not ticket.done:  # the caller gets the error, and no ticket to cancel
                    self.cancel(ticket)
                    raise
                log.exception("flow control failed on another request")
        return ticket

    def pump(self) -> bool:
        """Release requests that have room, and end those that have waited too long; return whether to call again at
        once.

        At most MOST_AT_ONCE go on, MOST_LOOKS are tried and MOST_ENDED end, so that others get a turn; if more targets
        than that have no room, the next call goes on with the targets behind them.
        """
        now, left, looks = self._clock(), MOST_AT_ONCE, MOST_LOOKS
        for pool, queue in [] if self._closed else list(self._queues.items()):
            while left and looks and (ticket := queue.head(queue.blocked)) is not None:
                left -= self._try(queue, ticket, queue.blocked, now)
                looks -= 1
            queue.note(whole=bool(left and looks))
            if looks or not left:
                queue.begin()
            del self._queues[pool]
            if len(queue):  # behind the other pools, which are next if this one has taken all the room
                self._queues[pool] = queue
            if not left or not looks:
                break
        more = self._expire(now)
        return self.waiting and (more or not left)

    def cancel(self, ticket: Ticket[R]) -> None:
        """Drop a ticket that its caller no longer wants. Does nothing if it is done."""
        if not ticket.done:
            self._leave(ticket)
            self._end(ticket, "cancelled")

    def close(self) -> None:
        """Stop: this and the next calls of `pump` refuse the waiting requests, and new ones are refused at once."""
        self._closed = True
        self._expire(self._clock())

    def held(self) -> dict[str, Held]:
        """Return the waiting requests by pool ("" without one); zeros if they have gone. O(waiting requests)."""
        now, found = self._clock(), dict.fromkeys(sorted(self._pools), Held(0, 0, 0, 0.0))
        oldest: dict[str | None, float] = {}
        for tickets in self._by_limit.values():
            for ticket in tickets:
                pool = ticket.asked.pool
                oldest[pool] = min(oldest.get(pool, now), ticket.since)
        for pool, queue in self._queues.items():
            bands = queue.bands.values()
            tokens = sum(band.uncached_tokens for band in bands)
            size = sum(band.bytes for band in bands)
            found[pool or ""] = Held(len(queue), size, tokens, now - oldest.get(pool, now))
        return found

    def bands(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield `(pool, priority, requests, flows that wait)` for each non-empty band."""
        for pool, queue in self._queues.items():
            for priority, band in queue.bands.items():
                yield pool or "", priority, band.requests, sum(bool(flow.tickets) for flow in band.flows.values())

    # Inside

    def _hold(self, asked: Request, flow: str, size: int, decide: Callable[[], R], why: PickError | None) -> Ticket[R]:
        settings, empty = self.settings, isinstance(why, NoEndpoints)
        self._make_room(asked, flow, size, empty=empty)
        queue = self._queues.get(asked.pool)
        now = self._clock()
        limit_s = settings.hold_empty_pool_seconds if empty else settings.ttl_seconds
        ticket = Ticket(asked, flow, size, decide, since=now, limit_s=limit_s)
        ticket.uncached_tokens = self._picker.uncached_tokens(asked, now)
        if queue is None:
            queue = self._queues[asked.pool] = Queue()
            if len(self._pools) < _MOST_POOLS:
                self._pools.add(asked.pool or "")
        if why is not None:
            queue.why[ticket.target] = why
        queue.push(ticket)
        self._by_limit.setdefault(limit_s, OrderedDict())[ticket] = None
        self.woken()
        return ticket

    def _may_not_wait(self, asked: Request, why: PickError) -> bool:
        if isinstance(why, NoEndpoints):  # a proxy that names a subset needs an answer at once
            return not self.settings.hold_empty_pool_seconds or asked.subset is not None
        return asked.sheddable or self.settings.saturation is None

    def _make_room(self, asked: Request, flow: str, size: int, *, empty: bool) -> None:
        """Make room for one more request of this flow, displacing another if needed. Raises FlowRefused."""
        settings = self.settings
        while True:
            queue = self._queues.get(asked.pool)
            band = None if queue is None else queue.bands.get(asked.priority)
            requests, waiting = (0, 0) if band is None else (band.requests, band.bytes)
            by_bytes = waiting + size > settings.max_bytes
            if not by_bytes and requests < settings.max_requests:
                return
            other = None
            if band is not None and size <= settings.max_bytes:
                other = band.to_displace(flow, size, by_bytes=by_bytes)
            why = f"{requests} requests wait for this pool already"
            if by_bytes:
                why = "the requests that wait for this pool have as many bytes as they may"
            full = queue_full(why, empty=empty)
            if other is None:
                self.outcomes["queue_full"] += 1
                raise full
            self._leave(other)
            self._end(other, "displaced", error=full)

    def _try(self, queue: Queue, ticket: Ticket[R], blocked: dict[Target, PickError], now: float) -> bool:
        """Try to let a ticket go on; return whether it is done."""
        try:
            self._check_room(ticket, now)
            result = ticket.decide()
            tokens = max(1.0, self._cost(result))
        except (Saturated, NoEndpoints) as error:
            # A request that waits for room keeps its place while endpoints are gone: most come back.
            if isinstance(error, NoEndpoints) or not self._may_not_wait(ticket.asked, error):
                blocked[ticket.target] = error
                return False
            queue.remove(ticket)
            self._end(ticket, "refused", error=error)
        except Exception as error:
            queue.remove(ticket)
            self._end(ticket, "failed", error=error)
        else:
            queue.serve(ticket, tokens)
            self._dispatched(now - ticket.since)
            self._end(ticket, "dispatched", result)
        return True

    def _check_room(self, ticket: Ticket[R], now: float) -> None:
        """Check for room in its pool, or in one that may stand in for it. Raises the picker's last error."""
        *others, last = ticket.room_for
        for asked in others:
            with contextlib.suppress(NoEndpoints):
                self._picker.check_room(asked, now)
                return
        self._picker.check_room(last, now)

    def _expire(self, now: float) -> bool:
        """End late tickets; return whether there may be more."""
        left = MOST_ENDED
        for limit_s, tickets in list(self._by_limit.items()):
            late = takewhile(lambda ticket: self._closed or now - ticket.since >= ticket.limit_s, tickets)
            for ticket in list(islice(late, left)):
                left -= 1
                queue = self._queues[ticket.asked.pool]
                empty = isinstance(queue.why.get(ticket.target), NoEndpoints)
                self._leave(ticket)
                if self._closed:
                    self._end(ticket, "shutting_down", error=shutting_down())
                else:
                    self._end(ticket, "expired", error=waited_too_long(limit_s, empty=empty))
        return not left

    def _leave(self, ticket: Ticket[R]) -> None:
        """Take a ticket out of its queue; an empty queue is dropped."""
        queue = self._queues[ticket.asked.pool]
        queue.remove(ticket)
        if not len(queue):
            del self._queues[ticket.asked.pool]

    def _end(self, ticket: Ticket[R], outcome: str, result: R | None = None, error: Exception | None = None) -> None:
        tickets = self._by_limit[ticket.limit_s]
        del tickets[ticket]
        if not tickets:
            del self._by_limit[ticket.limit_s]
        self.outcomes[outcome] += 1
        ticket.finish(result, error)


def queue_full(why: str, *, empty: bool) -> FlowRefused:
    """Make the refusal for a full queue: 429; 503 for a pool without an endpoint."""
    status, reason = (503, "rejected-no-endpoints") if empty else (429, "rejected-saturated")
    return FlowRefused(f"Too many requests: {why}.", status, reason, "queue_full")


def waited_too_long(waited_s: float, *, empty: bool) -> FlowRefused:
    """Make the refusal for an expired ticket: 429; 503 if there still is no endpoint."""
    why = "no endpoint of its pool was ready" if empty else "every endpoint had enough to do"
    message = f"The request waited {waited_s:.3g} s, and {why}."
    return FlowRefused(message, 503 if empty else 429, "rejected-ttl-expired", "waited_too_long")


def shutting_down() -> FlowRefused:
    """Make the refusal of a picker that stops: 503. Another one may take the request."""
    message = "The endpoint picker that held the request is shutting down."
    return FlowRefused(message, 503, "rejected-shutting-down", "shutting_down")
