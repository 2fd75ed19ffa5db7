"""Metrics under GIE 1.5's names, for dashboards, alerts and autoscalers made for them.

A figure that the picker does not know has no series, never a zero. Labels that clients or pods choose have bounded sets
of values. The bounds of buckets are GIE's, spelling mistakes included, so that quantiles of dashboards stay comparable.

One thread, the event loop's, counts everything and also renders the page, in Prometheus' text format 0.0.4:
prometheus_client takes some twenty times as long for a histogram, and the loop waits.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.utils import floatToGoString

from treeline_epp.endpoints.spec import split_address
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.score import Candidate
from treeline_epp.requests.exchange import Exchange, Observer

OTHER = "other"
MOST_SETS = 100
"""Most sets of labels. Each has some 300 lines, and the loop waits while they are written."""
_MOST_ATTEMPTS = 10_000
"""Most pairs of a model and an endpoint; later ones count as `OTHER`."""
_LONGEST = 256
"""Most characters of a label; a longer one is `OTHER`."""

_HOUR: tuple[float, ...] = (0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0)
_HOUR += (6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0)
_HOUR += (1200.0, 1800.0, 2700.0, 3600.0)
_TPOT: tuple[float, ...] = (0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3)
_TPOT += (0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 12.0, 18.0, 24.0, 30.0, 36.0, 48.0, 60.0, 90.0)
_TPOT += (120.0, 180.0, 270.0, 360.0)
_NTPOT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BYTES = tuple(float(1 << power) for power in range(6, 31))
_OUT = (1.0, *(float(1 << power) for power in range(3, 14)))
_OUT_BYTES = (*_OUT, 16384.0, 32778.0, 65536.0)
_IN = (*_OUT_BYTES, 131072.0, 262144.0, 524288.0, 1048576.0)
_SCHEDULING = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_HIT_BYTES = (0.0, *(float(1 << power) for power in range(4, 17)))
_RATIO = tuple(tenth / 10 for tenth in range(11))


def _looked_up(exchange: Exchange) -> Candidate | None:
    """Return the chosen endpoint's candidate, or None if the prompt was not looked up."""
    decision = exchange.decision
    return None if decision is None or decision.request.key is None else decision.best.candidate


def _hit_ratio(exchange: Exchange) -> float | None:
    """Return the share of the prompt that the chosen endpoint is believed to hold."""
    best = _looked_up(exchange)
    return None if best is None else min(1.0, best.cached_tokens / max(1, best.cached_tokens + best.uncached_tokens))


def _hit_bytes(exchange: Exchange) -> float | None:
    """Return the bytes of prompt text that the chosen endpoint is believed to hold."""
    best = _looked_up(exchange)
    return None if best is None else best.hit.reach


def _tpot(exchange: Exchange) -> float | None:
    """Return the seconds per output token after the first of a stream."""
    duration, ttft, output = exchange.duration_s, exchange.ttft_s, exchange.usage.output
    if duration is None or ttft is None or output is None or output < 2:
        return None
    return max(0.0, duration - ttft) / (output - 1)


def _ntpot(exchange: Exchange) -> float | None:
    duration, output = exchange.duration_s, exchange.usage.output
    return None if duration is None or not output else duration / output


class Row(NamedTuple):
    """A histogram over requests: `read` returns a request's value (None: not counted), by upper `bounds`."""

    name: str
    help: str
    read: Callable[[Exchange], float | None]
    bounds: tuple[float, ...]


_O = "inference_objective_"
REQUESTS = (
    Row(f"{_O}request_ttft_seconds", "Seconds to the first token of a stream.", lambda e: e.ttft_s, _HOUR),
    Row(f"{_O}request_tpot_seconds", "Seconds per output token after the first of a stream.", _tpot, _TPOT),
    Row(
        f"{_O}request_duration_seconds",
        "Seconds from a request to the end of its response.",
        lambda e: e.duration_s,
        _HOUR,
    ),
    Row(f"{_O}request_sizes", "Bytes of request bodies.", lambda e: e.request_bytes, _BYTES),
    Row(
        f"{_O}response_sizes",
        "Bytes of response bodies.",
        lambda e: None if e.finished_at is None else e.response_bytes,
        _OUT_BYTES,
    ),
    Row(f"{_O}input_tokens", "Prompt tokens, as the response says.", lambda e: e.usage.prompt, _IN),
    Row(f"{_O}output_tokens", "Output tokens, as the response says.", lambda e: e.usage.output, _OUT),
    Row(f"{_O}prompt_cached_tokens", "Cached prompt tokens, as the response says.", lambda e: e.usage.cached, _IN),
    Row(
        f"{_O}normalized_time_per_output_token_seconds",
        "Seconds of the whole request per output token.",
        _ntpot,
        _NTPOT,
    ),
)
"""Labels: `model_name`, `target_model_name`."""
_E = "inference_extension_"
CHOICES = (
    Row(
        f"{_E}scheduler_e2e_duration_seconds",
        "Seconds from a whole request to the choice of its endpoint.",
        lambda e: e.decided_at - e.started_at,
        _SCHEDULING,
    ),
    Row(
        f"{_E}prefix_indexer_hit_ratio",
        "Share of a prompt that the chosen endpoint has cached, by the picker's index.",
        _hit_ratio,
        _RATIO,
    ),
    Row(
        f"{_E}prefix_indexer_hit_bytes",
        "Bytes of a prompt that the chosen endpoint has cached, by the picker's index.",
        _hit_bytes,
        _HIT_BYTES,
    ),
)
"""Histograms over all requests that were decided. Without labels."""
ERRORS = {404: "NotFound", 429: "ResourceExhausted", 503: "ServiceUnavailable"}
"""Codes of the picker's refusals, by status; other 4xx are `BadRequest`, the rest `Internal`."""

Labels = tuple[str, ...]
_MODEL = ("model_name", "target_model_name")
_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Histogram:
    """Counts of one series by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value. O(log bounds)."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> str:
        """Return the samples as lines. `labels` is a result of `label_text`."""
        total, whole = 0, sum(self._counts)
        begin, rest = f'{name}_bucket{{{labels}{"," if labels else ""}le="', f"{{{labels}}}" if labels else ""
        found = []
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            found.append(f'{begin}{floatToGoString(bound)}"}} {total}\n')  # type: ignore[no-untyped-call]
        found.append(f'{begin}+Inf"}} {whole}\n{name}_count{rest} {whole}\n{name}_sum{rest} {self.sum!r}\n')
        return "".join(found)


def label_text(names: Sequence[str], values: Sequence[str]) -> str:
    """Return the labels as text, without the braces."""
    return ",".join(f'{name}="{value.translate(_ESCAPED)}"' for name, value in zip(names, values, strict=True))


def head(name: str, kind: str, text: str) -> str:
    """Return the HELP and TYPE lines of a metric; the help texts are ours."""
    return f"# HELP {name} [ALPHA] {text}\n# TYPE {name} {kind}\n"


def shown(name: str, kind: str, text: str, labels: Sequence[str], values: Mapping[Labels, float]) -> str:
    """Return a counter or gauge as text."""
    found = ((f"{{{label_text(labels, had)}}}" if labels else "", value) for had, value in values.items())
    return head(name, kind, text) + "".join(f"{name}{had} {value!r}\n" for had, value in found)


class GieMetrics(Observer):
    """The metrics under GIE's names. `namespace` is that of the pods, as a label."""

    def __init__(self, picker: Picker, namespace: str = "") -> None:
        self._picker = picker
        self._namespace = namespace
        self._sets: set[Labels] = set()
        self._requests: Counter[Labels] = Counter()
        self._errors: Counter[Labels] = Counter()
        self._attempts: Counter[Labels] = Counter()
        """By status, target, endpoint and port."""
        self._of_requests: dict[Labels, list[Histogram | None]] = {}
        self._of_choices: list[Histogram | None] = [None] * len(CHOICES)
        self._running: dict[Exchange, Labels] = {}
        self._shown: set[Labels] = set()
        """Labels of requests whose response the proxy shows: only they have running requests to count, 0 included."""

    def render(self) -> bytes:
        """Return the page that a scrape gets."""
        return "".join((*self._counters(), *self._histograms(), *self._of_pools())).encode()

    def forget(self, endpoint: str) -> None:
        """Drop the series of an endpoint that has gone for good."""
        for key in [key for key in self._attempts if key[2] == endpoint]:
            del self._attempts[key]

    def decided(self, exchange: Exchange) -> None:
        """Count the choice, and what is known of the request by then."""
        decision = exchange.decision
        if decision is None:
            if exchange.refusal is not None:
                self._attempts["failure", self._labels(exchange)[1], "", ""] += 1
            return
        labels, spec = self._labels(exchange), decision.endpoint
        attempt: Labels = "success", labels[1], spec.name, split_address(spec.address)[1]
        if attempt not in self._attempts and len(self._attempts) >= _MOST_ATTEMPTS:
            attempt = "success", OTHER, OTHER, ""
        self._attempts[attempt] += 1
        self._requests[labels] += 1
        _observe(CHOICES, self._of_choices, exchange)
        if exchange.shows_body:
            self._running[exchange] = labels
            self._shown.add(labels)

    def ended(self, exchange: Exchange) -> None:
        """Count what the response tells."""
        labels = self._running.pop(exchange, None) or self._labels(exchange)
        if exchange.observed:
            return
        model = labels[:2]
        if code := _error(exchange):
            self._errors[*model, code] += 1
        if exchange.refusal is not None:
            return
        _observe(REQUESTS, self._of_requests.setdefault(model, [None] * len(REQUESTS)), exchange)

    def _labels(self, exchange: Exchange) -> Labels:
        """Return model, target and priority, or `OTHER` for all three when there are `MOST_SETS` sets already."""
        found = exchange.model, exchange.target, str(exchange.priority)
        labels = tuple(value if len(value) <= _LONGEST else OTHER for value in found)
        if labels not in self._sets and len(self._sets) >= MOST_SETS:
            labels = (OTHER,) * 3
        self._sets.add(labels)
        return labels

    # The page

    def _counters(self) -> Iterator[str]:
        text = "Requests that got an endpoint."
        yield shown(f"{_O}request_total", "counter", text, (*_MODEL, "priority"), self._requests)
        text = "Requests that were refused, or that an engine answered with 400 or more."
        yield shown(f"{_O}request_error_total", "counter", text, (*_MODEL, "error_code"), self._errors)
        attempts: Counter[Labels] = Counter()
        for (status, target, endpoint, port), count in self._attempts.items():
            pod = endpoint.partition("-rank-")[0]
            attempts[status, target, pod, self._namespace if pod else "", port] += count
        names = ("status", "target_model_name", "pod_name", "namespace", "port")
        text = "Routing decisions, by result and by the endpoint that was chosen."
        yield shown(f"{_E}scheduler_attempts_total", "counter", text, names, attempts)
        running = Counter({labels[:1]: 0 for labels in self._shown})
        running.update(labels[:1] for labels in self._running.values())
        text = "Requests whose response has not ended, where the proxy shows responses."
        yield shown(f"{_O}running_requests", "gauge", text, _MODEL[:1], running)

    def _histograms(self) -> Iterator[str]:
        for rows, all_series in ((REQUESTS, self._of_requests), (CHOICES, {(): self._of_choices})):
            for at, row in enumerate(rows):
                yield head(row.name, "histogram", row.help)
                for labels, series in all_series.items():
                    if (one := series[at]) is not None:
                        yield one.lines(row.name, label_text(_MODEL[: len(labels)], labels))

    def _of_pools(self) -> Iterator[str]:
        pools: dict[str, list[Endpoint]] = {}
        for endpoint in self._picker.endpoints.values():
            pools.setdefault(endpoint.spec.pool, []).append(endpoint)
        now, pool_of = time.monotonic(), ("name",)
        for name, text, read in _LOADS:
            values = {(pool,): _known(endpoints, now, read).values() for pool, endpoints in pools.items()}
            means: dict[Labels, float] = {had: statistics.fmean(known) for had, known in values.items() if known}
            text = f"Mean over the endpoints that report it: {text}"
            yield shown(f"inference_pool_average_{name}", "gauge", text, pool_of, means)
        ready: dict[Labels, float] = {
            (pool,): len({one.spec.server for one in ends if one.eligible}) for pool, ends in pools.items()
        }
        yield shown("inference_pool_ready_pods", "gauge", "Endpoints that are ready for requests.", pool_of, ready)
        queues: dict[Labels, float] = {
            (pool, endpoint): value
            for pool, endpoints in pools.items()
            for endpoint, value in _known(endpoints, now, _waiting).items()
        }
        text, names = "Requests that wait at an endpoint.", ("name", "model_server_pod")
        yield shown("inference_pool_per_pod_queue_size", "gauge", text, names, queues)
        blocks: dict[Labels, float] = {(): self._picker.index.totals()["blocks"]}
        yield shown(f"{_E}prefix_indexer_size", "gauge", "Blocks in the prefix index.", (), blocks)


def _kv_usage(endpoint: Endpoint) -> float | None:
    """Return the share that running requests hold; None for Treeline's runtimes, which report cached pages, too."""
    report = endpoint.load.report
    if report is None or not report.tokens_total or endpoint.load.beats:
        return None
    return min(1.0, report.tokens_held / report.tokens_total)


def _waiting(endpoint: Endpoint) -> float | None:
    return None if endpoint.load.report is None else endpoint.load.report.waiting


def _running(endpoint: Endpoint) -> float | None:
    return None if endpoint.load.report is None else endpoint.load.report.running


_LOADS: tuple[tuple[str, str, Callable[[Endpoint], float | None]], ...] = (
    ("kv_cache_utilization", "share of the KV cache that running requests hold.", _kv_usage),
    ("queue_size", "requests that wait.", _waiting),
    ("running_requests", "requests that run.", _running),
)


def _known(endpoints: Sequence[Endpoint], now: float, read: Callable[[Endpoint], float | None]) -> dict[str, float]:
    """Return the values of endpoints that have reported lately, by name."""
    found = {one.spec.name: read(one) for one in endpoints if one.load.fresh(now)}
    return {name: value for name, value in found.items() if value is not None}


def _error(exchange: Exchange) -> str:
    """Return the error code to count; empty for a good answer or an unknown status."""
    status = exchange.status
    if status is None or status < 400:
        return ""
    if exchange.refusal is None:
        return "ModelServerError"
    return ERRORS.get(status, "BadRequest" if status < 500 else "Internal")


def _observe(rows: Sequence[Row], series: list[Histogram | None], exchange: Exchange) -> None:
    for at, row in enumerate(rows):
        if (value := row.read(exchange)) is not None:
            one = series[at] = series[at] or Histogram(row.bounds)
            one.observe(value)
