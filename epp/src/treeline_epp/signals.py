"""The demand for pools: counts of requests, the picture of them, and the stream of pictures.

`Demand` is called for each pick, and for each request whose pool has no ready endpoint. All other data are read from
their owners when a picture is made.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Protocol

from msgspec.structs import replace
from treeline_wire.signals import (
    HEARTBEAT_S,
    MOST_COUNT,
    MOST_PER_S,
    MOST_SECONDS,
    NOTHING_WAITS,
    RECENT_S,
    Asked,
    PoolSignals,
    Signals,
    Waiting,
    encode,
)

from treeline_epp.endpoints.transfer import Role
from treeline_epp.metrics import Sample
from treeline_epp.picking.endpoint import Endpoint

NOW: Final = "/signals/now"
"""The page of one picture; the stream is at `treeline_wire.signals.PATH`."""
_MOST_PICKS: Final = 512
_FADES_S: Final = 60.0
"""Seconds in which the load of prompts fades to a third."""
_MOST_MODELS: Final = 100
_MOST_LETTERS: Final = 256
"""Longest name or id from a client."""
_OTHER_MODELS: Final = ""
"""Stands for all models beyond the first `_MOST_MODELS`: engines that take any name may be asked for many."""


class Held(Protocol):
    """The waiting requests of a pool."""

    @property
    def requests(self) -> int:
        """The number of requests."""

    @property
    def uncached_tokens(self) -> int:
        """The tokens of their prompts that must be computed."""


@dataclass(slots=True)
class _Recent:
    """The recent demand for one model in a pool: its picks (when, predicted seconds to the first token), and the
    requests that found no ready endpoint (id → when, tokens), oldest first. A repeated or retried request counts once.
    """

    picks: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_PICKS))
    missed: dict[str, tuple[float, int]] = field(default_factory=dict)

    def miss(self, id: str, tokens: int, now: float) -> None:
        """Count a request that found no ready endpoint. O(1)."""
        before = self.missed.pop(id, (now, 0))
        if len(self.missed) >= _MOST_PICKS:
            del self.missed[next(iter(self.missed))]
        self.missed[id] = now, max(before[1], tokens)

    def forget(self, before: float) -> bool:
        """Drop older entries; return whether none are left."""
        while self.picks and self.picks[0][0] < before:
            self.picks.popleft()
        for id, (at, _) in list(self.missed.items()):
            if at >= before:
                break
            del self.missed[id]
        return not self.picks and not self.missed


class Demand:
    """The recent demand for each pool. O(1) and a fraction of a microsecond for each request. `held` returns the
    waiting requests of each pool; their owner sets it.
    """

    def __init__(self) -> None:
        self.held: Callable[[], Mapping[str, Held]] = dict
        self._recent: dict[str, dict[str, _Recent]] = {}
        self._prompts: dict[str, tuple[float, float]] = {}
        """Pool → the time of its last prompt, and the load then."""
        self._unnamed = 0

    def picked(self, model: str | None, pool: str, ttft_s: float, now: float, prompt_s: float = 0.0) -> None:
        """Count a request that was given an endpoint of this pool, with this prediction; `prompt_s` are the seconds
        that its prompt takes another one."""
        self._of(pool, model).picks.append((now, ttft_s))
        if prompt_s:
            self._prompts[pool] = now, self._prompt_load(pool, now) + prompt_s / _FADES_S

    def _prompt_load(self, pool: str, now: float) -> float:
        at, load = self._prompts.get(pool, (now, 0.0))
        return load * math.exp((at - now) / _FADES_S)

    def missed(self, id: str, pool: str, model: str | None, tokens: int, now: float) -> None:
        """Count a request that found no ready endpoint of the pool: it is refused, waits, or goes to another pool."""
        if not id:
            self._unnamed += 1
            id = f"#{self._unnamed}"
        self._of(pool, model).miss(id[:_MOST_LETTERS], tokens, now)

    def asked(self, now: float) -> dict[str, tuple[Asked, dict[str, Asked]]]:
        """Return the demand by pool, for all of it and by model; only pools with any demand. O(picks)."""
        self._forget(now - RECENT_S)
        self._prompts = {pool: one for pool, one in self._prompts.items() if self._prompt_load(pool, now) >= 0.005}
        waiting = {
            pool: Waiting(min(held.requests, MOST_COUNT), min(held.uncached_tokens, MOST_COUNT))
            for pool, held in self.held().items()
            if held.requests
        }
        return {
            pool: (
                replace(
                    _asked(self._recent.get(pool, {}).values(), waiting.get(pool, NOTHING_WAITS)),
                    prompt_load=round(min(self._prompt_load(pool, now), MOST_SECONDS), 2),
                ),
                {name: _asked([recent]) for name, recent in self._recent.get(pool, {}).items()},
            )
            for pool in dict.fromkeys([*self._recent, *waiting, *self._prompts])
        }

    def _of(self, pool: str, model: str | None) -> _Recent:
        models = self._recent.setdefault(pool, {})
        name = (model or _OTHER_MODELS)[:_MOST_LETTERS]
        if (known := models.get(name)) is not None:
            return known
        # A client may send half a surrogate pair, which cannot be encoded.
        name = _OTHER_MODELS if len(models) >= _MOST_MODELS else name.encode(errors="replace").decode()
        return models.setdefault(name, _Recent())

    def _forget(self, before: float) -> None:
        for pool, models in list(self._recent.items()):
            for name, recent in list(models.items()):
                if recent.forget(before):
                    del models[name]
            if not models:
                del self._recent[pool]


def _asked(found: Iterable[_Recent], held: Waiting = NOTHING_WAITS) -> Asked:
    recent = list(found)
    times = sorted(seconds for one in recent for _, seconds in one.picks)
    missed = [max(0, tokens) for one in recent for _, tokens in one.missed.values()]
    half, most = (_quantile(times, 0.5), _quantile(times, 0.9)) if times else (None, None)
    return Asked(held, Waiting(len(missed), sum(missed)), len(times), half, most)


def _quantile(ordered: list[float], share: float) -> float:
    """Return the smallest value that is at least this share of all."""
    return min(max(0.0, ordered[math.ceil(share * len(ordered)) - 1]), MOST_SECONDS)


def picture(
    demand: Demand, endpoints: Iterable[Endpoint], pools: Iterable[str], now: float, *, synced: bool
) -> Signals:
    """Return the present picture of these pools and of all that have endpoints. O(endpoints)."""
    asked = demand.asked(now)
    by_pool: dict[str, list[Endpoint]] = {pool: [] for pool in chain(pools, asked)}
    for endpoint in endpoints:
        if not endpoint.draining:
            by_pool.setdefault(endpoint.spec.pool, []).append(endpoint)
    return Signals(synced, {name: _pool(*asked.get(name, (Asked(), {})), its, now) for name, its in by_pool.items()})


def _pool(asked: Asked, models: dict[str, Asked], endpoints: list[Endpoint], now: float) -> PoolSignals:
    endpoints = [endpoint for endpoint in endpoints if endpoint.spec.role is not Role.PREFILL]
    loads = [endpoint.load for endpoint in endpoints]
    flights = [load.in_flight(now) for load in loads]
    return PoolSignals(
        asked,
        models,
        ready=len({e.spec.server for e in endpoints if e.eligible}),
        queued_tokens=_total(load.queue(now)[0] for load in loads),
        in_flight_requests=_total(
            len(load.reservations) if flight is None else flight for load, flight in zip(loads, flights, strict=True)
        ),
        in_flight_tokens=_total(load.reservations.tokens for load in loads),
        silent=len(
            {e.spec.server for flight, e in zip(flights, endpoints, strict=True) if flight is None and e.eligible}
        ),
    )


def _total(counts: Iterable[int]) -> int:
    """Return the sum within the bounds of listeners, whatever engines report."""
    return min(sum(max(0, count) for count in counts), MOST_COUNT)


async def stream(look: Callable[[], Signals | Awaitable[Signals]]) -> AsyncGenerator[bytes]:
    """Yield lines for one listener, for ever: the picture of `look` on each change, and as a heartbeat."""
    said: Signals | None = None
    quiet = 0
    while True:
        found = look()
        seen = found if isinstance(found, Signals) else await found
        if seen != said or quiet >= HEARTBEAT_S * MOST_PER_S:
            said, quiet = seen, 0
            yield encode(seen)
        quiet += 1
        await asyncio.sleep(1.0 / MOST_PER_S)


def samples(signals: Signals) -> Iterator[Sample]:
    """Yield the picture as samples for Prometheus, and for autoscalers that query it."""
    for name, pool in signals.pools.items():
        labels, asked = {"pool": name}, pool.asked
        text = "Requests that wait in this picker for an endpoint, by pool."
        yield "gauge", "pool_held_requests", text, labels, asked.held.requests
        text = f"Requests of the last {RECENT_S:g} s that found no endpoint ready, by pool."
        yield "gauge", "pool_missed_requests", text, labels, asked.missed.requests
        text = "Prompt tokens that wait to be computed, at endpoints that answer or in this picker, by pool."
        yield "gauge", "pool_queued_tokens", text, labels, pool.queued_tokens + asked.held.tokens
        text = "Requests that were sent to endpoints and have not ended, by pool."
        yield "gauge", "pool_in_flight_requests", text, labels, pool.in_flight_requests
        text = "Endpoints that are ready for requests, by pool."
        yield "gauge", "pool_ready_endpoints", text, labels, pool.ready
        text = f"Predicted seconds to the first token for requests of the last {RECENT_S:g} s, by pool and quantile."
        for quantile, seconds in (("0.5", asked.ttft_p50_s), ("0.9", asked.ttft_p90_s)):
            if seconds is not None:
                yield "gauge", "pool_predicted_ttft_seconds", text, {**labels, "quantile": quantile}, seconds
