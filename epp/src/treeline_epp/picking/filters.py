"""Filters: the endpoints to which a request may go. They are applied in order, and see the request.

A filter reads the columns of all endpoints at once (see `table`) and returns a mask of those it keeps. Of a request it
sees pool, model, subset, and whether its prompt may be computed apart. To add one: a function here, and its row in
`FILTERS`.

`Saturation` says when an endpoint has no room for another request, so that the request should wait in the picker. There
a more urgent one, or one of a client that got less, can still overtake it, and it can go to the endpoint that is free
first; in an engine's queue neither is possible.
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
    """A filter of endpoints. `refusal` is the message to the client if it leaves none; if that is empty, a filter that
    would leave none is skipped. `keep` returns the rows it keeps; None for all.
    """

    name: str
    refusal: str
    keep: Callable[[Request, Table], Mask | None]


def _serving(request: Request, table: Table) -> Mask:
    """Keep the pool's endpoints that serve the model, are ready and not draining. O(endpoints) at memory speed."""
    mask: Mask = table.serving(request) & (table.columns[ELIGIBLE, : table.size] > 0.0)
    return mask


def _computing(request: Request, table: Table) -> Mask:
    """Drop endpoints that compute no prompts, unless another one can for this request. O(endpoints) at memory speed."""
    return table.computing(request)


def _in_subset(request: Request, table: Table) -> Mask | None:
    """Keep the addresses to which the proxy limits the choice. O(addresses)."""
    if request.subset is None:
        return None
    mask = np.zeros(table.size, np.bool_)
    mask[table.at(request.subset)] = True
    return mask


def _healthy(_request: Request, table: Table) -> Mask:
    """Drop endpoints that answer only errors or have fallen silent. O(endpoints) at memory speed.

    If all of them seem to fail, the fault may be in the requests, or here; and there is nowhere better.
    """
    mask: Mask = table.columns[HEALTHY, : table.size] > 0.0
    return mask


FILTERS = (
    Filter("serving", "no endpoint is ready", _serving),
    Filter("prefill", "no endpoint is ready that can compute the prompt of this request", _computing),
    Filter("subset", "no ready endpoint is in the subset that the proxy allows", _in_subset),
    Filter("healthy", "", _healthy),
)


def rows_left(request: Request, table: Table) -> Rows:
    """Return the rows that pass all filters, at least one. Raises NoEndpoints. O(1) for a request with pool and model
    as before; O(rows) at memory speed after changes, and for a subset.
    """
    asked = request.pool, request.model, request.apart
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
    """The condition under which endpoints are full. `wait`: the predicted work before a new request takes longer than
    `limit` seconds; its own length is no queue. Otherwise: the endpoint has `limit` requests, counting the reported
    ones, running and waiting, and those sent since; at least those sent whose answer has not begun, whatever it
    reports.

    If requests are counted, a full endpoint is never chosen. Otherwise it may be, while another one has room, if
    waiting for its cached prefix costs less than computing that.
    """

    wait: bool
    limit: float

    def room(self, columns: Floats, wait_s: Floats) -> Mask:
        """Return which endpoints have room, by their columns (see `table`) and a new request's wait there."""
        return wait_s <= self.limit if self.wait else np.maximum(columns[REQUESTS], columns[UNANSWERED]) < self.limit
