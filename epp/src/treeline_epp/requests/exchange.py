"""The record of a request and its response, for observers, quotas and the queue.

Without any of them, no record is made. The router owns it, beside the request's lease. Observers are called three
times: before the decision, after it, and when the request's stream has ended.
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
from treeline_epp.requests.usage import NOTHING, Usage, UsageReader, is_stream

log = logging.getLogger(__name__)

DEFAULT_FLOW: Final = "default-flow"
"""The flow of requests that name none, as in GIE."""


@dataclass(eq=False, slots=True)
class Exchange:
    """One request. Times are the router's clock in seconds, but for `wall_time`.

    `request` is the parsed request, with the registry's `version`; None if parsing failed. `status` is that of the
    response, or of the refusal. `finished_at` is known if the proxy shows the response to its end, `first_chunk_at` if
    it shows its body. `observed`: the proxy only shows the request, and the decision was not used. `added` are request
    headers to send to the endpoint. `spend` is its cost in its client's quota, `turn` corrects its cost in the queue.
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
    """Tokens by the response's headers."""
    headers_at: float | None = None
    first_chunk_at: float | None = None
    finished_at: float | None = None
    body: UsageReader | None = None
    """Reader of the response's body, once that has begun."""
    took: Usage = NOTHING
    """The tokens known so far, for quotas and the queue."""
    _usage: Usage | None = None

    @property
    def model(self) -> str:
        """The model's name in the request; empty unless a pool serves it, so that it is a safe metric label."""
        return "" if self.request is None else self.request.asked or ""

    @property
    def target(self) -> str:
        """The model's name at the endpoint; empty in the same case."""
        return "" if self.request is None or self.request.asked is None else self.request.model or ""

    @property
    def priority(self) -> int:
        """The priority of its objective."""
        return 0 if self.request is None else self.request.priority

    def answered(self, headers: Mapping[str, str], served: str | None, reported: Usage, now: float) -> None:
        """Take the response's headers."""
        self.headers_at = now
        self.served = served
        self.reported = reported
        status = headers.get(":status", "")
        self.status = int(status) if len(status) == 3 and status.isascii() and status.isdecimal() else None
        self.streams = is_stream(headers)
        self.body = UsageReader(stream=self.streams)

    def shown(self, data: Buffer, now: float, *, ended: bool) -> None:
        """Take a piece of the response's body; `ended`: the last one. O(1) but for the copy of the kept bytes."""
        if data and self.first_chunk_at is None:
            self.first_chunk_at = now
        if self.body is not None:
            self.body.feed(data)
        if ended and self.finished_at is None:
            self.finished_at = now

    @property
    def response_bytes(self) -> int:
        """The bytes of the response's body shown so far."""
        return 0 if self.body is None else self.body.bytes

    @property
    def usage(self) -> Usage:
        """The tokens that the response reports, in its headers (ours) or its body; None where it does not."""
        if self._usage is None:
            read = NOTHING if self.finished_at is None or self.body is None else self.body.told()
            self._usage = self.reported.over(read)
        return self._usage

    @property
    def ttft_s(self) -> float | None:
        """The seconds from request to first token, for streams only: by the headers if these come with the first token
        (runtimes of Treeline), else by the first bytes of the body; None if the proxy does not show it.
        """
        if not self.streams:
            return None
        at = self.headers_at if self.reported.prompt is not None else self.first_chunk_at
        return None if at is None else at - self.started_at

    @property
    def duration_s(self) -> float | None:
        """The seconds from request to the response's end, if that is shown."""
        return None if self.finished_at is None else self.finished_at - self.started_at


class Observer:
    """An observer of exchanges; each method is optional."""

    def asked(self, exchange: Exchange, headers: Mapping[str, str]) -> None:
        """Called before a request is decided."""

    def decided(self, exchange: Exchange) -> None:
        """Called when it has an endpoint (`decision`), a refusal, or neither: the picker answered it."""

    def ended(self, exchange: Exchange) -> None:
        """Called when no more data will come. Not called for requests that the picker answered without a refusal."""


class Observers(tuple[Observer, ...]):
    """All observers as one. Their errors are logged, and hold up no request."""

    __slots__ = ()

    def asked(self, exchange: Exchange, headers: Mapping[str, str]) -> None:
        """Call `asked` of each observer."""
        self._each(exchange, lambda observer: observer.asked(exchange, headers))

    def decided(self, exchange: Exchange) -> None:
        """Call `decided` of each observer."""
        self._each(exchange, lambda observer: observer.decided(exchange))

    def ended(self, exchange: Exchange) -> None:
        """Call `ended` of each observer."""
        self._each(exchange, lambda observer: observer.ended(exchange))

    def _each(self, exchange: Exchange, tell: Callable[[Observer], None]) -> None:
        for observer in self:
            try:
                tell(observer)
            except Exception:
                log.exception("request %s: %s failed", exchange.id, type(observer).__name__)


NO_OBSERVERS: Final = Observers()
