"""When requests arrive in an open loop."""

from __future__ import annotations

import random


def arrivals(count: int, rate_per_s: float, burstiness: float, rng: random.Random) -> list[float]:
    """Moments in seconds, the first at 0.

    Gaps are gamma-distributed with mean 1/rate and shape `burstiness`, as in vLLM's benchmark: 1 is a Poisson process,
    less comes in bursts, more is more even. Raises ValueError for a rate or burstiness that is not above 0.
    """
    if rate_per_s <= 0 or burstiness <= 0:
        raise ValueError(f"rate and burstiness must be above 0, not {rate_per_s:g} and {burstiness:g}")
    moments, now = [], 0.0
    for _ in range(count):
        moments.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate_per_s * burstiness))
    return moments
