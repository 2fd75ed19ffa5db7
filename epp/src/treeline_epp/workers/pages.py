"""The pages of a picker with workers: each worker is asked, and their answers are made one (`merging.py`, `totals.py`).

A worker that does not answer is named on the page (`unanswered`), and not waited for beyond the page's patience.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from treeline_wire.signals import CONTENT_TYPE, PATH, Signals, decode

from treeline_epp import debug_pages, signals
from treeline_epp.admin import Handler, Page, PageServer, Question, Stream
from treeline_epp.console.pages import ALWAYS, DATA, PAGE, page_of
from treeline_epp.metrics import Sample
from treeline_epp.options import Options
from treeline_epp.workers import merging
from treeline_epp.workers.asking import Asking, Told, metrics_port, unanswered
from treeline_epp.workers.merging import Said
from treeline_epp.workers.team import Place
from treeline_epp.workers.totals import Totals

_QUICK_S = 0.5
"""For a probe, which has little patience itself, and for signals, which come several times a second."""
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_NOBODY = {"error": "no worker answers"}


class Pages:
    """What the metrics port and the admin port of the parent serve. `own` are the parent's own metrics."""

    def __init__(self, places: Callable[[], Sequence[Place]], own: Callable[[], bytes]) -> None:
        self._places = places
        self._asking = Asking(places)
        self._own = own
        self._totals = Totals()
        self._summing = asyncio.Lock()
        self._unanswered = 0

    def samples(self) -> Iterator[Sample]:
        """For the metrics page."""
        text = "Workers that are not in this page's gauges, and with what they last told in its counters."
        yield "gauge", "workers_unanswered", text, {}, self._unanswered

    async def metrics(self, _query: Mapping[str, str]) -> Page:
        """The sum, over the lives of workers."""
        async with self._summing:  # each page is to be no less than the one before
            told, listed = await asyncio.gather(
                self._asking.all("/metrics", port=metrics_port), self._asking.all("/endpoints")
            )
            pages = {one.place.pid: _body(one).decode() for one in told if one.well}
            self._unanswered = len(told) - len(pages)
            living = {place.pid for place in self._places()}
            # Beside the loop, which answers EDS and health: with a thousand endpoints it takes a good part of a second.
            body = await asyncio.to_thread(self._totals.page, pages, self._own().decode(), living, _names(listed))
        return Page(body, content_type=_TEXT)

    def admin(self, ready: Callable[[], bool], options: Options) -> PageServer:
        """The admin port."""
        debug = options.enable_debug_endpoints
        token = secrets.token_urlsafe()
        public: dict[str, Handler] = {
            "/ready": partial(self._ready, ready),
            "/live": lambda _query: Page({"live": True}),
            "/endpoints": lambda query: self._merged("/endpoints", query, merging.listing),
        }
        private: dict[str, Handler] = {}
        questions: dict[str, Question] = {}
        if debug:
            console = page_of(token)
            private = {
                "/debug/endpoints": lambda query: self._merged("/debug/endpoints", query, merging.described),
                "/debug/tree": lambda query: self._merged("/debug/tree", query, merging.tree),
                debug_pages.DECISIONS: self._decisions,
                PAGE: lambda _query: console,
                DATA: self._console,
            }
            questions = {debug_pages.EXPLAIN: self._explain}
        return PageServer(
            public | private,
            private=[*private, *questions],
            token=token,
            streams={PATH: Stream(lambda: signals.stream(self._demand), CONTENT_TYPE)},
            questions=questions,
            question_bytes=debug_pages.question_bytes(options),
        )

    async def _ready(self, ready: Callable[[], bool], query: Mapping[str, str]) -> Page:
        """With what one of them that agrees has to say of it."""
        told = await self._asking.all("/ready", query, patience_s=_QUICK_S)
        status = 200 if ready() else 503
        body: dict[str, Any] = next(
            (_json(one) for one in told if one.page is not None and one.page.status == status), {}
        )
        return Page({**body, "ready": ready(), **_missing(told)}, status)

    def _decisions(self, query: Mapping[str, str]) -> Awaitable[Page]:
        def merge(said: Said) -> dict[str, Any]:
            return merging.decisions(said, int(query.get("last", debug_pages.LAST)))

        return self._merged(debug_pages.DECISIONS, query, merge)

    async def _console(self, query: Mapping[str, str]) -> Page:
        found = await self._merged(DATA, lambda place: merging.console_query(query, place), merging.console)
        return msgspec.structs.replace(found, headers=ALWAYS)

    async def _explain(self, body: bytes) -> Page:
        return await self._merged(debug_pages.EXPLAIN, {}, merging.explained, body=body)

    async def _demand(self) -> Signals:
        told = await self._asking.all(signals.NOW, patience_s=_QUICK_S)
        return merging.demand([decode(_body(one)) for one in told if one.well], partial=not all(t.well for t in told))

    async def _merged(
        self,
        path: str,
        query: Mapping[str, str] | Callable[[Place], Mapping[str, str]],
        merge: Callable[[Said], dict[str, Any]],
        *,
        body: bytes | None = None,
    ) -> Page:
        """The page of those that have it; where none has, what one of them says of that."""
        told = await self._asking.all(path, query, body=body)
        said = [(one.place, _json(one)) for one in told if one.well]
        if said:
            return Page({**merge(said), **_missing(told)})
        refused = next((one.page for one in told if one.page is not None), None)
        return refused or Page({**_NOBODY, **_missing(told)}, 503)


def _names(listed: Sequence[Told]) -> set[str] | None:
    """Of the endpoints that any worker knows; None where none has heard of all of them yet."""
    pages = [page for one in listed if one.well and (page := _json(one))["synced"]]
    if not pages:
        return None
    return {one["name"] for page in pages for pool in page["pools"].values() for one in pool["endpoints"]}


def _missing(told: Sequence[Told]) -> dict[str, object]:
    missing = unanswered(told)
    return {"unanswered": missing} if missing else {}


def _json(told: Told) -> Any:
    return msgspec.json.decode(_body(told))


def _body(told: Told) -> bytes:
    assert told.page is not None
    assert isinstance(told.page.body, bytes)
    return told.page.body
