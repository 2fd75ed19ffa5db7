"""Prometheus metrics of a runtime: SGLang's names with the prefix `treeline:`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from treeline_runtime.messages import LoadUpdate

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


class Metrics:
    """One registry per HTTP process, so several fit in one test process."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}

        self.requests = self._counter("num_requests_total", "Generations sent to the scheduler")
        self.aborted = self._counter("num_aborted_requests_total", "Generations aborted because their client left")
        self.retracted = self._counter("num_retracted_requests_total", "Times that a request was taken back for memory")
        self.prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens of generations that began, and of vectors"
        )
        self.cached_tokens = self._counter("cached_tokens_total", "Prompt tokens that the prefix cache supplied")
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens generated")
        self.jumps = self._counter("num_jumps_total", "Times that a grammar forced what an output went on with")
        self.forced_tokens = self._counter("forced_tokens_total", "Tokens that grammars forced: they were not sampled")
        self._last_load = LoadUpdate()
        self.vectors = self._counter("num_vectors_total", "Vectors made of prompts: embeddings, scores, rewards")
        self.rejected = self._counter("num_rejected_requests_total", "Requests answered 503: queue full or draining")

        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the parsed request to its first token", TTFT_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between tokens of one generation", TOKEN_BUCKETS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, per request",
            TOKEN_BUCKETS,
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From the parsed request to its end", E2E_BUCKETS
        )

        self._gauges = {
            name: self._gauge(name, text)
            for name, text in (
                ("num_running_reqs", "Requests being computed"),
                ("num_queue_reqs", "Requests waiting"),
                ("num_used_tokens", "KV cache tokens held by running requests"),
                ("token_usage", "Share of the KV cache held by running requests, 0 to 1"),
                ("max_total_num_tokens", "Size of the KV cache in tokens"),
                ("num_pages", "Size of the KV cache in pages"),
                ("page_size", "Tokens per page"),
                ("context_len", "Longest prompt + output in tokens"),
                ("max_running_requests", "Requests that can be computed at once"),
                ("num_waiting_uncached_tokens", "Prompt tokens waiting to be computed"),
                ("prefill_tokens_per_second", "Measured prefill rate"),
                ("decode_step_seconds", "Measured time of a decode step"),
                ("draining", "1 while the server drains"),
                ("startup_time_seconds", "From process start to ready"),
                ("http_requests_active", "HTTP requests being answered"),
            )
        }
        self.http_requests = Counter(
            "treeline:http_responses_total", "HTTP responses", ["path", "status"], registry=self._registry
        )

    def set(self, name: str, value: float) -> None:
        self._gauges[name].set(value)

    def on_load(self, load: LoadUpdate) -> None:
        self.set("num_running_reqs", load.running)
        self.set("num_queue_reqs", load.waiting)
        self.set("num_used_tokens", load.tokens_used)
        self.set("token_usage", load.used_share)
        self.set("num_pages", load.pages_total)
        self.set("max_total_num_tokens", load.tokens_total)
        self.set("max_running_requests", load.max_running)
        self.set("num_waiting_uncached_tokens", load.waiting_uncached_tokens)
        self.set("prefill_tokens_per_second", load.prefill_tokens_per_s)
        self.set("decode_step_seconds", load.decode_step_ms / 1000)
        self.jumps.inc(load.total_jumps - self._last_load.total_jumps)
        self.forced_tokens.inc(load.total_forced_tokens - self._last_load.total_forced_tokens)
        self._last_load = load

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"treeline:{name}", text, list(self._labels), registry=self._registry)
        return counter.labels(**self._labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"treeline:{name}", text, list(self._labels), registry=self._registry)
        return gauge.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"treeline:{name}", text, list(self._labels), buckets=buckets, registry=self._registry)
        return histogram.labels(**self._labels)
