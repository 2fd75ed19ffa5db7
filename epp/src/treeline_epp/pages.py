"""The pages of the picker's metrics port and admin port."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
from treeline_wire.signals import CONTENT_TYPE, PATH, Signals

from treeline_epp import fleet_report, signals
from treeline_epp.admin import Handler, Page, PageServer, Question, Stream
from treeline_epp.console.pages import DATA, console_pages
from treeline_epp.console.series import Series
from treeline_epp.explain_api import DECISIONS, EXPLAIN, Asked
from treeline_epp.fleet import Fleet
from treeline_epp.health import Health
from treeline_epp.observing import Observing
from treeline_epp.options import Options
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.body import Body, RouteRequest
from treeline_epp.requests.content import hash_contents
from treeline_epp.requests.decision_log import KEPT, DecisionLog
from treeline_epp.requests.exchange import Observers
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.parse import is_large
from treeline_epp.requests.router import Router

if TYPE_CHECKING:
    from treeline_epp.kube.source import KubernetesSource


LAST = "20"
"""Number of decisions that are shown, if the query names none."""
_MOST_BODY_BYTES = 4 << 20


def debug_pages(fleet: Fleet, log: DecisionLog) -> dict[str, Handler]:
    """Return the pages for people who look for a fault; no prompt is on them. The console is separate."""
    return {
        "/debug/endpoints": lambda _query: Page({"endpoints": fleet_report.describe(fleet)}),
        "/debug/tree": lambda query: _tree(fleet.picker, query.get("pod")),
        DECISIONS: lambda query: decisions_page(log, query),
    }


def decisions_page(log: DecisionLog, query: Mapping[str, str]) -> Page:
    """Return the last decisions."""
    last = query.get("last", LAST)
    if not (last.isascii() and last.isdecimal() and len(last) < 6):
        return Page({"error": f"last={last[:20]!r} is not a number of decisions (at most {KEPT} are kept)"}, 400)
    return Page({"decisions": log.listing(int(last))})


def question_bytes(options: Options) -> int:
    """Return the size of the largest question: a body in base64, and its frame. Other tasks wait while it is parsed."""
    return min(options.max_body_bytes, _MOST_BODY_BYTES) * 4 // 3 + (1 << 16)


def explain_page(router: Router, data: bytes) -> Page:
    """Answer a POST."""
    try:
        asked = msgspec.json.decode(data, type=Asked)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Page({"error": f"not a question: {error}; it is {{path, body (base64), headers}}"}, 400)
    headers = {name.lower(): value for name, value in asked.headers.items()}
    headers |= {":path": asked.path, ":method": "POST" if asked.body else "GET"}
    request = RouteRequest(headers, asked.body or None, None)
    outline: Outline | None = None
    if request.body is not None and is_large(request.body):
        body = Body([asked.body])
        request, outline = msgspec.structs.replace(request, body=body), Outline()
        for piece in body.pieces():
            outline.feed(piece)
        outline.finish(body)
        for _ in hash_contents(body, outline):
            pass
    return Page(router.explain(request, outline))


def metrics_pages(observing: Observing) -> PageServer:
    """Return the server of Prometheus' page."""
    page = "text/plain; version=0.0.4; charset=utf-8"
    return PageServer({"/metrics": lambda _query: Page(observing.page(), content_type=page)})


def demand_of(router: Router, fleet: Fleet) -> Callable[[], Signals]:
    """Return a function that reads the present demand for each pool."""

    def look() -> Signals:
        pools, endpoints = fleet.registry.models_by_pool(), fleet.picker.endpoints.values()
        return signals.picture(router.demand, endpoints, pools, time.monotonic(), synced=fleet.discovered.is_set())

    return look


def admin_pages(
    options: Options,
    health: Health,
    fleet: Fleet,
    router: Router,
    kube: KubernetesSource | None,
    look: Callable[[], Signals],
) -> PageServer:
    """Return the server for the kubelet, the operator and people who look for a fault."""

    def detail() -> dict[str, object]:
        return {} if kube is None else {"kubernetes": kube.describe()}

    def ready(_query: Mapping[str, str]) -> Page:
        return Page({"ready": health.ready, **detail()}, 200 if health.ready else 503)

    public: dict[str, Handler] = {
        "/ready": ready,
        "/live": lambda _query: Page({"live": True}),
        signals.NOW: lambda _query: Page(look()),
        "/endpoints": lambda _query: Page({**fleet_report.listing(fleet), "detail": detail()}),
    }
    debug: dict[str, Handler] = {}
    questions: dict[str, Question] = {}
    console: dict[str, Handler] = {}
    if options.console or options.enable_debug_endpoints:
        router.decisions, series = DecisionLog(), Series()
        router.observers = Observers([*router.observers, series])
        console = console_pages(fleet, router.decisions, series, texts=options.show_prompts)
        if options.enable_debug_endpoints:
            debug = debug_pages(fleet, router.decisions)
            questions = {EXPLAIN: lambda data: explain_page(router, data)}
    return PageServer(
        public | debug | console,
        private=[*debug, *questions, DATA],
        own=console,
        streams={PATH: Stream(lambda: signals.stream(look), CONTENT_TYPE)},
        questions=questions,
        question_bytes=question_bytes(options),
    )


def _tree(picker: Picker, name: str | None) -> Page:
    if name is None:
        return Page({"totals": picker.index.totals(), "pods": sorted(picker.endpoints)})
    endpoint = picker.endpoints.get(name)
    if endpoint is None:
        return Page({"error": f"no endpoint {name!r}", "pods": sorted(picker.endpoints)}, 404)
    blocks = set().union(*(picker.index.blocks_of(pod) for pod in endpoint.pods))
    return Page({"pod": name, "blocks": [str(block) for block in sorted(blocks)]})
