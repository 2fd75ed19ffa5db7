"""Figures from records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from treeline_bench.serving.messages import UNFINISHED, LoadReport, Record
from treeline_bench.stats import at_percent

MEASURES = ("ttft", "tpot", "e2e")
"""Measures that a good answer may be limited by."""


class Figures(msgspec.Struct, frozen=True):
    """The statistics of many values. Percentiles as in `treeline_bench.stats`."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figures | None:
        """None for no values."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (at_percent(ordered, q) for q in (50, 90, 99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


class Client(msgspec.Struct, frozen=True):
    """Whether the client kept up. `late_ms`: delay of starting due requests; `lag_ms`: delay of timers, and so of
    seeing arrivals; `busy_share`: of a core, in the busiest process."""

    processes: int
    late_ms_p99: float
    lag_ms_p99: float
    busy_share: float

    @property
    def words(self) -> str:
        """One line for people."""
        lag = f"late {self.late_ms_p99:.1f} ms, timers {self.lag_ms_p99:.1f} ms (p99)"
        return f"processes: {self.processes}, busy {self.busy_share:.0%}, {lag}"

    @property
    def trouble(self) -> str:
        """A warning; empty if all is well."""
        found = []
        if self.busy_share > BUSY:
            found.append(f"a load process was busy {self.busy_share:.0%} of the time")
        if self.late_ms_p99 > LATE_MS:
            found.append(f"requests were sent {self.late_ms_p99:.0f} ms late (p99)")
        if self.lag_ms_p99 > LATE_MS:
            found.append(f"timers were {self.lag_ms_p99:.0f} ms late (p99)")
        return " and ".join(found)


BUSY = 0.85
LATE_MS = 20.0


class Summary(msgspec.Struct, frozen=True):
    """One load on one server. Times in milliseconds except `duration_s`; tokens by the server's count.

    ttft: due to first output. itl: between chunks of output. tpot: (last − first) ÷ (tokens − 1). e2e: due to the end
    of the answer. Rates: whole answers and their tokens, from the start to the last end.
    """

    duration_s: float
    requests: int
    completed: int
    unfinished: int
    errors: dict[str, int]
    """Kind → number of errors, without requests that we ended."""
    examples: dict[str, str]
    """Kind → an example's message."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """None if the server does not report it."""
    short: int
    """Answers with fewer tokens than requested."""
    prompt_difference: int
    """Additional tokens of first prompts by the server's count (templates, BOS)."""
    tokens_per_chunk: float
    mean_concurrency: float
    ttft_ms: Figures | None
    itl_ms: Figures | None
    tpot_ms: Figures | None
    e2e_ms: Figures | None
    good: int | None
    """Answers within the limits; None without limits."""
    client: Client
    gone: str = ""

    @property
    def requests_s(self) -> float:
        return self.completed / self.duration_s

    @property
    def prompt_tokens_s(self) -> float:
        return self.prompt_tokens / self.duration_s

    @property
    def output_tokens_s(self) -> float:
        return self.output_tokens / self.duration_s

    @property
    def goodput_s(self) -> float | None:
        """Good answers per second."""
        return None if self.good is None else self.good / self.duration_s

    @property
    def cached_share(self) -> float | None:
        """The cached share of prompt tokens."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    @property
    def failed(self) -> int:
        return sum(self.errors.values())


def measures(record: Record) -> dict[str, float | None]:
    """ttft, tpot and e2e of a whole answer in ms; None if absent."""
    first = record.tokens_ns[0] if record.tokens_ns else None
    tpot = None
    if first is not None and record.output_tokens > 1 and len(record.tokens_ns) > 1:
        tpot = (record.tokens_ns[-1] - first) / (record.output_tokens - 1) / 1e6
    return {
        "ttft": None if first is None else (first - record.due_ns) / 1e6,
        "tpot": tpot,
        "e2e": (record.done_ns - record.due_ns) / 1e6,
    }


def summarise(reports: Sequence[LoadReport], limits: Mapping[str, float]) -> Summary:
    """All processes of a load together. `limits`: of a good answer, in ms; may be empty."""
    records = [record for one in reports for record in one.records]
    whole = [record for record in records if not record.error]
    failed = [record for record in records if record.error not in ("", UNFINISHED)]
    measured = [measures(record) for record in whole]
    begin = min(one.begin_ns for one in reports)
    end = max((record.done_ns for record in records), default=begin)
    duration_s = max(end - begin, 1) / 1e9
    chunks = sum(len(record.tokens_ns) for record in whole)
    output_tokens = sum(record.output_tokens for record in whole)
    tells = any(record.cached_tokens >= 0 for record in whole)
    firsts = [record for record in whole if record.turn == 0]
    return Summary(
        duration_s=duration_s,
        requests=len(records),
        completed=len(whole),
        unfinished=len(records) - len(whole) - len(failed),
        errors=dict(Counter(record.error for record in failed).most_common()),
        examples={record.error: record.detail for record in reversed(failed)},
        prompt_tokens=sum(record.prompt_tokens for record in whole),
        output_tokens=output_tokens,
        cached_tokens=sum(max(record.cached_tokens, 0) for record in whole) if tells else None,
        short=sum(record.output_tokens < record.asked_output_tokens for record in whole),
        prompt_difference=sum(record.prompt_tokens - record.asked_prompt_tokens for record in firsts),
        tokens_per_chunk=output_tokens / chunks if chunks else 0.0,
        mean_concurrency=sum(record.done_ns - record.sent_ns for record in records) / 1e9 / duration_s,
        ttft_ms=Figures.of([value for one in measured if (value := one["ttft"]) is not None]),
        itl_ms=Figures.of([(b - a) / 1e6 for record in whole for a, b in pairwise(record.tokens_ns)]),
        tpot_ms=Figures.of([value for one in measured if (value := one["tpot"]) is not None]),
        e2e_ms=Figures.of([value for one in measured if (value := one["e2e"]) is not None]),
        good=sum(is_good(one, limits) for one in measured) if limits else None,
        client=_client(reports, records),
        gone=next((one.gone for one in reports if one.gone), ""),
    )


def _client(reports: Sequence[LoadReport], records: Sequence[Record]) -> Client:
    late = Figures.of([(record.begun_ns - record.due_ns) / 1e6 for record in records])
    lag = Figures.of([each / 1e6 for one in reports for each in one.lag_ns])
    return Client(
        processes=len(reports),
        late_ms_p99=late.p99 if late else 0.0,
        lag_ms_p99=lag.p99 if lag else 0.0,
        busy_share=max(one.busy_share for one in reports),
    )


def parse_limits(words: Sequence[str]) -> dict[str, float]:
    """Measure → milliseconds. Raises ValueError, which says how to write a limit."""
    limits: dict[str, float] = {}
    for word in words:
        name, colon, number = word.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = 0.0
        if name not in MEASURES or not colon or not limit > 0:
            raise ValueError(f"a limit is one of {', '.join(MEASURES)}, a colon and milliseconds, not {word!r}")
        if name in limits:
            raise ValueError(f"there are two limits for {name}")
        limits[name] = limit
    return limits


def is_good(measured: Mapping[str, float | None], limits: Mapping[str, float]) -> bool:
    """Whether an answer kept all limits. A measure it lacks (tpot of a single token) counts as kept."""
    return all((value := measured[name]) is None or value <= limit for name, limit in limits.items())
