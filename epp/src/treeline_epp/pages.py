"""What the metrics port and the admin port of a picker serve."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from treeline_wire.signals import CONTENT_TYPE, PATH, Signals

from treeline_epp import debug_pages, fleet_report, signals
from treeline_epp.admin import Handler, Page, PageServer, Question, Stream
from treeline_epp.console.pages import console_pages
from treeline_epp.fleet import Fleet
from treeline_epp.flow.quota_file import QuotaFile
from treeline_epp.health import Health
from treeline_epp.observing import Observing
from treeline_epp.options import Options
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.decision_log import DecisionLog
from treeline_epp.requests.router import Router

if TYPE_CHECKING:
    from treeline_epp.kube.source import KubernetesSource


def metrics_pages(observing: Observing) -> PageServer:
    """What Prometheus reads."""
    page = "text/plain; version=0.0.4; charset=utf-8"
    return PageServer({"/metrics": lambda _query: Page(observing.page(), content_type=page)})


def demand_of(router: Router, fleet: Fleet) -> Callable[[], Signals]:
    """What the demand for each pool is now."""

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
    quotas: QuotaFile | None = None,
) -> PageServer:
    """What the kubelet, the operator and whoever looks for a fault read."""
    token = secrets.token_urlsafe()

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
    questions: Mapping[str, Question] = {}
    if options.enable_debug_endpoints:
        debug["/debug/endpoints"] = lambda _query: Page({"endpoints": fleet_report.describe(fleet)})
        if quotas is not None:
            debug["/debug/quotas"] = lambda _query: Page(quotas.describe())
        debug["/debug/tree"] = lambda query: _tree(fleet.picker, query.get("pod"))
        router.decisions = decisions = DecisionLog()
        debug |= console_pages(fleet, decisions, token=token, texts=options.show_prompts)
        debug |= debug_pages.decisions(decisions, prompts=options.show_prompts)
        questions = debug_pages.questions(router)
    return PageServer(
        public | debug,
        private=[*debug, *questions],
        token=token,
        streams={PATH: Stream(lambda: signals.stream(look), CONTENT_TYPE)},
        questions=questions,
        question_bytes=debug_pages.question_bytes(options),
    )


def _tree(picker: Picker, name: str | None) -> Page:
    if name is None:
        return Page({"totals": picker.index.totals(), "pods": sorted(picker.endpoints)})
    endpoint = picker.endpoints.get(name)
    if endpoint is None:
        return Page({"error": f"no endpoint {name!r}", "pods": sorted(picker.endpoints)}, 404)
    blocks = set().union(*(picker.index.blocks_of(pod) for pod in endpoint.pods))
    return Page({"pod": name, "blocks": [str(block) for block in sorted(blocks)]})
