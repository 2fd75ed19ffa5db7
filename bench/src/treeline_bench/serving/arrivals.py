"""When requests arrive in an open loop."""

from __future__ import annotations

import random


def arrivals(count: int, rate_per_s: float, rng: random.Random) -> list[float]:
    """Moments of a Poisson process in seconds, the first at 0. Raises ValueError for a rate that is not above 0."""
    if rate_per_s <= 0:
        raise ValueError(f"a rate must be above 0, not {rate_per_s:g}")
    moments, now = [], 0.0
    for _ in range(count):
        moments.append(now)
        now += rng.expovariate(rate_per_s)
    return moments
