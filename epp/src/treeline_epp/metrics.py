"""The picker's metrics, in Prometheus' form. One object, one registry, no globals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

# Otherwise every counter would have a twin with its time of creation.
disable_created_metrics()  # type: ignore[no-untyped-call]

_PICK_BUCKETS = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.5)
_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)

MOST_CLIENTS = 100
"""Most clients with a label of their own: the first that ask. The page must stay readable even with many keys."""
OTHER_CLIENTS, NO_CLIENT = "other", ""

Sample = tuple[str, str, str, dict[str, str], float]
"""`(kind, name, help, labels, value)`; kind is "gauge" or "counter"; the name without the common prefix."""


class Metrics:
    """The picker's metrics. Each attribute is documented by its help text.

    State that has an owner elsewhere (tree, publishers, EDS) is read at each scrape: see `observe`.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry(auto_describe=False)
        self._clients: set[str] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"treeline_epp_{name}", text, labels, registry=registry)

        self.decisions = counter("decisions", "Requests sent to an endpoint, by endpoint.", "endpoint")
        self.refusals = counter("refusals", "Requests that the picker refused, by error code.", "code")
        self.outcomes = counter("outcomes", "Routed requests that ended, by how they ended.", "outcome")
        self.served_by_other = counter(
            "served_by_other",
            "Responses from another endpoint than the first choice: one of the fallback list, or any other.",
            "by",
        )
        self.predicted_hit_tokens = counter(
            "predicted_hit_tokens",
            "Prompt tokens that the picker expected to be cached, for requests whose runtime then reported.",
        )
        self.reported_hit_tokens = counter("reported_hit_tokens", "Prompt tokens that were cached, as runtimes report.")
        self.reported_prompt_tokens = counter("reported_prompt_tokens", "Prompt tokens, as runtimes report them.")
        self.routed_prompt_tokens = counter(
            "routed_prompt_tokens", "Prompt tokens of answered requests, as the picker counts or estimates them."
        )
        self.routed_held_tokens = counter("routed_held_tokens", "Prompt tokens of answered requests that were cached.")
        self.routed_loaded_tokens = counter(
            "routed_loaded_tokens",
            "Those of them that it had in host memory or on disk only, and not on its device.",
            "tier",
        )
        self.rewritten = counter("rewritten", "Requests sent on with another model name than the client's.")
        self.salted = counter("salted", "Requests to whose body the cache salt of their client was added.")
        self.client_requests = counter(
            "client_requests",
            f"Requests by the name of their API key, for the first {MOST_CLIENTS} names; empty without keys.",
            "client",
        )
        self.client_prompt_tokens = counter(
            "client_prompt_tokens", "Prompt tokens that runtimes reported, by the name of the API key.", "client"
        )
        self.bounded_prompts = counter(
            "bounded_prompts", "Requests whose prompt was so long that only its beginning was used for routing."
        )
        self.protocol_errors = counter("protocol_errors", "ext_proc streams that broke the protocol.")
        self.internal_errors = counter("internal_errors", "Requests that failed because of a defect in the picker.")
        self.pick_seconds = Histogram(
            "treeline_epp_pick_seconds",
            "Seconds to parse a request, look up its prefix and choose an endpoint.",
            buckets=_PICK_BUCKETS,
            registry=registry,
        )
        text = "Seconds from the choice of an endpoint to the first token, for streams of Treeline runtimes."
        self.ttft_seconds = Histogram("treeline_epp_ttft_seconds", text, buckets=_TTFT_BUCKETS, registry=registry)
        text = "seconds to the first token by form, whole, apart or pull, of streams of Treeline runtimes."
        self.form_predicted_seconds = counter("form_predicted_seconds", f"Predicted {text}", "form")
        self.form_seconds = counter("form_seconds", f"Real {text}", "form")
        self.open_streams = 0
        self.observe(lambda: [("gauge", "extproc_streams", "Open ext_proc streams.", {}, self.open_streams)])
        self.ready = Gauge("treeline_epp_extproc_ready", "1 while the ext_proc port serves, else 0.", registry=registry)

    def decided(self, endpoint: str) -> None:
        """Count a request that was given this endpoint."""
        self.decisions.labels(endpoint).inc()

    def asked(self, client: str | None) -> None:
        """Count a client's request."""
        self.client_requests.labels(self._client(client)).inc()

    def computed(self, client: str | None, prompt_tokens: int) -> None:
        """Count a prompt of this client that a runtime reported."""
        self.client_prompt_tokens.labels(self._client(client)).inc(prompt_tokens)

    def _client(self, client: str | None) -> str:
        if client is None:
            return NO_CLIENT
        if client not in self._clients:
            if len(self._clients) >= MOST_CLIENTS:
                return OTHER_CLIENTS
            self._clients.add(client)
        return client

    def forget(self, endpoint: str) -> None:
        """Drop the labels of an endpoint that has gone for good: labels must not pile up."""
        self.decisions.remove(endpoint)

    def ended(self, outcome: str) -> None:
        """Count a routed request by its outcome."""
        self.outcomes.labels(outcome).inc()

    def observe(self, read: Callable[[], Iterable[Sample]]) -> None:
        """Add gauges and counters that are read from their owner on every scrape."""
        self.registry.register(_Observed(read))

    def render(self) -> bytes:
        """Return the page that a scrape gets."""
        return generate_latest(self.registry)


class _Observed(Collector):
    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for kind, name, text, labels, value in self._read():
            family = families.get(name)
            if family is None:
                make = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
                family = families[name] = make(f"treeline_epp_{name}", text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
        return iter(families.values())

    def describe(self) -> Iterator[Metric]:
        return iter(())
