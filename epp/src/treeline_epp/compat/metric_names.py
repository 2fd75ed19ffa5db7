"""What GIE 1.5 and llm-d's router (August 2026) call their metrics, and which of them the picker can fill.

A row is a histogram over requests with what it reads of one; None is not counted, as it is not known. The rest are
counters and gauges, filled in `families`. Bounds of buckets are theirs, spelling mistakes included, so that quantiles
of dashboards stay comparable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from treeline_epp.requests.exchange import Exchange

_UP_TO_HOUR = (
    *(
        0.005,
        0.025,
        0.05,
        0.1,
        0.2,
        0.4,
        0.6,
        0.8,
        1.0,
        1.25,
        1.5,
        2.0,
        3.0,
        4.0,
        5.0,
        6.0,
        8.0,
        10.0,
        15.0,
        20.0,
        30.0,
    ),
    *(45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0),
)
_TTFT = tuple(bound for bound in _UP_TO_HOUR if bound <= 120)
_TPOT = (
    *(0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5),
    *(2.0, 3.0, 4.5, 6.0, 12.0, 18.0, 24.0, 30.0, 36.0, 48.0, 60.0, 90.0, 120.0, 180.0, 270.0, 360.0),
)
_STREAMING_TPOT = (*(bound for bound in _TPOT if bound <= 1.0), 2.0)
_NTPOT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_REQUEST_BYTES = tuple(float(1 << power) for power in range(6, 31))
_OUTPUT = (1.0, *(float(1 << power) for power in range(3, 14)))
_RESPONSE_BYTES = (*_OUTPUT, 16384.0, 32778.0, 65536.0)
_INPUT = (*_RESPONSE_BYTES, 131072.0, 262144.0, 524288.0, 1048576.0)
_SCHEDULING = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_RATIO = tuple(tenth / 10 for tenth in range(11))
_HIT_BYTES = (0.0, *(float(1 << power) for power in range(4, 17)))

GIE, LLMD = "gie", "llm-d"


def _prompt(exchange: Exchange) -> float | None:
    return exchange.usage.prompt


def _cached(exchange: Exchange) -> float | None:
    return exchange.usage.cached


def _output(exchange: Exchange) -> float | None:
    return exchange.usage.output


def _response_bytes(exchange: Exchange) -> float | None:
    return None if exchange.finished_at is None else exchange.response_bytes


def _predicted_ttft(exchange: Exchange) -> float | None:
    return None if exchange.decision is None else exchange.decision.best.ttft_s


def _tpot(exchange: Exchange) -> float | None:
    """Between the tokens of a stream after its first one."""
    duration, ttft, output = exchange.duration_s, exchange.ttft_s, exchange.usage.output
    if duration is None or ttft is None or output is None or output < 2:
        return None
    return max(0.0, duration - ttft) / (output - 1)


def _ntpot(exchange: Exchange) -> float | None:
    duration, output = exchange.duration_s, exchange.usage.output
    return None if duration is None or not output else duration / output


def hit_ratio(exchange: Exchange) -> float | None:
    """What the chosen endpoint is believed to hold of a prompt that was looked up."""
    if exchange.decision is None or exchange.decision.request.key is None:
        return None
    best = exchange.decision.best.candidate
    tokens = best.cached_tokens + best.uncached_tokens
    return min(1.0, best.cached_tokens / tokens) if tokens else None


def hit_bytes(exchange: Exchange) -> float | None:
    """The same in bytes of text."""
    if exchange.decision is None or exchange.decision.request.key is None:
        return None
    return exchange.decision.best.candidate.hit.reach


def scheduling_s(exchange: Exchange) -> float | None:
    """From a whole request to its endpoint."""
    return exchange.decided_at - exchange.started_at


class Row(NamedTuple):
    """A histogram over requests, in one of the families or both."""

    gie: str
    llmd: str
    help: str
    bounds: tuple[float, ...]
    read: Callable[[Exchange], float | None]
    bounds_llmd: tuple[float, ...] | None = None

    def name(self, family: str) -> str:
        """In a family; empty where that has none."""
        return self.gie if family == GIE else self.llmd

    @property
    def all_bounds(self) -> tuple[float, ...]:
        """Of both families: one series is counted for both."""
        return tuple(sorted({*self.bounds, *(self.bounds_llmd or ())}))

    def bounds_of(self, family: str) -> tuple[float, ...]:
        """Upper bounds of the buckets."""
        return self.bounds_llmd if family == LLMD and self.bounds_llmd is not None else self.bounds


_OBJECTIVE, _EXTENSION, _EPP = "inference_objective_", "inference_extension_", "llm_d_epp_"
REQUESTS: tuple[Row, ...] = (
    Row(f"{_OBJECTIVE}request_ttft_seconds", "", "Time to first token of streams.", _UP_TO_HOUR, lambda e: e.ttft_s),
    Row(f"{_OBJECTIVE}request_predicted_ttft_seconds", "", "The same as predicted.", _UP_TO_HOUR, _predicted_ttft),
    Row(
        f"{_OBJECTIVE}request_tpot_seconds",
        f"{_EPP}request_streaming_tpot_seconds",
        "Time per output token after the first, of streams.",
        _TPOT,
        _tpot,
        _STREAMING_TPOT,
    ),
    Row(
        f"{_OBJECTIVE}request_duration_seconds",
        f"{_EPP}request_duration_seconds",
        "From request to the response's end.",
        _UP_TO_HOUR,
        lambda e: e.duration_s,
    ),
    Row(
        f"{_OBJECTIVE}request_sizes",
        f"{_EPP}request_size_bytes",
        "Bytes of request bodies.",
        _REQUEST_BYTES,
        lambda e: e.request_bytes,
    ),
    Row(
        f"{_OBJECTIVE}response_sizes",
        f"{_EPP}response_size_bytes",
        "Bytes of response bodies.",
        _RESPONSE_BYTES,
        _response_bytes,
    ),
    Row(
        f"{_OBJECTIVE}input_tokens",
        f"{_EPP}request_input_tokens",
        "Prompt tokens by the response's word.",
        _INPUT,
        _prompt,
    ),
    Row(
        f"{_OBJECTIVE}output_tokens",
        f"{_EPP}request_output_tokens",
        "Output tokens by the response's word.",
        _OUTPUT,
        _output,
    ),
    Row(
        f"{_OBJECTIVE}prompt_cached_tokens",
        f"{_EPP}request_cached_tokens",
        "Cached prompt tokens by the response's word.",
        _INPUT,
        _cached,
    ),
    Row(
        f"{_OBJECTIVE}normalized_time_per_output_token_seconds",
        f"{_EPP}request_ntpot_seconds",
        "Duration by output token.",
        _NTPOT,
        _ntpot,
    ),
)
"""Labels: `model_name`, `target_model_name`; llm-d's `fairness_id` and `priority` besides."""
TTFT_LLMD = Row("", f"{_EPP}request_ttft_seconds", "Time to first token of streams.", _TTFT, lambda e: e.ttft_s)
"""Has the label `streaming`, too."""
CHOICES: tuple[Row, ...] = (
    Row(
        f"{_EXTENSION}scheduler_e2e_duration_seconds",
        f"{_EPP}scheduler_e2e_duration_seconds",
        "Time to choose an endpoint, from a whole request.",
        _SCHEDULING,
        scheduling_s,
    ),
)
"""Without labels, over all requests that were decided."""
PREFIXES: tuple[Row, ...] = (
    Row(
        f"{_EXTENSION}prefix_indexer_hit_ratio",
        f"{_EPP}prefix_indexer_hit_ratio",
        "Share of a prompt that the chosen endpoint is believed to hold.",
        _RATIO,
        hit_ratio,
    ),
    Row(
        f"{_EXTENSION}prefix_indexer_hit_bytes",
        f"{_EPP}prefix_indexer_hit_bytes",
        "Bytes of a prompt that the chosen endpoint is believed to hold.",
        _HIT_BYTES,
        hit_bytes,
    ),
)
"""Without labels in GIE's family, with those of the plugin in llm-d's."""
ERRORS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    429: "ResourceExhausted",
    503: "ServiceUnavailable",
}
"""Codes of what the picker refuses, by status; other 4xx are `BadRequest`, the rest `Internal`."""
MODEL_SERVER_ERROR = "ModelServerError"
"""Of what an engine answered with 400 or more."""
