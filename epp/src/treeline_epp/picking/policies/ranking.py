"""What rankings are made of: array operations on a value of each candidate."""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt

from treeline_epp.picking.table import Floats


def lowest(values: Floats, count: int) -> list[int]:
    """The places of the lowest values, in order; of equal ones always the same. O(n + count log count)."""
    if count >= len(values):
        order: list[int] = np.argsort(values, kind="stable").tolist()
        return order
    below: list[int] = np.argpartition(values, count - 1)[:count].tolist()
    return sorted(sorted(below), key=values.__getitem__)


def one_of(places: npt.NDArray[np.int64], rng: Random) -> int:
    """One of them at random; nothing is drawn where there is but one."""
    return int(places[0] if len(places) == 1 else places[rng.randrange(len(places))])


def lightest(load: Floats, rng: Random) -> int:
    """The place of the lowest value, one of equals at random. O(n)."""
    return one_of(np.flatnonzero(load == load.min()), rng)


def led_by(first: int, order: list[int], count: int) -> list[int]:
    """`order` with `first` before all others."""
    return [first, *(at for at in order if at != first)][:count]
