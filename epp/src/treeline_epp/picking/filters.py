"""Filters: which endpoints a request may go to. They are asked in order, and see the request.

A filter looks at the columns of all endpoints at once (see `table`) and answers with a mask of those it keeps, or, of
few endpoints, at one after another. To add one: a class with `name`, `refusal`, `keep` and `keep_few` here, and its
place in `FILTERS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from treeline_epp.picking.decision import NoEndpoints
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.request import PickRequest
from treeline_epp.picking.table import AT, CLOSED_UNTIL, ELIGIBLE, SILENT_AFTER, Mask, Rows, Table


class Filter(Protocol):
    """Leaves out endpoints. `refusal` is what the client is told where it leaves none; where that is empty, a filter
    that would leave none is passed over."""

    name: str
    refusal: str

    def keep(self, request: PickRequest, table: Table, now: float) -> Mask | None:
        """Which rows it keeps; None for all."""
        ...

    def keep_few(
        self, request: PickRequest, endpoints: Sequence[Endpoint], table: Table, now: float
    ) -> Sequence[Endpoint]:
        """The same of `endpoints` that are in the request's pool and serve its model."""
        ...


class ServingFilter:
    """In the request's pool, serving its model, ready and not draining."""

    name = "serving"
    refusal = "no endpoint is ready"

    def keep(self, request: PickRequest, table: Table, now: float) -> Mask | None:
        """O(endpoints) at memory speed."""
        mask: Mask = table.serving(request) & (table.columns[ELIGIBLE, : table.size] > 0.0)
        return mask

    def keep_few(
        self, request: PickRequest, endpoints: Sequence[Endpoint], table: Table, now: float
    ) -> Sequence[Endpoint]:
        """O(endpoints)."""
        return [endpoint for endpoint in endpoints if endpoint.eligible]


class SubsetFilter:
    """Among the addresses to which the proxy limits the choice."""

    name = "subset"
    refusal = "no ready endpoint is in the subset that the proxy allows"

    def keep(self, request: PickRequest, table: Table, now: float) -> Mask | None:
        """O(addresses)."""
        if request.subset is None:
            return None
        mask = np.zeros(table.size, np.bool_)
        mask[table.at(request.subset)] = True
        return mask

    def keep_few(
        self, request: PickRequest, endpoints: Sequence[Endpoint], table: Table, now: float
    ) -> Sequence[Endpoint]:
        """O(endpoints + addresses)."""
        if request.subset is None:
            return endpoints
        rows = set(table.at(request.subset).tolist())
        return [endpoint for endpoint in endpoints if endpoint.pod.row in rows]


class HealthyFilter:
    """Neither answering errors alone nor fallen silent.

    Where all of them seem to fail, requests may be at fault, or we ourselves; and there is nowhere better.
    """

    name = "healthy"
    refusal = ""

    def keep(self, request: PickRequest, table: Table, now: float) -> Mask | None:
        """O(endpoints) at memory speed."""
        columns = table.columns[:, : table.size]
        mask: Mask = (now - columns[AT] <= columns[SILENT_AFTER]) & (now >= columns[CLOSED_UNTIL])
        return mask

    def keep_few(
        self, request: PickRequest, endpoints: Sequence[Endpoint], table: Table, now: float
    ) -> Sequence[Endpoint]:
        """O(endpoints)."""
        return [one for one in endpoints if now >= one.breaker.closed_until and not one.load.silent(now)]


FILTERS: tuple[Filter, ...] = (ServingFilter(), SubsetFilter(), HealthyFilter())


def rows_left(request: PickRequest, table: Table, now: float) -> Rows:
    """The rows that pass all filters, at least one. Raises NoEndpoints."""
    left: Mask = np.ones(table.size, np.bool_)
    for one in FILTERS:
        mask = one.keep(request, table, now)
        if mask is None:
            continue
        mask = mask & left
        if mask.any():
            left = mask
        elif one.refusal:
            raise NoEndpoints(one.refusal)
    return np.flatnonzero(left)


def few_left(request: PickRequest, endpoints: Sequence[Endpoint], table: Table, now: float) -> Sequence[Endpoint]:
    """As `rows_left`, of few `endpoints` that are in the request's pool and serve its model."""
    left = endpoints
    for one in FILTERS:
        kept = one.keep_few(request, left, table, now)
        if kept:
            left = kept
        elif one.refusal:
            raise NoEndpoints(one.refusal)
    return left
