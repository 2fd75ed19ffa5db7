"""A request and its response, kept for those who want to know what came of it: observers, quotas, the queue.

None is made where nobody does. The router owns it, beside the request's lease. Observers are called three times: when a
request is there to be decided, when it is, and when its stream has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from treeline_epp.flow.quotas import Spend
from treeline_epp.flow.ticket import Served
from treeline_epp.picking.decision import Decision
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import Buffer
from treeline_epp.requests.refusals import Refusal
from treeline_epp.requests.usage import NOTHING, Usage, UsageReader

log = logging.getLogger(__name__)

DEFAULT_FLOW: Final = "default-flow"
"""Of requests that name no other, as GIE calls it."""


@dataclass(eq=False, slots=True)
class Exchange:
    """One request. Times are the router's clock in seconds, but for `wall_time`.

    `request` is what was read of it, with the registry's `version`; None where it could not be read. `status` is that
    of the response, or of the refusal. `finished_at` is known where the proxy shows the response to its end,
    `first_chunk_at` where it shows its body. `observed`: the proxy only shows the request, and the decision was not
    used. `added` are request headers that go on to the endpoint. `spend` is what it counts for in its client's quota,
    `turn` what it was counted as when its turn came in the queue.
    """

    id: str
    path: str
    client: str | None
    flow: str
    request_bytes: int
    shows_body: bool
    observed: bool
    started_at: float
    wall_time: float = field(default_factory=time.time)
    decided_at: float = 0.0
    request: Request | None = None
    version: int = -1
    decision: Decision | None = None
    refusal: Refusal | None = None
    added: list[tuple[str, str]] = field(default_factory=list)
    spend: Spend | None = None
    turn: Served | None = None
    status: int | None = None
    served: str | None = None
    streams: bool = False
    reported: Usage = NOTHING
    """By the response's headers."""
    headers_at: float | None = None
    first_chunk_at: float | None = None
    finished_at: float | None = None
    body: UsageReader | None = None
    """Of the response, once that has begun."""
    took: Usage = NOTHING
    """As far as it is known yet, for quotas and the queue."""
    _usage: Usage | None = None

    @property
    def model(self) -> str:
        """What the client asked for; empty while no pool is known that serves it, so that it is safe to count by."""
        return "" if self.request is None else self.request.asked or ""

    @property
    def target(self) -> str:
        """Its name at the endpoint, empty likewise."""
        return "" if self.request is None or self.request.asked is None else self.request.model or ""

    @property
    def priority(self) -> int:
        """Of its objective."""
        return 0 if self.request is None else self.request.priority

    def answered(self, headers: Mapping[str, str], served: str | None, reported: Usage, now: float) -> None:
        """The response's headers are there."""
        self.headers_at = now
        self.served = served
        self.reported = reported
        status = headers.get(":status", "")
        self.status = int(status) if len(status) == 3 and status.isascii() and status.isdecimal() else None
        self.streams = headers.get("content-type", "").startswith("text/event-stream")
        self.body = UsageReader(stream=self.streams)

    def shown(self, data: Buffer, now: float, *, ended: bool) -> None:
        """A piece of the response's body, and whether that was its end. O(1) but for the copy of what is kept."""
        if data and self.first_chunk_at is None:
            self.first_chunk_at = now
        if self.body is not None:
            self.body.feed(data)
        if ended and self.finished_at is None:
            self.finished_at = now

    @property
    def response_bytes(self) -> int:
        """Of the response's body, as far as it was shown."""
        return 0 if self.body is None else self.body.bytes

    @property
    def usage(self) -> Usage:
        """Tokens by the response's own word, in its headers (ours) or its body; None where it does not say."""
        if self._usage is None:
            read = NOTHING if self.finished_at is None or self.body is None else self.body.told()
            self._usage = self.reported.over(read)
        return self._usage

    @property
    def ttft_s(self) -> float | None:
        """From request to first token, of streams alone: when their headers came where these come with the first token
        (runtimes of Treeline), else when the first of their body did; None where the proxy does not show it."""
        if not self.streams:
            return None
        at = self.headers_at if self.reported.prompt is not None else self.first_chunk_at
        return None if at is None else at - self.started_at

    @property
    def duration_s(self) -> float | None:
        """From request to the response's end, where that is shown."""
        return None if self.finished_at is None else self.finished_at - self.started_at


class Observer:
    """Keeps accounts of exchanges; each method may be left out."""

    def asked(self, exchange: Exchange, headers: Mapping[str, str]) -> None:
        """A request is there to be decided."""

    def decided(self, exchange: Exchange) -> None:
        """It has an endpoint (`decision`), a refusal, or neither: the picker answered it."""

    def ended(self, exchange: Exchange) -> None:
        """Nothing more will be known of it. Not called for what the picker answered without a refusal."""


class Observers(tuple[Observer, ...]):
    """All of them. What one fails on is logged, and holds up no request."""

    __slots__ = ()

    def asked(self, exchange: Exchange, headers: Mapping[str, str]) -> None:
        """As an observer's."""
        self._each(exchange, lambda observer: observer.asked(exchange, headers))

    def decided(self, exchange: Exchange) -> None:
        """As an observer's."""
        self._each(exchange, lambda observer: observer.decided(exchange))

    def ended(self, exchange: Exchange) -> None:
        """As an observer's."""
        self._each(exchange, lambda observer: observer.ended(exchange))

    def _each(self, exchange: Exchange, tell: Callable[[Observer], None]) -> None:
        for observer in self:
            try:
                tell(observer)
            except Exception:
                log.exception("request %s: %s failed", exchange.id, type(observer).__name__)


NO_OBSERVERS: Final = Observers()
