"""Decides how each pool's cached prefixes are found, and says why not in a better way.

    events    the engines publish their blocks, and a tokenizer that passed its self-test makes keys of them
    history   earlier requests and their endpoints; with the tokenizer's keys, or with keys of our own form (`keyers`)

Endpoints are judged one by one (`way_of`); a pool uses events if all of its endpoints do.
"""

from __future__ import annotations

import logging
from collections import Counter
from enum import StrEnum
from typing import NamedTuple

log = logging.getLogger(__name__)


class Way(StrEnum):
    """The way to find cached prefixes. The values are metric labels, and words of `/endpoints`."""

    EVENTS = "events"
    HISTORY = "history"


_BETTER_FIRST = (Way.EVENTS, Way.HISTORY)


class WayReason(StrEnum):
    """The reason why an endpoint is not routed by events. The values are metric labels, and words of `/endpoints`."""

    NO_EVENTS = "NoEvents"
    EVENTS_UNREACHABLE = "EventsUnreachable"
    EVENTS_UNREADABLE = "EventsUnreadable"
    NOTHING_HEARD = "NothingHeard"
    NO_KEY_PAIR = "NoKeyPair"
    NO_TOKENIZER = "NoTokenizer"
    TOKENIZER_UNAVAILABLE = "TokenizerUnavailable"
    TOKENIZER_UNUSABLE = "TokenizerUnusable"


class Routing(NamedTuple):
    """The way of an endpoint or a pool. `reason` is empty if there is no better way; `message` says what to do, or
    which requests have no keys.
    """

    way: Way
    reason: str = ""
    message: str = ""


class TokenizerFacts(NamedTuple):
    """The state of an endpoint's tokenizer: known or not, with or without keys, and its problem."""

    known: bool = False
    has_keys: bool = False
    problem: str | None = None
    awaited: bool = False
    """Whether a flag names it, or the engine says that it serves it."""


class Unheard(NamedTuple):
    """The reason why an endpoint's events do not arrive, or cannot be decoded, although their source is known, and what
    to do.
    """

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
    """Return the way of one endpoint. `publishes`: the source of its events is known; if not, `no_events` says why;
    `keys_missing`: they are encrypted with keys that this picker lacks. `unheard`: none of them arrives.
    """
    if keys_missing:
        return Routing(Way.HISTORY, WayReason.NO_KEY_PAIR, "the engine publishes with keys: give --curve-dir")
    if not publishes:
        message = no_events or "the engine publishes no KV events, or does not say where"
        message += " (docs/engines.md)"
        return Routing(Way.HISTORY, WayReason.NO_EVENTS, message)
    if unheard is not None:
        return Routing(Way.HISTORY, unheard.reason, f"{unheard.message} (docs/engines.md)")
    if tokenizer.has_keys:  # then only its chat template has a problem
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
    """The ways of all endpoints and of their pools. `tell` logs each change of a pool's way once."""

    def __init__(self) -> None:
        self._endpoints: dict[str, tuple[str, Routing]] = {}
        self._told: dict[str, Routing] = {}
        self._changed = False

    def set(self, endpoint: str, pool: str, routing: Routing) -> None:
        """Set the way of an endpoint of this pool."""
        if self._endpoints.get(endpoint) != (pool, routing):
            self._endpoints[endpoint] = pool, routing
            self._changed = True

    def remove(self, endpoint: str) -> None:
        """Remove an endpoint. Unknown names are ignored."""
        self._changed |= self._endpoints.pop(endpoint, None) is not None

    def pools(self) -> dict[str, Routing]:
        """Return for each pool with endpoints the worst of their ways, with the number of endpoints in the message.
        O(endpoints).
        """
        pools: dict[str, Counter[Routing]] = {}
        for pool, routing in self._endpoints.values():
            pools.setdefault(pool, Counter())[routing] += 1
        return {pool: _worst(found) for pool, found in sorted(pools.items())}

    def counts(self) -> Counter[tuple[str, str, str]]:
        """Count endpoints by pool, way and reason."""
        return Counter((pool, routing.way.value, routing.reason) for pool, routing in self._endpoints.values())

    def tell(self) -> None:
        """Log the changes since the last call. O(1) without changes."""
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
    """Return the worst way, with the most frequent of its reasons and one of their messages."""
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
