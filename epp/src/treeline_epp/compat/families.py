"""Metrics under GIE 1.5's and llm-d's names (August 2026), for dashboards, alerts and autoscalers made for them.

Counted is what the picker knows; what it does not has no series, and never a zero. Labels that clients or pods choose
have bounded sets of values. Bounds of buckets are theirs, spelling mistakes included, so that quantiles of dashboards
stay comparable.

All is counted by one thread, the event loop's, which also renders the page, in Prometheus' text format 0.0.4:
prometheus_client takes some twenty times as long for a histogram, and the loop waits.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.utils import floatToGoString

from treeline_epp.endpoints.spec import split_address
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.score import Candidate
from treeline_epp.requests.exchange import Exchange, Observer

GIE, LLMD = "gie", "llm-d"
OTHER = "other"
MOST_SETS = 100
"""Sets of labels. Each has some 300 lines, and the loop waits while they are written."""
_MOST_ATTEMPTS = 10_000
"""Pairs of a model and an endpoint, of a line each."""
_LONGEST = 256
"""Letters of a label; a longer one is `OTHER`."""

_HOUR: tuple[float, ...] = (0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0)
_HOUR += (6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0)
_HOUR += (1200.0, 1800.0, 2700.0, 3600.0)
_TTFT = tuple(bound for bound in _HOUR if bound <= 120)
_TPOT: tuple[float, ...] = (0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3)
_TPOT += (0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 12.0, 18.0, 24.0, 30.0, 36.0, 48.0, 60.0, 90.0)
_TPOT += (120.0, 180.0, 270.0, 360.0)
_STREAMING_TPOT = (*(bound for bound in _TPOT if bound <= 1.0), 2.0)
_NTPOT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BYTES = tuple(float(1 << power) for power in range(6, 31))
_OUT = (1.0, *(float(1 << power) for power in range(3, 14)))
_OUT_BYTES = (*_OUT, 16384.0, 32778.0, 65536.0)
_IN = (*_OUT_BYTES, 131072.0, 262144.0, 524288.0, 1048576.0)
_SCHEDULING = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_RATIO = tuple(tenth / 10 for tenth in range(11))
_HIT_BYTES = (0.0, *(float(1 << power) for power in range(4, 17)))


def _looked_up(exchange: Exchange) -> Candidate | None:
    """The chosen endpoint, if the prompt was looked up."""
    decision = exchange.decision
    return None if decision is None or decision.request.key is None else decision.best.candidate


def _hit_ratio(exchange: Exchange) -> float | None:
    """The share of the prompt that the chosen endpoint is believed to hold."""
    best = _looked_up(exchange)
    return None if best is None else min(1.0, best.cached_tokens / max(1, best.cached_tokens + best.uncached_tokens))


def _hit_bytes(exchange: Exchange) -> float | None:
    """The same in bytes of text."""
    best = _looked_up(exchange)
    return None if best is None else best.hit.reach


def _tpot(exchange: Exchange) -> float | None:
    """Between the tokens of a stream after its first one."""
    duration, ttft, output = exchange.duration_s, exchange.ttft_s, exchange.usage.output
    if duration is None or ttft is None or output is None or output < 2:
        return None
    return max(0.0, duration - ttft) / (output - 1)


def _ntpot(exchange: Exchange) -> float | None:
    duration, output = exchange.duration_s, exchange.usage.output
    return None if duration is None or not output else duration / output


def _predicted_ttft(exchange: Exchange) -> float | None:
    return None if exchange.decision is None else exchange.decision.best.ttft_s


class Row(NamedTuple):
    """A histogram over requests: its names ("": this family has none), and what is read of one (None: not counted)."""

    gie: str
    llmd: str
    help: str
    read: Callable[[Exchange], float | None]
    bounds: tuple[float, ...]
    bounds_llmd: tuple[float, ...] | None = None

    def name(self, family: str) -> str:
        """In a family."""
        return self.gie if family == GIE else self.llmd

    @property
    def all_bounds(self) -> tuple[float, ...]:
        """Of both families: one series is counted for both."""
        return tuple(sorted({*self.bounds, *(self.bounds_llmd or ())}))

    def bounds_of(self, family: str) -> tuple[float, ...]:
        """Upper bounds of the buckets."""
        return self.bounds_llmd if family == LLMD and self.bounds_llmd is not None else self.bounds


def _row(gie: str, llmd: str, help: str, read: Callable[[Exchange], float | None], *bounds: tuple[float, ...]) -> Row:
    return Row(gie and f"inference_{gie}", llmd and f"llm_d_epp_{llmd}", help, read, *bounds)


_INPUT, _OUTPUT, _CACHED = ((lambda e, name=name: getattr(e.usage, name)) for name in ("prompt", "output", "cached"))
_O = "objective_"
TTFT_LLMD = _row("", "request_ttft_seconds", "Time to first token of streams.", lambda e: e.ttft_s, _TTFT)
"""Has the label `streaming`, too."""
_DURATION, _NTPOTS = "request_duration_seconds", f"{_O}normalized_time_per_output_token_seconds"
REQUESTS = (
    _row(f"{_O}request_ttft_seconds", "", "Time to first token of streams.", lambda e: e.ttft_s, _HOUR),
    _row(f"{_O}request_predicted_ttft_seconds", "", "The same as predicted.", _predicted_ttft, _HOUR),
    _row(
        f"{_O}request_tpot_seconds",
        "request_streaming_tpot_seconds",
        "Time per output token after the first, of streams.",
        _tpot,
        _TPOT,
        _STREAMING_TPOT,
    ),
    _row(f"{_O}{_DURATION}", _DURATION, "From request to the response's end.", lambda e: e.duration_s, _HOUR),
    _row(f"{_O}request_sizes", "request_size_bytes", "Bytes of request bodies.", lambda e: e.request_bytes, _BYTES),
    _row(
        f"{_O}response_sizes",
        "response_size_bytes",
        "Bytes of response bodies.",
        lambda e: None if e.finished_at is None else e.response_bytes,
        _OUT_BYTES,
    ),
    _row(f"{_O}input_tokens", "request_input_tokens", "Prompt tokens by the response's word.", _INPUT, _IN),
    _row(f"{_O}output_tokens", "request_output_tokens", "Output tokens by the response's word.", _OUTPUT, _OUT),
    _row(
        f"{_O}prompt_cached_tokens",
        "request_cached_tokens",
        "Cached prompt tokens by the response's word.",
        _CACHED,
        _IN,
    ),
    _row(_NTPOTS, "request_ntpot_seconds", "Duration by output token.", _ntpot, _NTPOT),
    TTFT_LLMD,
)
"""Labels: `model_name`, `target_model_name`; llm-d's `fairness_id` and `priority` besides."""
_CHOSEN = "scheduler_e2e_duration_seconds"
_CHOICE_TEXT = "Time to choose an endpoint, from a whole request."
_RATIO_TEXT = "Share of a prompt that the chosen endpoint is believed to hold."
_BYTES_TEXT = "Bytes of a prompt that the chosen endpoint is believed to hold."
CHOICES = (
    _row(f"extension_{_CHOSEN}", _CHOSEN, _CHOICE_TEXT, lambda e: e.decided_at - e.started_at, _SCHEDULING),
    _row("extension_prefix_indexer_hit_ratio", "prefix_indexer_hit_ratio", _RATIO_TEXT, _hit_ratio, _RATIO),
    _row("extension_prefix_indexer_hit_bytes", "prefix_indexer_hit_bytes", _BYTES_TEXT, _hit_bytes, _HIT_BYTES),
)
"""Over all requests that were decided. Without labels; llm-d's have those of the plugin, but for the first."""
ERRORS = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 429: "ResourceExhausted"}
ERRORS |= {503: "ServiceUnavailable"}
"""Codes of what the picker refuses, by status; other 4xx are `BadRequest`, the rest `Internal`."""

Labels = tuple[str, ...]
_MODEL, _FLOW = ("model_name", "target_model_name"), ("fairness_id", "priority")
_PLUGIN = {"plugin_name": "treeline", "plugin_type": "treeline"}
_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Histogram:
    """Counts of one series by upper bound."""

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
        total, whole, wanted = 0, sum(self._counts), set(bounds)
        begin, rest = f'{name}_bucket{{{labels}{"," if labels else ""}le="', f"{{{labels}}}" if labels else ""
        found = []
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            if bound in wanted:
                found.append(f'{begin}{floatToGoString(bound)}"}} {total}\n')  # type: ignore[no-untyped-call]
        found.append(f'{begin}+Inf"}} {whole}\n{name}_count{rest} {whole}\n{name}_sum{rest} {self.sum!r}\n')
        return "".join(found)


def label_text(names: Sequence[str], values: Sequence[str]) -> str:
    """Between the braces."""
    return ",".join(f'{name}="{value.translate(_ESCAPED)}"' for name, value in zip(names, values, strict=True))


def head(name: str, kind: str, text: str) -> str:
    """What goes before the samples of a metric; the words are ours."""
    return f"# HELP {name} [ALPHA] {text}\n# TYPE {name} {kind}\n"


def shown(name: str, kind: str, text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> str:
    """A counter or gauge."""
    found = ((f"{{{label_text(labels, had)}}}" if labels else "", value) for had, value in values)
    return head(name, kind, text) + "".join(f"{name}{had} {value!r}\n" for had, value in found)


class Families(Observer):
    """One or both families. `namespace` is that of the pods, empty without Kubernetes; `streams()` are open."""

    def __init__(
        self, families: Iterable[str], picker: Picker, namespace: str = "", streams: Callable[[], float] | None = None
    ) -> None:
        self._streams = streams
        self._families = tuple(families)
        self._picker = picker
        self._namespace = namespace
        self._sets: set[Labels] = set()
        self._requests: Counter[Labels] = Counter()
        self._errors: Counter[Labels] = Counter()
        self._attempts: Counter[Labels] = Counter()
        self._of_requests: dict[Labels, list[Histogram | None]] = {}
        self._of_choices: list[Histogram | None] = [None] * len(CHOICES)
        self._newest: dict[Labels, float] = {}
        self._running: dict[Exchange, Labels] = {}
        self._shown: set[Labels] = set()
        """Of requests whose response is shown: those that run can be counted, and none is a count, too."""

    def render(self) -> bytes:
        """The text that a scrape gets."""
        return "".join(part for family in self._families for part in self._page(family)).encode()

    def forget(self, endpoint: str) -> None:
        """The endpoint has gone for good."""
        for key in [key for key in self._attempts if key[2] == endpoint]:
            del self._attempts[key]

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
        attempt: Labels = "success", labels[1], spec.name, split_address(spec.address)[1]
        if attempt not in self._attempts and len(self._attempts) >= _MOST_ATTEMPTS:
            attempt = "success", OTHER, OTHER, ""
        self._attempts[attempt] += 1
        _observe(CHOICES, self._of_choices, exchange)
        if exchange.shows_body:
            self._running[exchange] = labels
            self._shown.add(labels)

    def ended(self, exchange: Exchange) -> None:
        """Counts what the response brought."""
        labels = self._running.pop(exchange, None) or self._labels(exchange)
        if exchange.observed:
            return
        if code := _error(exchange):
            self._errors[*labels, code] += 1
        if exchange.refusal is not None:
            return
        _observe(REQUESTS, self._of_requests.setdefault(labels, [None] * len(REQUESTS)), exchange)
        for kind, value in (("ttft", exchange.ttft_s), ("predicted_ttft", _predicted_ttft(exchange))):
            if value is not None:
                self._newest[*labels[:2], kind] = value

    def _labels(self, exchange: Exchange) -> Labels:
        """Model, target, flow, priority; where there are many others, those that are counted in their place."""
        found = exchange.model, exchange.target, exchange.flow, str(exchange.priority)
        labels = tuple(value if len(value) <= _LONGEST else OTHER for value in found)
        if labels not in self._sets and len(self._sets) >= MOST_SETS:
            labels = (*labels[:2], OTHER, OTHER)
            if labels not in self._sets and len(self._sets) >= 2 * MOST_SETS:
                labels = (OTHER,) * 4
        self._sets.add(labels)
        return labels

    # The page

    def _page(self, family: str) -> Iterator[str]:
        gie = family == GIE
        prefix = "inference_objective_" if gie else "llm_d_epp_"
        kept = (lambda key: (*key[:2], *key[3:])) if gie else (lambda key: key)
        names: Labels = (*_MODEL, "priority") if gie else (*_MODEL, *_FLOW)
        text = "Requests that got an endpoint."
        yield shown(f"{prefix}request_total", "counter", text, names, _summed(self._requests, kept))
        names = (*_MODEL, "error_code") if gie else (*_MODEL, *_FLOW, "error_code")
        kept = (lambda key: (*key[:2], key[4])) if gie else kept
        text = "Requests that were refused, or that an engine answered with 400 or more."
        yield shown(f"{prefix}request_error_total", "counter", text, names, _summed(self._errors, kept))
        running: Counter[Labels] = Counter(dict.fromkeys(self._shown, 0))
        running.update(self._running.values())
        name, names = ("running_requests", _MODEL[:1]) if gie else ("request_running", (*_MODEL, *_FLOW))
        text = "Requests without their response's end, where the proxy shows it."
        yield shown(f"{prefix}{name}", "gauge", text, names, _summed(running, lambda key: key[: len(names)]))
        if gie:
            name = f"{prefix}inference_request_metric"
            yield shown(name, "gauge", "The newest value, by type.", (*_MODEL, "type"), self._newest.items())
        elif self._streams is not None:
            streams = [((), self._streams())]
            yield shown("llm_d_epp_extproc_streams_inflight", "gauge", "Open ext_proc streams.", (), streams)
        yield from self._histograms(family)
        yield self._of_attempts(family)
        yield from self._of_pools(family)

    def _histograms(self, family: str) -> Iterator[str]:
        names = _MODEL if family == GIE else (*_MODEL, *_FLOW)
        for at, row in enumerate(REQUESTS):
            if not row.name(family):
                continue
            yield head(row.name(family), "histogram", row.help)
            merged: dict[Labels, Histogram] = {}
            for labels, series in self._of_requests.items():
                if (one := series[at]) is not None:
                    merged.setdefault(labels[: len(names)], Histogram(row.all_bounds)).add(one)
            for labels, whole in merged.items():
                text = label_text(names, labels) + (',streaming="true"' if row is TTFT_LLMD else "")
                yield whole.lines(row.name(family), text, row.bounds_of(family))
        for at, row in enumerate(CHOICES):
            yield head(row.name(family), "histogram", row.help)
            if (one := self._of_choices[at]) is not None:
                plugin = _PLUGIN if family == LLMD and at else {}
                yield one.lines(row.name(family), label_text([*plugin], [*plugin.values()]), row.bounds_of(family))

    def _of_attempts(self, family: str) -> str:
        prefix, name = ("inference_extension_", "pod_name") if family == GIE else ("llm_d_epp_", "endpoint_name")

        def named(key: Labels) -> Labels:
            pod = key[2].partition("-rank-")[0] if family == GIE else key[2]
            return key[0], key[1], pod, self._namespace if pod else "", key[3]

        labels = ("status", "target_model_name", name, "namespace", "port")
        values = _summed(self._attempts, named)
        return shown(f"{prefix}scheduler_attempts_total", "counter", "Choices, by what was chosen.", labels, values)

    def _of_pools(self, family: str) -> Iterator[str]:
        prefix, one = ("inference_pool_", "pod") if family == GIE else ("llm_d_epp_", "endpoint")
        pools: dict[str, list[Endpoint]] = {}
        for endpoint in self._picker.endpoints.values():
            pools.setdefault(endpoint.spec.pool, []).append(endpoint)
        now = time.monotonic()
        for name, text, read in _LOADS:
            values = {(pool,): _known(endpoints, now, read).values() for pool, endpoints in pools.items()}
            means = {labels: statistics.fmean(known) for labels, known in values.items() if known}
            text = f"over the endpoints that tell: {text}"
            yield shown(f"{prefix}average_{name}", "gauge", f"Mean {text}", ("name",), means.items())
            if family == LLMD:
                spread = {labels: statistics.pstdev(known) for labels, known in values.items() if known}
                yield shown(f"{prefix}std_dev_{name}", "gauge", f"Deviation {text}", ("name",), spread.items())
        ready = [((pool,), sum(one.eligible for one in endpoints)) for pool, endpoints in pools.items()]
        yield shown(f"{prefix}ready_{one}s", "gauge", "Endpoints that may be picked.", ("name",), ready)
        queues = [
            ((pool, endpoint), value)
            for pool, endpoints in pools.items()
            for endpoint, value in _known(endpoints, now, _waiting).items()
        ]
        names = ("name", f"model_server_{one}")
        yield shown(f"{prefix}per_{one}_queue_size", "gauge", "Requests that wait at an endpoint.", names, queues)
        name, plugin = ("inference_extension_", {}) if family == GIE else (prefix, _PLUGIN)
        blocks = [((*plugin.values(),), self._picker.index.totals()["blocks"])]
        yield shown(f"{name}prefix_indexer_size", "gauge", "Blocks in the index of prefixes.", [*plugin], blocks)


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


def _error(exchange: Exchange) -> str:
    """The code that it counts under; empty where it was answered well, or where its status is unknown."""
    status = exchange.status
    if status is None or status < 400:
        return ""
    if exchange.refusal is None:
        return "ModelServerError"
    return ERRORS.get(status, "BadRequest" if status < 500 else "Internal")


def _observe(rows: Sequence[Row], series: list[Histogram | None], exchange: Exchange) -> None:
    for at, row in enumerate(rows):
        if (value := row.read(exchange)) is not None:
            one = series[at] = series[at] or Histogram(row.all_bounds)
            one.observe(value)


def _summed(counts: Counter[Labels], pick: Callable[[Labels], Labels]) -> Iterable[tuple[Labels, float]]:
    found: Counter[Labels] = Counter()
    for labels, count in counts.items():
        found[pick(labels)] += count
    return found.items()
