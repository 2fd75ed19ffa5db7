"""What rankings are made of: array operations on a value of each candidate."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from treeline_epp.picking.table import Floats


def lowest(values: Floats, count: int) -> list[int]:
    """The places of the lowest values, in order; of equal ones the first. O(n + count log count)."""
    if count < len(values):
        last = np.partition(values, count - 1)[count - 1]
        below = np.flatnonzero(values < last)
        equal = np.flatnonzero(values == last)[: count - len(below)]
    else:
        below, equal = np.arange(len(values)), np.zeros(0, np.int64)
    below = below[np.argsort(values[below], kind="stable")]
    return [*below.tolist(), *equal.tolist()]


def one_of(places: npt.NDArray[np.int64] | Sequence[int], rng: Random) -> int:
    """One of them at random; nothing is drawn where there is but one."""
    return int(places[0] if len(places) == 1 else places[rng.randrange(len(places))])


def lightest(load: Floats, rng: Random) -> int:
    """The place of the lowest value, one of equals at random. O(n)."""
    return one_of(np.flatnonzero(load == load.min()), rng)


def led_by(first: int, order: list[int], count: int) -> list[int]:
    """`order` with `first` before all others."""
    return [first, *(at for at in order if at != first)][:count]
