"""Prometheus metrics of a runtime: SGLang's names with the prefix `treeline:`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from treeline_runtime.published import AuditCounts, LoadUpdate

disable_created_metrics()  # twice the series for nothing that anybody reads

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 1.5, 2, 3, 4, 6, 8, 10, 20, 40, 80, 160, 320),
)
"""Seconds. The usual first bucket of 100 ms would hide a small model's first token."""

TOKEN_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5),
)
E2E_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1, 2, 5, 10),
    *(20, 40, 60, 80, 100, 150, 200, 300, 600, 1200),
)

_LOADS: tuple[tuple[str, str, Callable[[LoadUpdate], float]], ...] = (
    ("num_running_reqs", "Requests that run.", lambda load: load.running),
    ("num_queue_reqs", "Requests that wait for their turn.", lambda load: load.waiting),
    ("num_used_tokens", "Tokens in the KV cache that running requests hold.", lambda load: load.tokens_used),
    ("token_usage", "Share of the KV cache that running requests hold, from 0 to 1.", lambda load: load.used_share),
    ("max_total_num_tokens", "Tokens that fit into the KV cache.", lambda load: load.tokens_total),
    ("num_pages", "Pages that the KV cache has.", lambda load: load.pages_total),
    ("max_running_requests", "Requests that can run at the same time.", lambda load: load.max_running),
    (
        "num_waiting_uncached_tokens",
        "Prompt tokens of waiting requests that are not cached.",
        lambda load: load.waiting_uncached_tokens,
    ),
    (
        "prefill_tokens_per_second",
        "Prompt tokens that prefill computes in a second, as measured.",
        lambda load: load.prefill_tokens_per_s,
    ),
    ("decode_step_seconds", "Seconds that a decode step takes, as measured.", lambda load: load.decode_step_ms / 1000),
    ("lora_pool_slots_used", "Adapters on the device.", lambda load: len(load.resident)),
    ("lora_pool_slots_total", "Adapters that the device has room for.", lambda load: load.max_loras),
)
"""The load of a data-parallel rank: with the label `dp_rank` where there are several."""
_TOTALS: tuple[tuple[str, str, Callable[[LoadUpdate], float]], ...] = (
    (
        "encoder_cache_queries_total",
        "Images and videos whose embeddings a step needed.",
        lambda load: load.total_encoder_queries,
    ),
    ("encoder_cache_hits_total", "Those whose embeddings were kept.", lambda load: load.total_encoder_hits),
    ("encoder_tokens_total", "Tokens of images and videos that were encoded.", lambda load: load.total_encoded_tokens),
    ("encoder_seconds_total", "Seconds in which they were encoded.", lambda load: load.total_encoder_us / 1e6),
    (
        "num_jumps_total",
        "Times that a grammar allowed only one continuation, which was then not sampled.",
        lambda load: load.total_jumps,
    ),
    (
        "forced_tokens_total",
        "Output tokens that were not sampled because the grammar allowed no other.",
        lambda load: load.total_forced_tokens,
    ),
    (
        "spec_decode_num_drafts_total",
        "Times that a step verified guesses of a request.",
        lambda load: load.total_drafts,
    ),
    ("spec_decode_num_draft_tokens_total", "Tokens that were guessed.", lambda load: load.total_draft_tokens),
    (
        "spec_decode_num_accepted_tokens_total",
        "Guessed tokens that were right.",
        lambda load: sum(load.accepted_per_position),
    ),
)
_AUDITS = {
    "audited": ("cache_audits_total", "Requests with cached tokens that were computed again without the cache."),
    "diverged": ("cache_audit_divergence_total", "Audits in which the cache had changed the answer."),
    "dropped": ("cache_audits_dropped_total", "Audits given up: too many waited, or something came between."),
}
"""By member of AuditCounts."""
_ACCEPTED = (
    Counter,
    "spec_decode_num_accepted_tokens_per_pos_total",
    "Guessed tokens that were right, by their place among the guesses, from 0.",
    "position",
)
_LORA = (
    "vllm:lora_requests_info",
    "Adapters with running and with waiting requests, as vLLM tells them: the value is the time.",
    ["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
)
_GAUGES = (
    ("page_size", "Tokens in a page of the KV cache."),
    ("context_len", "Tokens that a prompt and its output may have together."),
    ("draining", "1 while the server drains: it finishes what it has and takes nothing new."),
    ("startup_time_seconds", "Seconds from the start of the process until it was ready."),
    ("spec_accept_length", "Tokens that a step with guesses gives a request, on average since the start."),
    ("spec_accept_rate", "Share of guessed tokens that were right, since the start."),
    ("http_requests_active", "HTTP requests that have no complete response yet."),
)


_OFF = "1 while cached tokens of this source are not used, because an audit found wrong ones."

_TIERS = {
    "used_bytes": (Gauge, "kv_tier_used_bytes", "Bytes of a cache tier below the device: CPU or DISK.", "medium"),
    "total_stored_tokens": (Counter, "kv_tier_stored_tokens_total", "Tokens copied to a tier.", "medium"),
    "total_loaded_tokens": (
        Counter,
        "load_back_tokens_total",
        "Tokens copied to the host (DISK, PEER), or from there (CPU).",
        "medium",
    ),
    "total_loads": (Counter, "load_back_total", "Prompts loaded, computed as that was faster, or failed.", "outcome"),
    "total_failures": (Counter, "kv_tier_failures_total", "Errors: bad_page (checksums), copy, disk, peer.", "kind"),
}
"""By member of TierLoad: kind, name, text, label. No series unless there are tiers."""


class Metrics:
    """One registry per HTTP process, so several fit in one test process."""

    def __init__(self, model_name: str, ranks: int = 1) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        of_ranks = [{"dp_rank": str(rank)} if ranks > 1 else {} for rank in range(ranks)]

        self.requests = self._counter("num_requests_total", "Requests for text that were given to the scheduler.")
        self.aborted = self._counter(
            "num_aborted_requests_total", "Requests that were stopped because their client closed the connection."
        )
        self.retracted = self._counter(
            "num_retracted_requests_total",
            "Times that a running request was put back into the queue because the KV cache was full.",
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens of requests that started, cached ones included."
        )
        self.cached_tokens = self._counter("cached_tokens_total", "Prompt tokens taken from the prefix cache.")
        self.generation_tokens = self._counter("generation_tokens_total", "Output tokens.")
        self._totals = [self._counter(name, text) for name, text, _ in _TOTALS]
        self._accepted = self._new(*_ACCEPTED)
        self._audits = {member: self._new(Counter, name, text, "source") for member, (name, text) in _AUDITS.items()}
        self._off = self._new(Gauge, "cache_source_off", _OFF, "source")
        self._last_loads = [LoadUpdate()] * ranks
        self.vectors = self._counter(
            "num_vectors_total", "Prompts that were turned into vectors: embeddings, scores and rewards."
        )
        self.rejected = self._counter(
            "num_rejected_requests_total", "Requests answered with 503 because the queue was full or the server drains."
        )

        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds from the arrival of a request to its first token.", TTFT_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Seconds between two tokens of one output.", TOKEN_BUCKETS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Seconds per output token after the first, averaged over a request.",
            TOKEN_BUCKETS,
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "Seconds from the arrival of a request to its last token.", E2E_BUCKETS
        )

        self._lora = Gauge(*_LORA, registry=self._registry)
        self._gauges = {name: self._gauge(name, text, [{}])[0] for name, text in _GAUGES}
        self._loads = {name: self._gauge(name, text, of_ranks) for name, text, _ in _LOADS}
        self._tiers = {member: self._new(*described) for member, described in _TIERS.items()}
        sent = "Tokens whose pages were sent to other runtimes."
        self._sent = self._new(Counter, "kv_tier_sent_tokens_total", sent)
        self.http_requests = Counter(
            "treeline:http_responses_total",
            "HTTP responses, by path and status.",
            ["path", "status"],
            registry=self._registry,
        )

    def set(self, name: str, value: float) -> None:
        self._gauges[name].set(value)

    def on_load(self, load: LoadUpdate, rank: int = 0) -> None:
        for name, _, value in _LOADS:
            self._loads[name][rank].set(value(load))
        last, self._last_loads[rank] = self._last_loads[rank], load
        for counter, (_, _, value) in zip(self._totals, _TOTALS, strict=True):
            counter.inc(value(load) - value(last))
        if load.total_drafts != last.total_drafts:
            self._on_drafts(load, last)
        for source, counts in load.audits.items():
            labels, before = {**self._labels, "source": source}, last.audits.get(source, AuditCounts())
            for member, counter in self._audits.items():
                counter.labels(**labels).inc(getattr(counts, member) - getattr(before, member))
            self._off.labels(**labels).set(any(of.audits[source].off for of in self._last_loads if of.audits))
        if load.tiers is not None:
            for member, metric in self._tiers.items():
                past = getattr(last.tiers, member, {})
                for label, value in getattr(load.tiers, member).items():
                    metric.labels(*self._labels.values(), label).inc(value - past.get(label, 0))
            sent = load.tiers.total_sent_tokens - getattr(last.tiers, "total_sent_tokens", 0)
            self._sent.labels(**self._labels).inc(sent)

    def _on_drafts(self, load: LoadUpdate, last: LoadUpdate) -> None:
        for i, count in enumerate(load.accepted_per_position):
            before = last.accepted_per_position[i : i + 1]
            self._accepted.labels(*self._labels.values(), str(i)).inc(count - sum(before))
        right = sum(sum(of.accepted_per_position) for of in self._last_loads)
        self.set("spec_accept_length", 1 + right / sum(of.total_drafts for of in self._last_loads))
        self.set("spec_accept_rate", right / sum(of.total_draft_tokens for of in self._last_loads))

    def render(self) -> bytes:
        loads = self._last_loads
        running, waiting = (
            ",".join(sorted({name for load in loads for name in of(load)}))
            for of in (lambda load: load.running_adapters, lambda load: load.waiting_adapters)
        )
        self._lora.clear()
        if slots := sum(load.max_loras for load in loads):
            self._lora.labels(str(slots), running, waiting).set_to_current_time()
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return self._new(Counter, name, text).labels(**self._labels)

    def _gauge(self, name: str, text: str, more: Sequence[dict[str, str]]) -> list[Gauge]:
        """A series for each of these further labels."""
        gauge = self._new(Gauge, name, text, *more[0])
        return [gauge.labels(**self._labels, **labels) for labels in more]

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._new(Histogram, name, text, buckets=buckets).labels(**self._labels)

    def _new(self, kind: type[Any], name: str, text: str, *labels: str, **options: Any) -> Any:
        return kind(f"treeline:{name}", text, [*self._labels, *labels], registry=self._registry, **options)
