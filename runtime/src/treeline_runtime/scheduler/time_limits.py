"""Requests that waited, or took, longer than they may."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from treeline_runtime.core import Req
from treeline_runtime.messages import FinishReason


class TimeLimits:
    """Two limits in seconds, each of them None for none. All requests have the same ones, so the oldest is the first
    to exceed them, and nothing is looked at behind one that does not."""

    def __init__(self, waiting_s: float | None, total_s: float | None) -> None:
        self._waiting_s = waiting_s
        self._total_s = total_s
        self._came: OrderedDict[Req, float] = OrderedDict()
        self._waiting: OrderedDict[Req, float] = OrderedDict()
        """Those that have not begun, and some that have: it is looked at when they would have waited too long."""

    def begin(self, req: Req, now: float) -> None:
        """It has come, and waits: for its grammar, or for its turn."""
        if self._total_s is not None:
            self._came[req] = now
        if self._waiting_s is not None:
            self._waiting[req] = now

    def end(self, req: Req) -> None:
        """Idempotent."""
        self._came.pop(req, None)
        self._waiting.pop(req, None)

    def exceeded(self, now: float) -> list[tuple[Req, FinishReason]]:
        """Who is to end now, each once."""
        found = dict(self._took_too_long(now))
        for req, finish in self._waited_too_long(now):
            found.setdefault(req, finish)
        return list(found.items())

    def _took_too_long(self, now: float) -> Iterator[tuple[Req, FinishReason]]:
        if self._total_s is None:
            return
        message = f"the request took longer than {self._total_s:g} s, the limit of this server (--request-timeout)"
        for req, came in self._came.items():
            if now - came < self._total_s:
                break
            yield req, FinishReason("error", message=message, status=504)

    def _waited_too_long(self, now: float) -> Iterator[tuple[Req, FinishReason]]:
        if self._waiting_s is None:
            return
        message = f"the request has waited for {self._waiting_s:g} s, and the server is too busy to begin it"
        begun = list[Req]()
        for req, came in self._waiting.items():
            if now - came < self._waiting_s:
                break
            if req.begun:
                begun.append(req)
            else:
                yield req, FinishReason("error", message=message, status=503)
        for req in begun:
            del self._waiting[req]
