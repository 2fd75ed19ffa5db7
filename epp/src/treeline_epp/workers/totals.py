"""One page of metrics from several, over the lives of workers that come and go.

Counters and histograms add up, and never fall: those of a worker that does not answer are as it last told them, and
those of one that has ended stay in the sum. Gauges are of now, and only of those that answer: each counts its own
requests, and these add up; of what all see, the greatest is shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from treeline_epp.compat.series import OTHER

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
LEAST_GAUGES = frozenset({"treeline_epp_peers"})
"""It is what the worst of them knows that counts."""
_ENDPOINT_LABELS = frozenset({"endpoint", "endpoint_name", "pod_name"})
"""Of endpoints that come and go: what a worker that has ended knew of one that has gone is forgotten, too."""
_NO_ENDPOINTS = frozenset({"", OTHER})
"""Values of these labels that are no names."""

Key = tuple[str, tuple[tuple[str, str], ...]]


class Totals:
    """The sum so far."""

    def __init__(self) -> None:
        self._last: dict[int, list[Metric]] = {}
        self._past: list[Metric] = []

    def page(
        self, pages: Mapping[int, str], own: str, living: Collection[int], endpoints: Collection[str] | None = None
    ) -> bytes:
        """Of now: the pages of the workers that answer, by process, and the parent's own. `living`: all processes that
        are there; `endpoints`: the names of those that are, None where nobody says. Raises ValueError for what is no
        such page."""
        fresh = {pid: families(page) for pid, page in pages.items()}
        self._last |= {pid: [one for one in found if _lasts(one)] for pid, found in fresh.items()}
        ended = [pid for pid in self._last if pid not in living and pid not in fresh]
        self._past = merged([self._past, *(self._last.pop(pid) for pid in ended)])
        if endpoints is not None:
            there = _NO_ENDPOINTS.union(endpoints)
            for one in self._past:
                one.samples = [sample for sample in one.samples if there.issuperset(_endpoints(sample))]
        stale = [found for pid, found in self._last.items() if pid not in fresh]
        return rendered(merged([*fresh.values(), families(own), *stale, self._past]))


def families(page: str) -> list[Metric]:
    """Of a page in Prometheus' text form. Raises ValueError."""
    return list(text_string_to_metric_families(page))


def merged(told: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Each family and each series once."""
    known: dict[str, Metric] = {}
    values: dict[str, dict[Key, float]] = {}
    for found in told:
        for family in found:
            known.setdefault(family.name, family)
            sums = values.setdefault(family.name, {})
            for sample in family.samples:
                key = _key(sample)
                before = sums.get(key)
                sums[key] = sample.value if before is None else _both(family, before, sample.value)
    out = []
    for name, family in known.items():
        metric = Metric(name, family.documentation, family.type)
        metric.samples = [Sample(sample, dict(labels), value) for (sample, labels), value in values[name].items()]
        out.append(metric)
    return out


def rendered(found: Sequence[Metric]) -> bytes:
    """As a page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(found))
    return generate_latest(registry)


def _both(family: Metric, one: float, other: float) -> float:
    if family.type != "gauge" or family.name in SUMMED_GAUGES:
        return one + other
    return min(one, other) if family.name in LEAST_GAUGES else max(one, other)


def _lasts(family: Metric) -> bool:
    return family.type in ("counter", "histogram", "summary")


def _endpoints(sample: Sample) -> set[str]:
    return {value for label, value in sample.labels.items() if label in _ENDPOINT_LABELS}


def _key(sample: Sample) -> Key:
    return sample.name, tuple(sample.labels.items())


class _Fixed(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics

    def describe(self) -> Iterable[Metric]:
        return ()
