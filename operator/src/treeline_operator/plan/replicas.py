"""The number of replicas that a pool should have, and of its pods that compute prompts, from its pickers' reports.

Each measure yields a number, and the largest counts. Scaling up is immediate. Scaling down waits until the smaller
number was enough for a whole window, so the history keeps the numbers needed within it. The history starts with the
present replicas: an operator that has just started, or had no report for a while, removes no pod before a window has
passed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from treeline_wire.signals import PoolSignals

from treeline_operator.api.lifecycle import Autoscaling, PickerScaling
from treeline_operator.api.prefill import Prefill

_TOLERANCE = 0.1
"""Share by which a predicted time may miss its target without a change of replicas."""
_STEEPEST = 2.0
"""The time to first token multiplies replicas by at most this: it does not fall in proportion, and new pods take
time."""
_MOST = 1000
_BUSY = 0.7
"""Share of the time that pods may spend on prompts: more, and prompts wait for each other for long."""


@dataclass(frozen=True, slots=True)
class PromptTarget:
    """The bounds of the pods that compute prompts."""

    least: int
    most: int
    window_s: float = 300.0

    @classmethod
    def of(cls, own: Prefill, auto: Autoscaling) -> PromptTarget:
        """From `spec.prefill`; without bounds there for the advice alone."""
        least = own.min_replicas or 1
        return cls(least, own.max_replicas or _MOST, float((auto.picker or PickerScaling()).scale_down_seconds))

    def asks(self, pool: PoolSignals, replicas: int) -> Iterator[Ask]:
        """The number that the prompts need. A little more than the present pods should do adds none."""
        load = pool.asked.prompt_load
        needed = load / _BUSY
        few = replicas < needed <= (1.0 + _TOLERANCE) * replicas
        yield Ask(replicas if few else math.ceil(needed), f"prompts keep {load:.3g} pods busy")


@dataclass(frozen=True, slots=True)
class Target:
    """The scaling settings of a pool; `ttft_s` is None if the time to first token does not count."""

    least: int
    most: int
    queued_tokens: int
    in_flight_requests: int
    ttft_s: float | None = None
    window_s: float = 300.0

    @classmethod
    def of(cls, auto: Autoscaling) -> Target:
        """From `spec.autoscaling` of type Picker."""
        by = auto.picker or PickerScaling()
        least = 1 if auto.min_replicas is None else auto.min_replicas
        return cls(
            least,
            max(least, auto.max_replicas or 1),
            by.queued_tokens,
            by.in_flight_requests,
            None if by.ttft_milliseconds is None else by.ttft_milliseconds / 1000.0,
            float(by.scale_down_seconds),
        )

    def asks(self, pool: PoolSignals, replicas: int) -> Iterator[Ask]:
        """The number for each measure, at least one. Pods beyond the replicas (during a rollout) require no more."""
        asked = pool.asked
        waiting = pool.queued_tokens + asked.held.tokens
        yield Ask(-(-waiting // self.queued_tokens), f"{waiting} prompt tokens wait, {self.queued_tokens} a replica")
        requests = pool.in_flight_requests + asked.held.requests
        text = f"{_requests(requests)} to serve, {self.in_flight_requests} a replica"
        yield Ask(-(-requests // self.in_flight_requests), text)
        if asked.missed.requests:
            yield Ask(1, f"{_requests(asked.missed.requests)} found no pod ready")
        if pool.silent and (requests or asked.picks):
            yield Ask(replicas, f"{pool.silent} pods do not report their load, and requests arrive")
        if asked.picks:
            yield Ask(1, f"{_requests(asked.picks)} came lately")
        if self.ttft_s is not None and asked.ttft_p90_s is not None and pool.ready:
            ratio = min(asked.ttft_p90_s / self.ttft_s, _STEEPEST)
            if abs(ratio - 1.0) <= _TOLERANCE:
                ratio = 1.0
            text = f"the predicted time to first token is {asked.ttft_p90_s:.3g} s, {self.ttft_s:g} s is wanted"
            yield Ask(math.ceil(min(pool.ready, replicas) * ratio - 1e-9), text)


class Heard(NamedTuple):
    """The combined demand that a pool's pickers report. `whole`: all of them reported."""

    pool: PoolSignals
    whole: bool = True


class Ask(NamedTuple):
    """A number of replicas, and what requires it."""

    replicas: int
    why: str


History = tuple[tuple[float, int], ...]
"""`(when, required replicas)`, oldest first, without entries that a later one exceeds: the numbers fall."""


class Desired(NamedTuple):
    """`replicas` from now on, why, and the history to come with the next time."""

    replicas: int
    why: str
    history: History


def desired(heard: Heard | None, target: Target | PromptTarget, replicas: int, history: History, now: float) -> Desired:
    """The number of replicas, given the present `replicas`.

    `heard` is None while no picker reports: then only the bounds apply. `now` is in seconds of any monotonic clock.
    """
    if heard is None:
        ask = Ask(replicas, "no picker reports")
    else:
        ask = max(target.asks(heard.pool, replicas), key=lambda one: one.replicas)
        if replicas > 0 and not heard.pool.ready and ask.replicas < 1:
            ask = Ask(1, "no pod has been ready yet")
        if not heard.whole and ask.replicas < replicas:
            ask = Ask(replicas, "not all pickers report")
    bounded = min(max(ask.replicas, target.least), target.most)
    known = history or ((now, replicas),)
    known = _remember(known, bounded, now, target.window_s)
    if bounded >= replicas:
        return Desired(bounded, _bound(ask, bounded), known)
    kept = min(max(known[0][1], target.least), target.most)
    why = f"for {target.window_s:g} s demand was no higher: {_bound(ask, bounded)}"
    return Desired(kept, why, known) if kept < replicas else Desired(replicas, "", known)


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count != 1)}"


def _remember(history: History, replicas: int, now: float, window_s: float) -> History:
    """The history with one more entry, without entries that it reaches or exceeds, and without those before the
    window."""
    kept = tuple((at, number) for at, number in history if at > now - window_s and number > replicas)
    return (*kept, (now, replicas))


def _bound(ask: Ask, bounded: int) -> str:
    if ask.replicas == bounded:
        return ask.why
    return (
        f"{ask.why}, which asks for {ask.replicas}; {bounded} is the {'most' if ask.replicas > bounded else 'fewest'}"
    )
