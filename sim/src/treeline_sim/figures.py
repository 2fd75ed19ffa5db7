"""The figures of a run, and the table of several policies side by side."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from treeline_sim.routers import ORACLES, TraceRequest
from treeline_sim.simulation import Outcome

HIT_REFERENCES = tuple(ORACLES)
"""Routers that see the real caches: other policies are compared with the better of their hit rates."""


class Figures(msgspec.Struct, frozen=True):
    """The figures of one policy on one trace. `hit_rate` is the share of prompt tokens that came from a cache, over all
    requests with a first token. `load_cov`: standard deviation ÷ mean of the endpoints' requests, sampled every second,
    averaged over samples with at least one request for each two endpoints. `itl_p99_ms`: of the times between two
    tokens of a request. `request_s`: mean of the times until the last token. `forms` counts requests.
    """

    policy: str
    requests: int
    hit_rate: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    output_tokens_s: float
    errors: int
    load_cov: float
    retractions: int
    simulated_s: float
    itl_p99_ms: float = 0.0
    request_s: float = 0.0
    forms: dict[str, int] = {}


def figures_of(policy: str, outcome: Outcome) -> Figures:
    """Return the figures of a run's outcome; times are 0 if no request had a first token."""
    answered = [served for served in outcome.served if served.ttft_s is not None]
    ttft_ms = [1000 * served.ttft_s for served in answered if served.ttft_s is not None] or [0.0]
    p50, p90, p99 = _percentiles(ttft_ms)
    prompt = sum(served.prompt_tokens for served in answered)
    return Figures(
        policy=policy,
        requests=len(outcome.served),
        hit_rate=sum(served.cached_tokens for served in answered) / max(1, prompt),
        ttft_p50_ms=p50,
        ttft_p90_ms=p90,
        ttft_p99_ms=p99,
        output_tokens_s=outcome.output_tokens / outcome.ended_at if outcome.ended_at else 0.0,
        errors=sum(bool(served.error) for served in outcome.served),
        load_cov=_cov(outcome.queued),
        retractions=outcome.retractions,
        simulated_s=outcome.ended_at,
        itl_p99_ms=_percentiles(list(outcome.gaps.elements()) or [0])[2] / 100,
        request_s=statistics.fmean([served.ended_at - served.at for served in answered] or [0.0]),
        forms=Counter(served.form for served in outcome.served),
    )


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 50th, 90th and 99th percentiles, interpolated linearly between neighbours."""
    cuts = statistics.quantiles(values if len(values) > 1 else [*values, *values], n=100, method="inclusive")
    return cuts[49], cuts[89], cuts[98]


def _cov(samples: Sequence[Sequence[int]]) -> float:
    busy = [sample for sample in samples if sum(sample) >= len(sample) / 2]
    return statistics.fmean(statistics.pstdev(one) / statistics.fmean(one) for one in busy) if busy else 0.0


def endless_hit_rate(trace: Iterable[TraceRequest], block_size: int) -> float:
    """Return the hit rate of one unlimited cache for all endpoints that knows a prompt as soon as it arrives: an upper
    bound for every router, and out of reach with less memory than the trace needs.
    """
    seen: set[int] = set()
    cached = total = 0
    for request in trace:
        found = 0
        for block in request.prompt.blocks:
            if block not in seen:
                break
            found += 1
        cached += min(found, (request.prompt.tokens - 1) // block_size) * block_size
        total += request.prompt.tokens
        seen.update(request.whole.blocks)
    return cached / total if total else 0.0


class Compared(msgspec.Struct, frozen=True):
    """A policy's figures relative to others'; None without a reference. `hit_vs_oracle`: to the better of the oracles.
    `ttft_p90_vs_best` and `hit_vs_best`: to the best other policy, without oracles.
    """

    figures: Figures
    hit_vs_oracle: float | None
    hit_vs_best: float | None
    ttft_p90_vs_best: float | None


def compare(found: Sequence[Figures]) -> list[Compared]:
    """Compare all policies of one trace."""
    oracle = max((one.hit_rate for one in found if one.policy in HIT_REFERENCES), default=0.0)
    compared = []
    for one in found:
        others = [other for other in found if other is not one and other.policy not in HIT_REFERENCES]
        best_hit = max((other.hit_rate for other in others), default=0.0)
        best_ttft = min((other.ttft_p90_ms for other in others), default=0.0)
        compared.append(
            Compared(
                one, _ratio(one.hit_rate, oracle), _ratio(one.hit_rate, best_hit), _ratio(one.ttft_p90_ms, best_ttft)
            )
        )
    return compared


def _ratio(value: float, by: float) -> float | None:
    return value / by if by else None


HEADER = (
    "policy",
    "hit rate",
    "÷ oracle",
    "TTFT p50 ms",
    "p90",
    "p99",
    "p90 ÷ best other",
    "output tok/s",
    "errors",
    "load CoV",
)


def lines_of(found: Sequence[Figures]) -> list[list[str]]:
    """Return a line for each policy, in the order of `HEADER`."""
    return [
        [
            one.figures.policy,
            f"{one.figures.hit_rate:.3f}",
            _shown(one.hit_vs_oracle),
            *(f"{value:,.1f}" for value in (one.figures.ttft_p50_ms, one.figures.ttft_p90_ms, one.figures.ttft_p99_ms)),
            _shown(one.ttft_p90_vs_best),
            f"{one.figures.output_tokens_s:,.0f}",
            str(one.figures.errors),
            f"{one.figures.load_cov:.2f}",
        ]
        for one in compare(found)
    ]


def _shown(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3f}"
