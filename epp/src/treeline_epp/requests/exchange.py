"""A request and its response as far as the proxy shows them, for its observers: metrics, usage, traces.

None is made where there are no observers. They are called three times: when a request is there to be decided, when it
is, and when its stream has ended. The router owns an exchange; the session adds what the response brings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from treeline_epp.picking.decision import Decision
from treeline_epp.requests.body import Buffer
from treeline_epp.requests.refusals import Refusal
from treeline_epp.requests.usage import NOTHING, Usage, UsageReader

log = logging.getLogger(__name__)


class Exchange:
    """One request. Times are the router's clock in seconds, but for `wall_time`.

    `model` is what the client asked for, and `target` its name at the endpoint; both are empty while no pool is known
    that serves it: they are safe to count by. `status` is that of the response, or of the refusal. `finished_at` is
    known where the proxy shows the response to its end, `first_chunk_at` where it shows its body. `observed`: the proxy
    only shows the request, and the decision was not used. `added` are request headers that go on to the endpoint.
    """

    __slots__ = (
        "_usage",
        "added",
        "body",
        "client",
        "decided_at",
        "decision",
        "finished_at",
        "first_chunk_at",
        "flow",
        "headers_at",
        "id",
        "model",
        "observed",
        "path",
        "priority",
        "refusal",
        "reported_cached",
        "reported_prompt",
        "request_bytes",
        "served",
        "shows_body",
        "started_at",
        "status",
        "streams",
        "target",
        "wall_time",
    )

    def __init__(self, id: str, path: str, client: str | None, flow: str, request_bytes: int, now: float) -> None:
        self.id = id
        self.path = path
        self.client = client
        self.flow = flow
        self.request_bytes = request_bytes
        self.wall_time = time.time()
        self.started_at = now
        self.decided_at = now
        self.model = ""
        self.target = ""
        self.priority = 0
        self.decision: Decision | None = None
        self.refusal: Refusal | None = None
        self.added: list[tuple[str, str]] = []
        self.status: int | None = None
        self.served: str | None = None
        self.streams = False
        self.shows_body = False
        self.observed = False
        self.reported_prompt: int | None = None
        self.reported_cached: int | None = None
        self.headers_at: float | None = None
        self.first_chunk_at: float | None = None
        self.finished_at: float | None = None
        self.body: UsageReader | None = None
        """Of the response, once that has begun."""
        self._usage: Usage | None = None

    def answered(self, headers: Mapping[str, str], served: str | None, now: float) -> None:
        """The response's headers are there."""
        self.headers_at = now
        self.served = served
        status = headers.get(":status", "")
        self.status = int(status) if len(status) == 3 and status.isascii() and status.isdecimal() else None
        self.streams = headers.get("content-type", "").startswith("text/event-stream")
        self.body = UsageReader(stream=self.streams)

    def chunk(self, data: Buffer, now: float) -> None:
        """A piece of the response's body. O(1) but for the copy of what is kept of it."""
        if not data:
            return
        if self.first_chunk_at is None:
            self.first_chunk_at = now
        if self.body is not None:
            self.body.feed(data)

    @property
    def response_bytes(self) -> int:
        """Of the response's body, as far as it was shown."""
        return 0 if self.body is None else self.body.bytes

    def finish(self, now: float) -> None:
        """The response was shown to its end."""
        if self.finished_at is None:
            self.finished_at = now

    @property
    def usage(self) -> Usage:
        """Tokens by the response's own word, in its headers (ours) or its body; None where it does not say."""
        if self._usage is None:
            read = NOTHING if self.finished_at is None or self.body is None else self.body.told()
            self._usage = Usage(self.reported_prompt, self.reported_cached).over(read)
        return self._usage

    @property
    def ttft_s(self) -> float | None:
        """From request to first token, of streams alone: when their headers came where these come with the first token
        (runtimes of Treeline), else when the first of their body did; None where the proxy does not show it."""
        if not self.streams:
            return None
        at = self.headers_at if self.reported_prompt is not None else self.first_chunk_at
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


class Observers:
    """All of them. What one fails on is logged, and holds up no request."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

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
        for observer in self._observers:
            try:
                tell(observer)
            except Exception:
                log.exception("request %s: %s failed", exchange.id, type(observer).__name__)


NO_OBSERVERS: Final = Observers()
DEFAULT_FLOW: Final = "default-flow"
"""Of requests that name no other, as GIE calls it."""
