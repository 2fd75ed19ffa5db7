"""By which way each pool's requests find what is cached, and why not by a better one: the one place that decides it.

    events    the engines publish what they hold, and a tokenizer that passed its self-test makes keys of it
    history   what was sent where before; with the tokenizer's keys, or with keys of our own form (`keyers`)

Endpoints are judged one by one (`way_of`); a pool goes by events if all of its endpoints do.
"""

from __future__ import annotations

import logging
from collections import Counter
from enum import StrEnum
from typing import NamedTuple

log = logging.getLogger(__name__)


class Way(StrEnum):
    """How prefixes are found. The values are metric labels, and words of `/endpoints`."""

    EVENTS = "events"
    HISTORY = "history"


_BETTER_FIRST = (Way.EVENTS, Way.HISTORY)


class WayReason(StrEnum):
    """Why an endpoint is not routed by events. The values are metric labels, and words of `/endpoints`."""

    NO_EVENTS = "NoEvents"
    EVENTS_UNREACHABLE = "EventsUnreachable"
    EVENTS_UNREADABLE = "EventsUnreadable"
    NOTHING_HEARD = "NothingHeard"
    NO_KEY_PAIR = "NoKeyPair"
    NO_TOKENIZER = "NoTokenizer"
    TOKENIZER_UNAVAILABLE = "TokenizerUnavailable"
    TOKENIZER_UNUSABLE = "TokenizerUnusable"


class Routing(NamedTuple):
    """The way of an endpoint or a pool. `reason` is empty where there is no better way; `message` says what to do, or
    which requests have no keys."""

    way: Way
    reason: str = ""
    message: str = ""


class TokenizerFacts(NamedTuple):
    """What became of an endpoint's tokenizer: it has one, it passed, or what is wrong with it or with getting
    it."""

    known: bool = False
    has_keys: bool = False
    problem: str | None = None
    awaited: bool = False
    """A flag names it, or the engine says that it serves it."""


class Unheard(NamedTuple):
    """Why the events of an endpoint do not arrive, or are not understood, although it is known where they come from,
    and what to do."""

    reason: WayReason
    message: str


def way_of(
    *,
    publishes: bool,
    keys_missing: bool,
    tokenizer: TokenizerFacts,
    no_events: str = "",
    unheard: Unheard | None = None,
) -> Routing:
    """The way of one endpoint. `publishes`: it is known where its events come from, and if not, `no_events` says why;
    `keys_missing`: they are encrypted, for keys that this picker has not. `unheard`: none of them arrives."""
    if keys_missing:
        return Routing(Way.HISTORY, WayReason.NO_KEY_PAIR, "the engine publishes with keys: give --curve-dir")
    if not publishes:
        message = no_events or "the engine publishes no KV events, or does not say where"
        message += " (docs/engines.md)"
        return Routing(Way.HISTORY, WayReason.NO_EVENTS, message)
    if unheard is not None:
        return Routing(Way.HISTORY, unheard.reason, f"{unheard.message} (docs/engines.md)")
    if tokenizer.has_keys:  # a problem then is that of its chat template
        return Routing(Way.EVENTS, message=tokenizer.problem or "")
    if tokenizer.known:
        message = tokenizer.problem or "the tokenizer gives no keys"
        return Routing(Way.HISTORY, WayReason.TOKENIZER_UNUSABLE, message)
    if tokenizer.awaited:
        message = tokenizer.problem or "the tokenizer is being fetched"
        return Routing(Way.HISTORY, WayReason.TOKENIZER_UNAVAILABLE, message)
    message = tokenizer.problem or "the engine serves no tokenizer: give --tokenizer MODEL=URI"
    return Routing(Way.HISTORY, WayReason.NO_TOKENIZER, message)


class RoutingWays:
    """The ways of all endpoints and of their pools. A change of a pool's is logged once, by `tell`."""

    def __init__(self) -> None:
        self._endpoints: dict[str, tuple[str, Routing]] = {}
        self._told: dict[str, Routing] = {}
        self._changed = False

    def set(self, endpoint: str, pool: str, routing: Routing) -> None:
        """An endpoint of this pool is routed so from now on."""
        if self._endpoints.get(endpoint) != (pool, routing):
            self._endpoints[endpoint] = pool, routing
            self._changed = True

    def remove(self, endpoint: str) -> None:
        """The endpoint has gone. Unknown names are ignored."""
        self._changed |= self._endpoints.pop(endpoint, None) is not None

    def pools(self) -> dict[str, Routing]:
        """Of each pool with endpoints the worst of their ways, with a word on how many have it. O(endpoints)."""
        pools: dict[str, Counter[Routing]] = {}
        for pool, routing in self._endpoints.values():
            pools.setdefault(pool, Counter())[routing] += 1
        return {pool: _worst(found) for pool, found in sorted(pools.items())}

    def counts(self) -> Counter[tuple[str, str, str]]:
        """Endpoints by pool, way and reason."""
        return Counter((pool, routing.way.value, routing.reason) for pool, routing in self._endpoints.values())

    def tell(self) -> None:
        """Log what has changed since the last time. O(1) when nothing has."""
        if not self._changed:
            return
        self._changed = False
        now = self.pools()
        for pool, routing in now.items():
            before = self._told.get(pool)
            if routing != before:
                level = logging.WARNING if routing.message else logging.INFO
                log.log(level, "pool %s is routed by %s", pool, ": ".join(filter(None, routing)))
        self._told = now


def _worst(found: Counter[Routing]) -> Routing:
    """The worst way; of those that have it the reason that most have, with one of their messages."""
    kinds: Counter[tuple[Way, str]] = Counter()
    for routing, count in found.items():
        kinds[routing[:2]] += count
    way, reason = max(kinds, key=lambda kind: (_BETTER_FIRST.index(kind[0]), kinds[kind], kind))
    told = {one.message: count for one, count in found.items() if one[:2] == (way, reason) and one.message}
    if not told:
        return Routing(way, reason)
    # The best way has no reason: then a message concerns some requests only, so count the endpoints that have one.
    count = kinds[way, reason] if reason else sum(told.values())
    first = max(told, key=lambda message: (told[message], message))
    if told[first] == found.total():
        return Routing(way, reason, first)
    one_of = "" if len(told) == 1 else "for example, "
    return Routing(way, reason, f"{count} of {found.total()} endpoints: {one_of}{first}")
