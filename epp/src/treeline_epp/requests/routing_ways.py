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


_Kinds = dict[tuple[Way, str], Counter[str]]
"""Of a pool: how many endpoints have a way, for a reason, with a message."""


class RoutingWays:
    """The ways of all endpoints and of their pools. A change of a pool's is logged once, by `tell`."""

    def __init__(self) -> None:
        self._endpoints: dict[str, tuple[str, Routing]] = {}
        self._pools: dict[str, _Kinds] = {}
        self._told: dict[str, Routing] = {}
        self._changed = False

    def set(self, endpoint: str, pool: str, routing: Routing) -> None:
        """An endpoint of this pool is routed so from now on."""
        if self._endpoints.get(endpoint) != (pool, routing):
            self.remove(endpoint)
            self._endpoints[endpoint] = pool, routing
            messages = self._pools.setdefault(pool, {}).setdefault((routing.way, routing.reason), Counter())
            messages[routing.message] += 1
            self._changed = True

    def remove(self, endpoint: str) -> None:
        """The endpoint has gone. Unknown names are ignored."""
        known = self._endpoints.pop(endpoint, None)
        if known is None:
            return
        pool, (way, reason, message) = known
        kinds = self._pools[pool]
        messages = kinds[way, reason]
        messages[message] -= 1
        if not messages[message]:
            del messages[message]
        if not messages:
            del kinds[way, reason]
        if not kinds:
            del self._pools[pool]
        self._changed = True

    def pools(self) -> dict[str, Routing]:
        """Of each pool with endpoints the worst of their ways, with a word on how many have it. O(messages)."""
        return {pool: _worst(kinds) for pool, kinds in sorted(self._pools.items())}

    def counts(self) -> Counter[tuple[str, str, str]]:
        """Endpoints by pool, way and reason."""
        kinds = ((pool, *key, found) for pool, kinds in self._pools.items() for key, found in kinds.items())
        return Counter({(pool, way.value, reason): found.total() for pool, way, reason, found in kinds})

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


def _worst(kinds: _Kinds) -> Routing:
    """The worst way; of those that have it the reason that most have, with one of their messages."""
    endpoints = sum(found.total() for found in kinds.values())
    _, count, key = max((_BETTER_FIRST.index(key[0]), found.total(), key) for key, found in kinds.items())
    found = kinds[key]
    told = {message: times for message, times in found.items() if message}
    if not told:
        return Routing(*key)
    if not key[1]:  # the best way: a message concerns some requests only, so count the endpoints that have one
        count = sum(told.values())
    first = max(told, key=lambda message: (told[message], message))
    if len(found) == 1 and count == endpoints:
        return Routing(*key, first)
    one_of = "" if len(told) == 1 else "for example, "
    return Routing(*key, f"{count} of {endpoints} endpoints: {one_of}{first}")
