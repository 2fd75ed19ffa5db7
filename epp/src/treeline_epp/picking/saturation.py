"""When an endpoint has no room for another request, so that it had better wait in the picker.

There it can still be overtaken by one that is more urgent or whose client got less, and go to whoever is free first; in
an engine's queue it can do neither.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from treeline_epp.picking.table import REQUESTS, UNANSWERED, Floats, Mask

POLICIES = ("wait", "requests")


class Saturation(Protocol):
    """Says how full endpoints are. `hard`: a full one is never chosen; else it may be, while another one has room,
    where waiting for what it has cached costs less than computing that."""

    hard: bool

    def room(self, columns: Floats, wait_s: Floats) -> Mask:
        """Which endpoints have room, by their columns (see `table`) and the time until a new request's turn there."""
        ...


class WaitSaturation:
    """The work before a new request takes longer than `limit_s`, as predicted. Its own length is no queue."""

    hard = False

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def room(self, columns: Floats, wait_s: Floats) -> Mask:
        """See `Saturation`."""
        return wait_s <= self._limit_s


class RequestsSaturation:
    """It has `limit` requests: those that it reported, running and waiting, and those that were sent there since; at
    least those that were sent there and whose answer has not begun, whatever it reports."""

    hard = True

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def room(self, columns: Floats, wait_s: Floats) -> Mask:
        """See `Saturation`."""
        mask: Mask = np.maximum(columns[REQUESTS], columns[UNANSWERED]) < self._limit
        return mask


def saturation_of(name: str, limit_s: float, limit: int) -> Saturation | None:
    """The policy of this name; None for `off`."""
    match name:
        case "wait":
            return WaitSaturation(limit_s)
        case "requests":
            return RequestsSaturation(limit)
        case _:
            return None
