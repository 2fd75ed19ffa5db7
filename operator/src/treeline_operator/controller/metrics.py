"""The operator's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from treeline_operator.controller.queue import Outcome
from treeline_operator.world import Key, Ref

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics(Collector):
    """The operator's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "treeline_operator", "registry": self.registry}
        self._reconciles = Counter(
            "reconciles", "Reconciliations that ended, by kind and result.", ("kind", "result"), **own
        )
        self._ran = Histogram(
            "reconcile_seconds", "Seconds that a reconciliation took, by kind.", ("kind",), buckets=_SECONDS, **own
        )
        self._waited = Histogram(
            "queue_wait_seconds",
            "Seconds that a pool or model waited for a worker, by kind.",
            ("kind",),
            buckets=_SECONDS,
            **own,
        )
        self._retries = Counter("retries", "Reconciliations that failed and will be tried again.", ("kind",), **own)
        self._requests = Counter(
            "api_requests",
            "Requests to the API server; code 0 means that no answer came.",
            ("verb", "resource", "code"),
            **own,
        )
        self._request_seconds = Histogram(
            "api_request_seconds", "Seconds that requests to the API server took.", ("verb",), buckets=_SECONDS, **own
        )
        self._drift = Counter(
            "drift_corrected", "Objects that somebody else had changed and that were set right.", ("kind",), **own
        )
        self._dropped = Counter(
            "events_dropped", "Kubernetes Events that were not written, by reason.", ("why",), **own
        )
        self._leader = Gauge("is_leader", "1 in the replica that holds the Lease and acts, else 0.", **own)
        self._conditions: dict[Ref, list[tuple[str, str, str]]] = {}
        self.leads(False)
        self.registry.register(self)

    def finished(self, key: Key, outcome: Outcome, waited_s: float, ran_s: float) -> None:
        """A reconciliation ended; one that failed comes again."""
        if outcome.retry:
            self._retries.labels(key.kind).inc()
        self._reconciles.labels(key.kind, outcome.result).inc()
        self._ran.labels(key.kind).observe(ran_s)
        self._waited.labels(key.kind).observe(waited_s)

    def requested(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """One request to the API server was answered, or was not."""
        self._requests.labels(verb, resource, str(code)).inc()
        self._request_seconds.labels(verb).observe(seconds)

    def drifted(self, kind: str) -> None:
        """A manual change to an object was reverted."""
        self._drift.labels(kind).inc()

    def dropped(self, why: str) -> None:
        """An Event was not written."""
        self._dropped.labels(why).inc()

    def leads(self, leader: bool) -> None:
        """Whether this replica leads; others report nothing of pools and queues."""
        self._leader.set(leader)
        if not leader:
            self._conditions.clear()
            self.depth: Callable[[], int] = lambda: 0
            self.oldest: Callable[[], float] = lambda: 0.0
            self.watch_ages: Callable[[], Mapping[str, float]] = dict
            self.objects: Callable[[], int] = lambda: 0

    def conditions(self, ref: Ref, conditions: Iterable[Mapping[str, Any]]) -> None:
        """The present conditions of one of our objects; none if it is gone."""
        said = [(c["type"], c["status"], c["reason"]) for c in conditions]
        if said:
            self._conditions[ref] = said
        else:
            self._conditions.pop(ref, None)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Values read at scrape time."""
        yield GaugeMetricFamily(
            "treeline_operator_queue_depth", "Pools and models that wait for a worker.", self.depth()
        )
        yield GaugeMetricFamily(
            "treeline_operator_queue_oldest_seconds",
            "Seconds that the oldest waiting pool or model has waited.",
            self.oldest(),
        )
        yield GaugeMetricFamily("treeline_operator_objects", "Kubernetes objects in memory.", self.objects())
        ages = GaugeMetricFamily(
            "treeline_operator_watch_age_seconds",
            "Seconds since the API server last sent anything about a kind.",
            labels=["kind"],
        )
        for kind, age in self.watch_ages().items():
            ages.add_metric([kind], age)
        yield ages
        conditions = GaugeMetricFamily(
            "treeline_operator_conditions",
            "Conditions of pools and models, each 1 while it is as its labels say.",
            labels=["kind", "namespace", "name", "type", "status", "reason"],
        )
        for ref, all_said in sorted(self._conditions.items()):
            for said in all_said:
                conditions.add_metric([ref.kind, ref.namespace, ref.name, *said], 1)
        yield conditions

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)
