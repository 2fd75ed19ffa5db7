"""Percentiles, as all benchmarks here compute them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], q: float) -> float:
    """The `q`-th percentile (0 to 100) of `values` in any order, linearly interpolated.

    The same definition as numpy's default and as `statistics.quantiles(method="inclusive")`. Raises ValueError for no
    values or a `q` out of range. O(n log n).
    """
    if not values:
        raise ValueError("no values to take a percentile of")
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile is between 0 and 100, not {q}")
    return at_percent(sorted(values), q)


def at_percent(ordered: Sequence[float], q: float) -> float:
    """The same for at least one value in ascending order. O(1)."""
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
