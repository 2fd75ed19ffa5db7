"""Filters: which endpoints a request may go to. They are asked in order, and see the request.

A filter looks at the columns of all endpoints at once (see `table`) and answers with a mask of those it keeps. What it
sees of a request beside its pool and model is its subset. To add one: a function here, and its row in `FILTERS`.

When an endpoint has no room for another request, so that it had better wait in the picker.

There it can still be overtaken by one that is more urgent or whose client got less, and go to the endpoint that is free
first; in an engine's queue it can do neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from treeline_epp.picking.decision import NoEndpoints
from treeline_epp.picking.request import Request
from treeline_epp.picking.table import ELIGIBLE, HEALTHY, REQUESTS, UNANSWERED, Floats, Mask, Rows, Table


class Filter(NamedTuple):
    """Leaves out endpoints. `refusal` is the message to the client where it leaves none; where that is empty, a filter
    that would leave none is passed over. `keep` says which rows it keeps; None for all."""

    name: str
    refusal: str
    keep: Callable[[Request, Table], Mask | None]


def _serving(request: Request, table: Table) -> Mask:
    """In the request's pool, serving its model, ready and not draining. O(endpoints) at memory speed."""
    mask: Mask = table.serving(request) & (table.columns[ELIGIBLE, : table.size] > 0.0)
    return mask


def _in_subset(request: Request, table: Table) -> Mask | None:
    """Among the addresses to which the proxy limits the choice. O(addresses)."""
    if request.subset is None:
        return None
    mask = np.zeros(table.size, np.bool_)
    mask[table.at(request.subset)] = True
    return mask


def _healthy(_request: Request, table: Table) -> Mask:
    """Neither answering errors alone nor fallen silent. O(endpoints) at memory speed.

    Where all of them seem to fail, requests may be at fault, or we ourselves; and there is nowhere better.
    """
    mask: Mask = table.columns[HEALTHY, : table.size] > 0.0
    return mask


FILTERS = (
    Filter("serving", "no endpoint is ready", _serving),
    Filter("subset", "no ready endpoint is in the subset that the proxy allows", _in_subset),
    Filter("healthy", "", _healthy),
)


def rows_left(request: Request, table: Table) -> Rows:
    """The rows that pass all filters, at least one. Raises NoEndpoints. O(1) for a request like those before it;
    O(rows) at memory speed after changes, and for a subset."""
    asked = request.pool, request.model
    if request.subset is None and (known := table.left.get(asked)) is not None:
        return known
    left: Mask = np.ones(table.size, np.bool_)
    for one in FILTERS:
        mask = one.keep(request, table)
        if mask is None:
            continue
        mask = mask & left
        if mask.any():
            left = mask
        elif one.refusal:
            raise NoEndpoints(one.refusal)
    rows = np.flatnonzero(left)
    if request.subset is None:
        table.left[asked] = rows
    return rows


class Saturation(Struct, frozen=True):
    """Says how full endpoints are. `wait`: one has no room where the work before a new request takes longer than
    `limit` seconds, as predicted; its own length is no queue. Else: where it has `limit` requests, those that it
    reported, running and waiting, and those that were sent there since; at least those that were sent there and whose
    answer has not begun, whatever it reports.

    A full one is never chosen where requests are counted; else it may be, while another one has room, where waiting for
    what it has cached costs less than computing that.
    """

    wait: bool
    limit: float

    def room(self, columns: Floats, wait_s: Floats) -> Mask:
        """Which endpoints have room, by their columns (see `table`) and the time until a new request's turn there."""
        return wait_s <= self.limit if self.wait else np.maximum(columns[REQUESTS], columns[UNANSWERED]) < self.limit
