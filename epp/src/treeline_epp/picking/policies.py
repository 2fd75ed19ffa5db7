"""Policies: from candidates to a ranking. `treeline` takes the cheapest (see `score`); two blind ones to compare with.

Every policy sees the request and ranks the same candidates: who may be picked at all is the filters' business. To add
one: a class with `name` and `rank` here, and its place in `POLICIES`; `--policy` then lists it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

import numpy as np
from msgspec import Struct

from treeline_epp.picking.request import PickRequest
from treeline_epp.picking.table import Floats

EQUAL_S = 0.001
"""Scores closer than this are equal; the choice among equals is random, so that idle endpoints share the load."""
STICKY_S = 0.005
"""A worse endpoint with more of the prompt cached is kept while it is worse by no more than this (sticky until
saturated): a few milliseconds are below what predictions can tell, a moved prefix costs memory for minutes."""
STICKY_SHARE = 0.10


class Candidates(Struct, frozen=True):
    """The candidates of one pick in arrays of one length: `cost_s` and `cached_tokens` of each. `name` gives the name
    of the endpoint at a position."""

    cost_s: Floats
    cached_tokens: Floats
    name: Callable[[int], str]


class Policy(Protocol):
    """Ranks candidates, best first."""

    name: str

    def rank(self, request: PickRequest, candidates: Candidates, count: int) -> list[int]:
        """The positions of the best `count` (≥ 1; fewer if there are not so many), by preference."""
        ...


class TreelinePolicy:
    """Least cost, sticky until saturated."""

    name = "treeline"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, request: PickRequest, candidates: Candidates, count: int) -> list[int]:
        """O(n) at memory speed. Ties within `EQUAL_S` fall at random; stickiness is in the module's constants."""
        cost_s = candidates.cost_s
        best = float(cost_s.min())
        near = np.flatnonzero(cost_s <= best + max(STICKY_S, STICKY_SHARE * best))
        cached = candidates.cached_tokens[near]
        warmest = near[cached == cached.max()]
        cost = cost_s[warmest]
        equal = warmest[cost <= cost.min() + EQUAL_S]
        first = int(equal[0])
        if len(equal) > 1:
            first = int(equal[self._rng.randrange(len(equal))])
        return [first, *(at for at in _cheapest(cost_s, count) if at != first)][:count]


class RoundRobinPolicy:
    """One after the other, by name, whatever they hold or do."""

    name = "round_robin"

    def __init__(self, rng: random.Random) -> None:
        self._next = rng.randrange(1 << 16)

    def rank(self, request: PickRequest, candidates: Candidates, count: int) -> list[int]:
        """O(n log n)."""
        order = sorted(range(len(candidates.cost_s)), key=candidates.name)
        start = self._next % len(order)
        self._next += 1
        return (order[start:] + order[:start])[:count]


class RandomPolicy:
    """Any of them, evenly."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, request: PickRequest, candidates: Candidates, count: int) -> list[int]:
        """O(count)."""
        return self._rng.sample(range(len(candidates.cost_s)), min(count, len(candidates.cost_s)))


def _cheapest(cost_s: Floats, count: int) -> list[int]:
    """The positions of the lowest costs, in order; of equal ones the first."""
    if count < len(cost_s):
        last = np.partition(cost_s, count - 1)[count - 1]
        below = np.flatnonzero(cost_s < last)
        equal = np.flatnonzero(cost_s == last)[: count - len(below)]
    else:
        below, equal = np.arange(len(cost_s)), np.zeros(0, np.int64)
    below = below[np.argsort(cost_s[below], kind="stable")]
    return [*below.tolist(), *equal.tolist()]


POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    policy.name: policy for policy in (TreelinePolicy, RoundRobinPolicy, RandomPolicy)
}


def create_policy(name: str, rng: random.Random) -> Policy:
    """A policy by name. Raises ValueError that lists the valid names."""
    try:
        return POLICIES[name](rng)
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; valid: {', '.join(sorted(POLICIES))}") from None
