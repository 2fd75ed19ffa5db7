"""The load of an endpoint as the picker estimates it: its last report, requests routed since, and its prefill rate.

Theory of operation. A report made at time t knows everything that reached the engine before t, so

    queued tokens now = uncached tokens waiting at t + reservations opened after t.

When a pick reaches its engine is known to `TRANSIT_S` only, so the sum may count a request twice. That would hurt
bursts of siblings: the first one computes their whole prefix, would count double, and the others would go elsewhere.
So where no more requests wait than there are reservations, the waiting ones were picked here, and the reservations
bound the sum. What they do not explain of the report came from other pickers, and stays in it.

Without a fresh report (an engine that reports nothing, or has stopped) the queue is the open reservations alone.
The metrics page of an engine that pushes no reports is scraped (`scraper.py`). It is a report like any other, made when
the page was asked for, with three differences. It counts waiting requests and not their tokens: each is assumed to be
as long as those picked lately, since most of them were picked here, or else as those that the engine has answered. The
engine counts a step late, so reservations of the last `SCRAPE_LAG_S` are added. And its response headers come before
the prefill, so they do not end a reservation: the next report does, or the time at which the prefill should be done.

Prefill speed comes, in order of trust, from the engine (our own report, the deltas of SGLang's two running totals, or
what `scraped.py` makes of a page's totals), or from times to first token of our streaming responses. An endpoint with
little work has few and old measurements, and one stall of its machine is in all of them. The less they can be trusted,
the more the plan uses the rate of the fastest peer (`trust`, `prefill_rate`). So an endpoint that looked slow gets
requests and is measured again, while one that is slow under load stays known as slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from treeline_wire.load import LoadStat, TreelineLoad

from treeline_epp.endpoints.reservations import Number, Reservation, Reservations
from treeline_epp.endpoints.scraped import (
    ASSUMED_PROMPT_TOKENS,
    MIN_TRAINING_TOKENS,
    Growth,
    ScrapedLoad,
    ScrapedTotals,
)

EngineLoad: TypeAlias = LoadStat | TreelineLoad | ScrapedLoad

STALE_AFTER_S = 3.0
"""A report older than this is stale: three heartbeats."""
TRANSIT_S = 0.05
"""A pick reaches its engine this much later: a report of time t may lack reservations opened up to t minus this."""
UNKNOWN_FACTOR = 2
"""Weight, in the bound of a queue, of reported work that no reservation explains."""
SCRAPE_LAG_S = 0.5
"""The same for a scraped report: an engine's metrics are those of the end of its last step, and a step that prefills
is long: a request that begins on an idle vLLM is not in them until then. So some requests count twice."""
DEFAULT_PREFILL_RATE = 4000.0
"""Tokens per second that are assumed while no endpoint was measured."""
_ALPHA = 0.2
"""Weight of a new sample in moving averages …"""
_ALPHA_UP = 0.5
"""… and of one that is faster than the rate so far."""
TRUSTED_SAMPLES = 4.0
"""This many new measurements weigh as much as the peers' rate."""
MOST_SAMPLES = 32.0
"""More measurements than these add nothing."""
TRUST_HALVES_S = 10.0
"""Measurements of this age count half, of twice this age a third."""
_MOST_QUEUED_TOKENS = 1e12
OVERLOADED_FOR_S = 1.0
"""After "no room", an endpoint counts as full this long, or until its next report."""


@dataclass(frozen=True, slots=True)
class Report:
    """A load report in the picker's own terms. Zeros mean "unknown". `tokens_held` of `tokens_total` are in memory,
    running or cached (SGLang's report counts the running ones only). `in_flight` are all requests that the engine has.
    A decode step gives each request `step_tokens`. `adapters` are those that our runtime has, by digest, and whether
    each has a slot on the device. An engine that is scraped tells those with running requests, by name:
    `only_resident`.
    """

    at: float
    running: int = 0
    waiting: int = 0
    in_flight: int = 0
    queued_tokens: int = 0
    tokens_held: int = 0
    tokens_total: int = 0
    max_running: int = 0
    decode_step_s: float = 0.0
    step_tokens: float = 1.0
    draining: bool = False
    adapters: Mapping[str, bool] = field(default_factory=dict)
    only_resident: bool = False
    lag_s: float = TRANSIT_S

    @property
    def token_s(self) -> float:
        """The seconds from a token of a request to the next: of a step, or less where it guesses tokens ahead."""
        return self.decode_step_s / self.step_tokens

    @property
    def knows_until(self) -> float:
        """The time from which reservations may be missing in this report."""
        return self.at - self.lag_s

    @property
    def fresh_until(self) -> float:
        """The time until which the report counts as recent."""
        return self.at + STALE_AFTER_S

    def queue(self, reserved: Reservations) -> tuple[int, int]:
        """Return `(uncached tokens, requests)` before a new pick: the report's, and reservations that it may lack."""
        newer, requests = reserved.newer_than(self.knows_until)
        tokens = self.queued_tokens + newer
        if self.waiting <= len(reserved):
            unknown = max(0, self.queued_tokens - reserved.tokens)
            tokens = min(tokens, reserved.tokens + UNKNOWN_FACTOR * unknown)
        return tokens, self.waiting + requests


def report_of(load: LoadStat | TreelineLoad, at: float) -> Report:
    """Convert either wire form."""
    if isinstance(load, TreelineLoad):
        page = max(1, load.page_size)
        return Report(
            at=at,
            running=load.running,
            waiting=load.waiting,
            in_flight=max(load.in_flight, load.running + load.waiting),
            queued_tokens=load.waiting_uncached_tokens,
            tokens_held=(load.pages_used + load.pages_cached) * page,
            tokens_total=load.pages_total * page,
            max_running=load.max_running,
            decode_step_s=load.decode_step_ms / 1000.0,
            step_tokens=max(1.0, load.decode_step_tokens),
            draining=load.draining,
            adapters={digest: digest in load.resident for digest in load.digests.values()},
        )
    return Report(
        at=at,
        running=load.num_running,
        waiting=load.num_waiting,
        in_flight=load.num_running + load.num_waiting,
        queued_tokens=load.num_waiting_uncached_tokens,
        tokens_held=load.num_tokens,
        tokens_total=load.max_total_num_tokens,
        max_running=load.max_running_requests,
    )


@dataclass(slots=True)
class EndpointLoad:
    """The load of one endpoint. All methods are O(1) but for the reservations newer than the report."""

    report: Report | None = None
    reservations: Reservations = field(default_factory=Reservations)
    reported_rate: float = 0.0
    """Measured by the engine, and learned from our own responses; 0 while unknown."""
    learned_rate: float = 0.0
    rate_samples: float = 0.0
    """Measurements of its rate, as they counted at `measured_at`."""
    measured_at: float = 0.0
    host_rate: float = 0.0
    """Tokens per second that the engine loads from host memory, and from disk; 0 where it does not tell."""
    disk_rate: float = 0.0
    peer_rate: float = 0.0
    """The same of pages that other endpoints have."""
    hit_share: float = 0.0
    """Share of prompt tokens that were cache hits, a moving average over answered requests."""
    fastest_step_s: float = float("inf")
    """The shortest decode step ever reported: that of a small batch."""
    overloaded_until: float = float("-inf")
    beats: bool = False
    """Whether the engine reports for as long as it lives, so that silence means trouble. Others may just be idle."""
    _prefills: Growth = field(default_factory=Growth)
    _scraped: ScrapedTotals | None = None

    def on_load(self, load: EngineLoad, now: float) -> None:
        """Take a report that arrived at `now`, or was requested then."""
        if now >= self.overloaded_until - OVERLOADED_FOR_S:
            self.overloaded_until = float("-inf")
        if isinstance(load, ScrapedLoad):
            self._on_scrape(load, now)
            return
        self.report = report_of(load, now)
        if isinstance(load, TreelineLoad):
            self.beats = True
            self.host_rate, self.disk_rate = load.host_tokens_per_s, load.disk_tokens_per_s
            self.peer_rate = load.peer_tokens_per_s
            if load.prefill_tokens_per_s > 0 and load.prefill_tokens_per_s != self.reported_rate:
                self.reported_rate = load.prefill_tokens_per_s
                self._on_measured(now)
            if load.decode_step_ms > 0:
                self.fastest_step_s = min(self.fastest_step_s, self.report.decode_step_s)
            return
        totals = float(load.total_prefill_uncached_tokens), float(load.total_prefill_busy_us)
        if (grown := self._prefills.step(totals, MIN_TRAINING_TOKENS)) is not None:
            self.reported_rate = _average(self.reported_rate, grown[0] * 1e6 / grown[1])
            self._on_measured(now)

    def _on_scrape(self, load: ScrapedLoad, at: float) -> None:
        learned = self._scraped = self._scraped or ScrapedTotals()
        if (rate := learned.on_scrape(load, at)) is not None:
            self.reported_rate = _average(self.reported_rate, rate)
            self._on_measured(at)
        if learned.step_s > 0:
            self.fastest_step_s = min(self.fastest_step_s, learned.step_s)
        prompt_tokens = self.reservations.typical_tokens or learned.prompt_tokens or ASSUMED_PROMPT_TOKENS
        self.report = Report(
            at=at,
            running=load.running,
            waiting=load.waiting,
            in_flight=load.running + load.waiting,
            queued_tokens=int(min(_MOST_QUEUED_TOKENS, load.waiting * prompt_tokens)),
            tokens_held=int(load.kv_usage * load.tokens_total),
            tokens_total=load.tokens_total,
            decode_step_s=learned.step_s,
            adapters=dict.fromkeys(load.adapters or (), True),
            only_resident=load.adapters is not None,
            lag_s=SCRAPE_LAG_S,
        )
        self.reservations.close_answered(self.report.knows_until)

    def on_answered(self, reservation: Reservation, now: float, *, began: bool) -> None:
        """Take the response headers of this pick; `began`: they came with the first token, so the prefill is done."""
        if began or self._scraped is None or not self.fresh(now):
            self.reservations.close(reservation)
        else:
            self.reservations.let_run(reservation, now)

    def on_overloaded(self, now: float) -> None:
        """Take a refusal for want of room: the endpoint is full until its next report says otherwise."""
        self.overloaded_until = now + OVERLOADED_FOR_S

    def train(self, uncached_tokens: int, queued_tokens: float, ttft_s: float, now: float) -> None:
        """Learn from a streaming response of ours: `ttft_s` after the pick, with that much work before it."""
        work = uncached_tokens + queued_tokens
        if ttft_s > 0 and work >= MIN_TRAINING_TOKENS:
            self.learned_rate = _average(self.learned_rate, work / ttft_s)
            if not self.reported_rate:
                self._on_measured(now)

    def train_hits(self, cached_tokens: int, prompt_tokens: int) -> None:
        """Learn how much of a prompt is usually cached here."""
        if prompt_tokens > 0:
            share = min(1.0, cached_tokens / prompt_tokens)
            self.hit_share += _ALPHA * (share - self.hit_share)

    @property
    def transfer_s(self) -> float:
        """The measured seconds for each token of a prompt that another engine has computed; 0 while unknown."""
        if self.peer_rate:
            return 1.0 / self.peer_rate
        return 0.0 if self._scraped is None else self._scraped.transfer_s

    def fresh(self, now: float) -> bool:
        """Return whether the last report is recent enough to be believed."""
        return self.report is not None and now <= self.report.fresh_until

    def silent(self, now: float) -> bool:
        """Return whether an engine that always reports has stopped doing so: it hangs, or the network to it is cut."""
        return self.beats and not self.fresh(now)

    def queue(self, now: float) -> tuple[int, int]:
        """Return `(uncached tokens, requests)` that a request picked now would find before it."""
        report = self.report
        if report is None or now > report.fresh_until:
            return self.reservations.tokens, len(self.reservations)
        return report.queue(self.reservations)

    def in_flight(self, now: float) -> int | None:
        """Return the requests that the endpoint has or is about to get; None where it does not report or has fallen
        silent.

        Requests that a report may lack count by their reservations, so an endpoint that was just picked never has 0.
        """
        if self.report is None or not self.fresh(now):
            return None
        _, newer = self.reservations.newer_than(self.report.knows_until)
        return max(self.report.in_flight + newer, len(self.reservations))

    def slower_s(self, report: Report) -> float:
        """Return by how much a token takes longer than a decode step of a small batch. 0 where at most one request
        runs: the length of its steps depends on the machine alone, and an idle engine reports an old step.
        """
        return max(0.0, report.token_s - self.fastest_step_s) if report.running > 1 else 0.0

    def _on_measured(self, now: float) -> None:
        old = _faded(self.rate_samples, self.measured_at, now)
        self.rate_samples, self.measured_at = min(MOST_SAMPLES, old + 1.0), now

    def own_rate(self) -> float:
        """Return the measured prefill tokens per second, 0 while nothing was measured."""
        return self.reported_rate or self.learned_rate

    def rate(self, fastest: float, now: float) -> float:
        """Return the rate to plan with: see `prefill_rate`."""
        return prefill_rate(self.own_rate(), trust(self.rate_samples, self.measured_at, now), fastest)


def trust(samples: Number, measured_at: Number, now: float) -> Number:
    """Return how far a rate of this many measurements is believed: 0 (none) to nearly 1. Elementwise for arrays."""
    faded = _faded(samples, measured_at, now)
    return faded / (faded + TRUSTED_SAMPLES)


def prefill_rate(own: Number, trust: Number, fastest: float) -> Number:
    """Return the prefill rate for planning: the endpoint's own, weighted by trust, and for the rest its fastest peer's.
    `fastest` is 0 where nothing was measured. Elementwise for arrays.
    """
    expected = fastest or DEFAULT_PREFILL_RATE
    return expected + (own - expected) * trust


def _faded(samples: Number, measured_at: Number, now: float) -> Number:
    """Return the present weight of measurements that weighed `samples` at `measured_at`."""
    return samples / (1.0 + (now - measured_at) / TRUST_HALVES_S)


def _average(old: float, sample: float) -> float:
    """Return a rate after one more measurement. It rises faster than it falls: a speed once reached can be reached
    again, while a slow measurement may have been a start, a stall, or work that the picker did not know of.
    """
    if old <= 0:
        return sample
    return old + (_ALPHA if sample < old else _ALPHA_UP) * (sample - old)
