"""One page made of the workers' pages: metrics are summed, everything else is as one of them says it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from urllib.parse import urlencode

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from treeline_epp.admin import Handler, Page, PageServer
from treeline_epp.workers.link import Status

log = logging.getLogger(__name__)

_PATIENCE_S = 3.0
_PROBE_S = 0.5
"""For a probe, which has little patience itself."""
_MOST_BYTES = 64 << 20
SUMMED_GAUGES = frozenset(
    {
        "treeline_epp_extproc_streams",
        "treeline_epp_flow_band_requests",
        "treeline_epp_flow_held_bytes",
        "treeline_epp_flow_held_requests",
        "treeline_epp_flow_held_uncached_tokens",
        "treeline_epp_pool_held_requests",
        "treeline_epp_pool_missed_requests",
        "treeline_epp_waiting_body_bytes",
        "treeline_epp_workers",
        "inference_objective_running_requests",
        "llm_d_epp_extproc_streams_inflight",
        "llm_d_epp_request_running",
    }
)
"""Gauges of which each worker has a part: the requests that it has itself. Of all others each worker has the whole, and
the greatest is shown: of the same endpoints, publishers and trees a second look does not make twice as many.
`treeline_epp_peer_requests`, too: what the others of a worker have in flight is what other workers have, for the most
part."""
DEBUG_PAGES = ("/debug/endpoints", "/debug/tree")
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def summed(pages: Iterable[str]) -> bytes:
    """One page of metrics from several. Raises ValueError for what is no such page."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            families.setdefault(family.name, family)
            known = values.setdefault(family.name, {})
            greatest = family.type == "gauge" and family.name not in SUMMED_GAUGES
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                before = known.get(key, 0.0)
                known[key] = max(before, sample.value) if greatest else before + sample.value
    found = []
    for name, family in families.items():
        metric = Metric(name, family.documentation, family.type)
        metric.samples = [Sample(sample, dict(labels), value) for (sample, labels), value in values[name].items()]
        found.append(metric)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(found))
    return generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics

    def describe(self) -> Iterable[Metric]:
        return ()


class Pages:
    """Asks the workers. `statuses` are what they last said, `own` the parent's own metrics."""

    def __init__(self, statuses: Callable[[], Iterable[Status]], own: Callable[[], bytes]) -> None:
        self._statuses = statuses
        self._own = own

    async def metrics(self, _query: Mapping[str, str]) -> Page:
        """The sum of those that answer."""
        ports = [status.metrics_port for status in self._statuses() if status.metrics_port]
        async with _client(_PATIENCE_S) as http:
            found = await asyncio.gather(*(_get(http, port, "/metrics") for port in ports))
        pages = [body.decode() for status, body, _ in filter(None, found) if status == 200]
        # Beside the loop, which answers EDS and health: with a thousand endpoints it takes a good part of a second.
        return Page(await asyncio.to_thread(summed, [*pages, self._own().decode()]), content_type=_TEXT)

    def admin(self, ready: Callable[[], bool], *, debug: bool) -> PageServer:
        """The admin port: what is asked of all is answered here, what any of them knows by one."""

        async def is_ready(query: Mapping[str, str]) -> Page:
            page = await self.of_one("/ready", _PROBE_S)(query)
            if ready():
                return Page(page.body if page.status == 200 else {"ready": True}, content_type=page.content_type)
            return Page(page.body if page.status == 503 else {"ready": False}, 503, page.content_type)

        pages: dict[str, Handler] = {
            "/ready": is_ready,
            "/live": lambda _query: Page({"live": True}),
            "/endpoints": self.of_one("/endpoints"),
        }
        private = {path: self.of_one(path) for path in (DEBUG_PAGES if debug else ())}
        return PageServer(pages | private, private=private)

    def of_one(self, path: str, patience_s: float = _PATIENCE_S) -> Callable[[Mapping[str, str]], Awaitable[Page]]:
        """The page as the first that answers has it, those that are ready before others."""

        async def page(query: Mapping[str, str]) -> Page:
            statuses = sorted(self._statuses(), key=lambda status: not status.ready)
            words = f"{path}?{urlencode(query)}" if query else path
            async with _client(patience_s) as http:
                for port in (status.admin_port for status in statuses if status.admin_port):
                    if (found := await _get(http, port, words)) is not None:
                        status, body, content_type = found
                        return Page(body, status, content_type)
            return Page({"error": "no worker answers"}, 503)

        return page


def _client(patience_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience_s), auto_decompress=False)


async def _get(http: aiohttp.ClientSession, port: int, path: str) -> tuple[int, bytes, str] | None:
    try:
        async with http.get(f"http://127.0.0.1:{port}{path}") as answer:
            body = await answer.content.read(_MOST_BYTES)
            while not answer.content.at_eof() and len(body) < _MOST_BYTES:
                body += await answer.content.read(_MOST_BYTES - len(body))
            return answer.status, body, answer.headers.get("content-type", "")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        log.warning("a worker does not answer %s: %s", path.partition("?")[0], error)
        return None
