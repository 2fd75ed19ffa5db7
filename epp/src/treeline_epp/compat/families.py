"""Metrics under GIE's and llm-d's names, for dashboards, alerts and autoscalers that were made for those pickers.

Counted is what the picker knows; what it does not has no series, and never a zero. Labels that clients or pods choose
have at most `series.MOST_VALUES` values, and sets of them are bounded. Names and buckets are in `metric_names`.

Series of metrics that cost little to count and to show: labels that are bounded, histograms without a lock.

They are counted by one thread, the event loop's, which also renders the page, as those of `metrics`. The page is in
Prometheus' text format 0.0.4; prometheus_client takes some twenty times as long for a histogram, and the loop waits.
"""

from __future__ import annotations

import functools
import statistics
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from prometheus_client.utils import floatToGoString

from treeline_epp.compat.metric_names import (
    CHOICES,
    ERRORS,
    GIE,
    LLMD,
    MODEL_SERVER_ERROR,
    PREFIXES,
    REQUESTS,
    TTFT_LLMD,
    Row,
)
from treeline_epp.endpoints.spec import split_address
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.exchange import Exchange, Observer

MOST_VALUES = 1000
"""Of one label."""
OTHER = "other"
_LONGEST = 256


class Bounded:
    """The values of one label: the first `MOST_VALUES` that come, and then `OTHER`."""

    def __init__(self, most: int = MOST_VALUES) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        """The label for a value."""
        if value in self._known:
            return value
        if len(self._known) >= self._most or len(value) > _LONGEST:
            return OTHER
        self._known.add(value)
        return value

    def forget(self, value: str) -> None:
        """It has gone for good, and another may take its place."""
        self._known.discard(value)


class Histogram:
    """Counts of one series by upper bound."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """O(log bounds)."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def add(self, other: Histogram) -> None:
        """What another with the same bounds has counted."""
        self._counts = [ours + theirs for ours, theirs in zip(self._counts, other._counts, strict=True)]
        self.sum += other.sum

    def lines(self, name: str, labels: str, bounds: Sequence[float]) -> str:
        """Its samples, with some of its bounds. `labels` are as `label_text` has them."""
        total, wanted = 0, dict(zip(bounds, _endings(tuple(bounds)), strict=True))
        begin = f'{name}_bucket{{{labels}{"," if labels else ""}le="'
        found = []
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            if (ending := wanted.get(bound)) is not None:
                found.append(f"{begin}{ending}{total}\n")
        whole = sum(self._counts)
        rest = f"{{{labels}}}" if labels else ""
        found.append(f'{begin}+Inf"}} {whole}\n{name}_count{rest} {whole}\n{name}_sum{rest} {self.sum!r}\n')
        return "".join(found)


@functools.lru_cache(maxsize=256)
def _endings(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(f'{_text(bound)}"}} ' for bound in bounds)


def _text(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text


_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def label_text(names: Sequence[str], values: Sequence[str]) -> str:
    """Between the braces."""
    return ",".join(f'{name}="{value.translate(_ESCAPED)}"' for name, value in zip(names, values, strict=True))


def head(name: str, kind: str, text: str) -> str:
    """What goes before the samples of a metric; the words are ours."""
    return f"# HELP {name} [ALPHA] {text}\n# TYPE {name} {kind}\n"


def samples(name: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> str:
    """Lines of a counter or gauge."""
    found = []
    for had, value in values:
        text = label_text(labels, had)
        found.append(f"{name}{{{text}}} {value!r}\n" if text else f"{name} {value!r}\n")
    return "".join(found)


Labels = tuple[str, ...]
MOST_SETS = 100
"""Sets of labels with histograms of their own. Each has some 300 lines, and the loop waits while they are written."""
MOST_COUNTED = 2000
"""The same of counters and gauges: each has some 10 lines."""
MOST_ATTEMPTS = 10_000
"""Pairs of a model and an endpoint, of a line each."""
_MODEL = ("model_name", "target_model_name")
_FLOW = ("fairness_id", "priority")
_PLUGIN = ("treeline", "treeline")
"""What stands for llm-d's `plugin_name` and `plugin_type`."""


class Families(Observer):
    """One or both families. `namespace` is that of the pods, empty without Kubernetes; `streams()` are open."""

    def __init__(
        self, families: Iterable[str], picker: Picker, namespace: str = "", streams: Callable[[], float] | None = None
    ) -> None:
        self._streams = streams
        self._families = tuple(families)
        self._picker = picker
        self._namespace = namespace
        self._model, self._target, self._flow, self._priority, self._endpoint = (Bounded() for _ in range(5))
        self._sets: set[Labels] = set()
        self._requests: Counter[Labels] = Counter()
        self._errors: Counter[Labels] = Counter()
        self._attempts: Counter[Labels] = Counter()
        self._of_requests: dict[Labels, list[Histogram | None]] = {}
        self._unlabelled: list[Histogram | None] = [None] * len(CHOICES + PREFIXES)
        self._newest: dict[Labels, float] = {}
        self._running: dict[Exchange, Labels] = {}
        self._shown: set[Labels] = set()
        """Of requests whose response is shown: those that run can be counted, and none is a count, too."""

    def render(self) -> bytes:
        """The text that a scrape gets."""
        return "".join(part for family in self._families for part in self._page(family)).encode()

    def forget(self, endpoint: str) -> None:
        """The endpoint has gone for good."""
        self._endpoint.forget(endpoint)
        for key in [key for key in self._attempts if key[2] == endpoint]:
            del self._attempts[key]

    # ---- of exchanges -----------------------------------------------------------------------------------------------

    def decided(self, exchange: Exchange) -> None:
        """Counts the choice, and what is known of it by then."""
        labels = self._labels(exchange)
        decision = exchange.decision
        if decision is None:
            if exchange.refusal is not None:
                self._attempts["failure", labels[1], "", ""] += 1
            return
        self._requests[labels] += 1
        spec = decision.endpoint
        _, port = split_address(spec.address)
        attempt: Labels = "success", labels[1], self._endpoint(spec.name), port
        if attempt not in self._attempts and len(self._attempts) >= MOST_ATTEMPTS:
            attempt = "success", OTHER, OTHER, ""
        self._attempts[attempt] += 1
        for at, row in enumerate(CHOICES + PREFIXES):
            self._unlabelled[at] = _observed(self._unlabelled[at], row, exchange)
        if exchange.shows_body:
            self._running[exchange] = labels
            self._shown.add(labels)

    def ended(self, exchange: Exchange) -> None:
        """Counts what the response brought."""
        labels = self._running.pop(exchange, None) or self._labels(exchange)
        if exchange.observed:
            return
        if code := _error(exchange):
            self._errors[(*labels, code)] += 1
        if exchange.refusal is not None:
            return
        rows = (*REQUESTS, TTFT_LLMD)
        labels = _one_of(self._of_requests, labels, MOST_SETS)
        series = self._of_requests.setdefault(labels, [None] * len(rows))
        for at, row in enumerate(rows):
            series[at] = _observed(series[at], row, exchange)
        if (ttft := exchange.ttft_s) is not None:
            self._newest[(*labels[:2], "ttft")] = ttft
        if exchange.decision is not None:
            self._newest[(*labels[:2], "predicted_ttft")] = exchange.decision.best.ttft_s

    def _labels(self, exchange: Exchange) -> Labels:
        labels: Labels = (
            self._model(exchange.model),
            self._target(exchange.target),
            self._flow(exchange.flow),
            self._priority(str(exchange.priority)),
        )
        labels = _one_of(self._sets, labels, MOST_COUNTED)
        self._sets.add(labels)
        return labels

    # ---- the page ---------------------------------------------------------------------------------------------------

    def _page(self, family: str) -> Iterator[str]:
        yield from self._counted(family)
        yield from self._histograms(family)
        yield self._of_attempts(family)
        yield from self._of_pools(family)

    def _counted(self, family: str) -> Iterator[str]:
        gie = family == GIE
        prefix = "inference_objective_" if gie else "llm_d_epp_"
        names: Sequence[str] = (*_MODEL, "priority") if gie else (*_MODEL, *_FLOW)
        pick: Callable[[Labels], Labels] = (lambda key: (*key[:2], key[3])) if gie else (lambda key: key[:4])
        yield _counter(f"{prefix}request_total", "Requests that got an endpoint.", names, self._requests, pick)
        errors: Callable[[Labels], Labels] = (lambda key: (*key[:2], key[4])) if gie else (lambda key: key)
        names = (*_MODEL, "error_code") if gie else (*_MODEL, *_FLOW, "error_code")
        text = "Requests that were refused, or that an engine answered with 400 or more."
        yield _counter(f"{prefix}request_error_total", text, names, self._errors, errors)
        running: Counter[Labels] = Counter(dict.fromkeys(self._shown, 0))
        running.update(self._running.values())
        text = "Requests without their response's end, where the proxy shows it."
        if gie:
            yield _gauge(
                "inference_objective_running_requests", text, ("model_name",), _summed(running, lambda k: k[:1]).items()
            )
            text = "The newest value, by type."
            yield _gauge("inference_objective_inference_request_metric", text, (*_MODEL, "type"), self._newest.items())
        else:
            if self._streams is not None:
                yield _gauge(
                    "llm_d_epp_extproc_streams_inflight", "Open ext_proc streams.", (), [((), self._streams())]
                )
            yield _gauge("llm_d_epp_request_running", text, (*_MODEL, *_FLOW), _summed(running, lambda k: k).items())

    def _histograms(self, family: str) -> Iterator[str]:
        gie = family == GIE
        names = _MODEL if gie else (*_MODEL, *_FLOW)
        for at, row in enumerate((*REQUESTS, TTFT_LLMD)):
            if not row.name(family):
                continue
            streaming = row is TTFT_LLMD
            yield head(row.name(family), "histogram", row.help)
            merged: dict[Labels, Histogram] = {}
            for labels, series in self._of_requests.items():
                if (one := series[at]) is not None:
                    merged.setdefault(labels[:2] if gie else labels, Histogram(row.all_bounds)).add(one)
            for labels, whole in merged.items():
                text = label_text((*names, "streaming"), (*labels, "true")) if streaming else label_text(names, labels)
                yield whole.lines(row.name(family), text, row.bounds_of(family))
        for row, series_of_all in zip(CHOICES + PREFIXES, self._unlabelled, strict=True):
            plugin = not gie and row in PREFIXES
            yield head(row.name(family), "histogram", row.help)
            if series_of_all is not None:
                text = label_text(("plugin_name", "plugin_type"), _PLUGIN) if plugin else ""
                yield series_of_all.lines(row.name(family), text, row.bounds_of(family))

    def _of_attempts(self, family: str) -> str:
        prefix, name = ("inference_extension_", "pod_name") if family == GIE else ("llm_d_epp_", "endpoint_name")
        found = []
        for (status, target, endpoint, port), count in self._attempts.items():
            pod = endpoint.partition("-rank-")[0] if family == GIE else endpoint
            found.append(((status, target, pod, self._namespace if endpoint else "", port), count))
        labels = ("status", "target_model_name", name, "namespace", "port")
        text = "Choices, by what was chosen."
        return _shown(f"{prefix}scheduler_attempts_total", "counter", text, labels, found)

    def _of_pools(self, family: str) -> Iterator[str]:
        prefix = "inference_pool_" if family == GIE else "llm_d_epp_"
        pools: dict[str, list[Endpoint]] = {}
        for endpoint in self._picker.endpoints.values():
            pools.setdefault(endpoint.spec.pool, []).append(endpoint)
        now = time.monotonic()
        for name, text, read in _LOADS:
            values = {(pool,): _known(endpoints, now, read) for pool, endpoints in pools.items()}
            means = {labels: statistics.fmean(known.values()) for labels, known in values.items() if known}
            yield _gauge(
                f"{prefix}average_{name}", f"Mean over the endpoints that tell: {text}", ("name",), means.items()
            )
            if family == LLMD:
                spread = {labels: statistics.pstdev(known.values()) for labels, known in values.items() if known}
                text = f"Standard deviation over the endpoints that tell: {text}"
                yield _gauge(f"{prefix}std_dev_{name}", text, ("name",), spread.items())
        ready = {(pool,): sum(one.eligible for one in endpoints) for pool, endpoints in pools.items()}
        name = "ready_pods" if family == GIE else "ready_endpoints"
        yield _gauge(prefix + name, "Endpoints that may be picked.", ("name",), ready.items())
        name, label = ("pod", "model_server_pod") if family == GIE else ("endpoint", "model_server_endpoint")
        queues = {
            (pool, endpoint): value
            for pool, endpoints in pools.items()
            for endpoint, value in _known(endpoints, now, _waiting).items()
        }
        yield _gauge(
            f"{prefix}per_{name}_queue_size", "Requests that wait at an endpoint.", ("name", label), queues.items()
        )
        size = self._picker.index.totals()["blocks"]
        name = "inference_extension_prefix_indexer_size" if family == GIE else "llm_d_epp_prefix_indexer_size"
        plugin = () if family == GIE else ("plugin_name", "plugin_type")
        yield _gauge(name, "Blocks in the index of prefixes.", plugin, [(_PLUGIN[: len(plugin)], size)])


def _kv_usage(endpoint: Endpoint) -> float | None:
    """Of running requests alone. Runtimes of Treeline tell what running and cached pages take together."""
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
    """Values of the endpoints that have reported lately."""
    found = {one.spec.name: read(one) for one in endpoints if one.load.fresh(now)}
    return {name: value for name, value in found.items() if value is not None}


def _one_of(known: Collection[Labels], labels: Labels, most: int) -> Labels:
    """The labels, or where there are `most` others what is counted in their place."""
    if labels in known or len(known) < most:
        return labels
    model = *labels[:2], OTHER, OTHER
    return model if model in known or len(known) < 2 * most else (OTHER,) * 4


def _error(exchange: Exchange) -> str:
    """The code that it counts under; empty where it was answered well, or where its status is unknown."""
    status = exchange.status
    if status is None or status < 400:
        return ""
    if exchange.refusal is None:
        return MODEL_SERVER_ERROR
    return ERRORS.get(status, "BadRequest" if status < 500 else "Internal")


def _observed(series: Histogram | None, row: Row, exchange: Exchange) -> Histogram | None:
    value = row.read(exchange)
    if value is None:
        return series
    if series is None:
        series = Histogram(row.all_bounds)
    series.observe(value)
    return series


def _summed(counts: Counter[Labels], pick: Callable[[Labels], Labels]) -> Counter[Labels]:
    found: Counter[Labels] = Counter()
    for labels, count in counts.items():
        found[pick(labels)] += count
    return found


def _counter(
    name: str, text: str, labels: Sequence[str], counts: Counter[Labels], pick: Callable[[Labels], Labels]
) -> str:
    return _shown(name, "counter", text, labels, _summed(counts, pick).items())


def _gauge(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> str:
    return _shown(name, "gauge", text, labels, values)


def _shown(
    name: str, kind: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> str:
    return head(name, kind, text) + samples(name, labels, values)
