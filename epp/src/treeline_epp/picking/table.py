"""What decides where requests go, of all endpoints, in columns: a pick looks at thousands of them in a few operations.

A row is copied from its owners (load, breaker, pod) when the picker says that they have changed (`touch`), at the next
look. What changes with time alone (is a report fresh? is a breaker open?) is a comparison of a column with the clock.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from treeline_epp.endpoints.load import STALE_AFTER_S
from treeline_epp.endpoints.spec import EndpointSpec, split_address
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.request import PickRequest

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

(
    AT,
    FRESH_TOKENS,
    FRESH_REQUESTS,
    STALE_TOKENS,
    RUNNING,
    MAX_RUNNING,
    STEP_S,
    FASTEST_STEP_S,
    TOKENS_TOTAL,
    TOKENS_HELD,
    HIT_SHARE,
    FULL_UNTIL,
    OWN_RATE,
    RATE_SAMPLES,
    MEASURED_AT,
    SILENT_AFTER,
    CLOSED_UNTIL,
    ELIGIBLE,
    FRESH_IN_FLIGHT,
    RESERVED_REQUESTS,
    IDENTITY,
    UNANSWERED,
) = range(22)
"""The columns. Tokens and requests before a new one, if the report counts (FRESH) and if it does not (STALE).
IN_FLIGHT: all requests that an endpoint has, if the report counts; RESERVED_REQUESTS are ours alone."""
_COLUMNS = 22
_NEVER = float("-inf")
FEW = 16
"""So many endpoints are looked at one by one: an operation on arrays takes as long for one as for hundreds."""
_MOST_ASKED = 256
"""Pools and models for which it is remembered who serves them: engines that take any name may be asked for many."""


class _Group(Struct):
    """Endpoints of one pool that serve the same models."""

    spec: EndpointSpec
    rows: dict[int, None]


class Table:
    """The rows of all endpoints; `columns` is of shape (columns, rows), valid after `refresh`."""

    def __init__(self) -> None:
        self.columns: Floats = np.zeros((_COLUMNS, 64))
        self.endpoints: list[Endpoint | None] = []
        self._free: list[int] = []
        self._touched: set[int] = set()
        self._groups: dict[tuple[str, tuple[str, ...]], _Group] = {}
        self._serving: dict[tuple[str | None, str | None], Mask] = {}
        self._few: dict[tuple[str | None, str | None], tuple[Endpoint, ...] | None] = {}
        self._by_address: dict[tuple[str, str], dict[int, None]] = {}

    # Endpoints

    def take_row(self) -> int:
        """A row for a new endpoint. O(1)."""
        if self._free:
            return self._free.pop()
        self.endpoints.append(None)
        self._forget_serving()
        if len(self.endpoints) > self.columns.shape[1]:
            self.columns = np.concatenate((self.columns, np.zeros_like(self.columns)), axis=1)
        return len(self.endpoints) - 1

    def add(self, endpoint: Endpoint) -> None:
        """An endpoint is there, in the row of its pod. O(1)."""
        row, spec = endpoint.pod.row, endpoint.spec
        self.endpoints[row] = endpoint
        group = self._groups.setdefault((spec.pool, spec.models), _Group(spec, {}))
        group.rows[row] = None
        for place in _places(spec):
            self._by_address.setdefault(place, {})[row] = None
        self._forget_serving()
        self._touched.add(row)

    def remove(self, endpoint: Endpoint) -> None:
        """It has gone, or is about to change its spec. O(1)."""
        row, spec = endpoint.pod.row, endpoint.spec
        group = self._groups[spec.pool, spec.models]
        del group.rows[row]
        if not group.rows:
            del self._groups[spec.pool, spec.models]
        for place in _places(spec):
            del self._by_address[place][row]
            if not self._by_address[place]:
                del self._by_address[place]
        self._forget_serving()
        self.endpoints[row] = None
        self._touched.discard(row)

    def give_row(self, row: int) -> None:
        """Nobody has this row any more."""
        self.columns[ELIGIBLE, row] = 0.0
        self._free.append(row)

    def _forget_serving(self) -> None:
        self._serving.clear()
        self._few.clear()

    def touch(self, row: int) -> None:
        """Something of the endpoint in this row has changed. O(1)."""
        self._touched.add(row)

    def refresh(self) -> None:
        """Copy what has changed. O(touched rows)."""
        for row in self._touched:
            endpoint = self.endpoints[row]
            if endpoint is not None:
                self.columns[:, row] = _values(endpoint)
        self._touched.clear()

    # Looking

    @property
    def size(self) -> int:
        """Rows in use, and some that were."""
        return len(self.endpoints)

    def serving(self, request: PickRequest) -> Mask:
        """Which rows are in the request's pool and serve its model. O(1), after changes O(rows)."""
        known = self._serving.get((request.pool, request.model))
        if known is None:
            if len(self._serving) > _MOST_ASKED:
                self._serving.clear()
            known = np.zeros(self.size, np.bool_)
            for group in self._groups.values():
                if serves(group.spec, request):
                    known[np.fromiter(group.rows, np.int64, len(group.rows))] = True
            self._serving[request.pool, request.model] = known
        return known

    def few(self, request: PickRequest) -> tuple[Endpoint, ...] | None:
        """Those in the request's pool that serve its model, in the order of their rows, where they are few; else None.
        O(1), after changes O(rows)."""
        asked = request.pool, request.model
        if asked in self._few:
            return self._few[asked]
        if len(self._few) > _MOST_ASKED:
            self._few.clear()
        rows = [row for group in self._groups.values() if serves(group.spec, request) for row in group.rows]
        found = tuple(self.at_row(row) for row in sorted(rows)) if len(rows) <= FEW else None
        self._few[asked] = found
        return found

    def at_row(self, row: int) -> Endpoint:
        """The endpoint in a row that is taken."""
        endpoint = self.endpoints[row]
        assert endpoint is not None
        return endpoint

    def take(self, rows: Rows) -> Floats:
        """The columns of some rows; without a copy if these are all."""
        return self.columns[:, : self.size] if len(rows) == self.size else self.columns[:, rows]

    def kinds(self, request: PickRequest) -> list[EndpointSpec]:
        """One endpoint of each kind (pool and models) that serves the request. O(kinds)."""
        return [group.spec for group in self._groups.values() if serves(group.spec, request)]

    def at(self, addresses: Iterable[str]) -> Rows:
        """The rows at any of these addresses (`ip:port`, or `ip` for all its ports), in order. O(addresses)."""
        found: dict[int, None] = {}
        for address in addresses:
            found.update(self._by_address.get(split_address(address), {}))
        return np.array(sorted(found), np.int64)


def serves(spec: EndpointSpec, request: PickRequest) -> bool:
    """Is it in the request's pool, and does it serve its model?"""
    if request.pool is not None and spec.pool != request.pool:
        return False
    return not spec.models or request.model is None or request.model in spec.models


def _places(spec: EndpointSpec) -> set[tuple[str, str]]:
    host, port = split_address(spec.address)
    return {(host, ""), (host, port)}


def _values(endpoint: Endpoint) -> tuple[float, ...]:
    load = endpoint.load
    report, reserved = load.report, load.reservations
    held = endpoint.held_tokens
    at, tokens, requests, running, most, step, total = _NEVER, 0, 0, 0, 0, 0.0, 0
    ours = in_flight = len(reserved)
    if report is not None:
        at, running, most, step = report.at, report.running, report.max_running, report.decode_step_s
        tokens, requests = report.queue(reserved)
        in_flight = max(report.in_flight + requests - report.waiting, ours)
        total, held = report.tokens_total, max(report.tokens_held, held)
    return (
        at,
        tokens,
        requests,
        reserved.tokens,
        running,
        most,
        step,
        load.fastest_step_s,
        total,
        held,
        load.hit_share,
        load.overloaded_until,
        load.own_rate(),
        load.rate_samples,
        load.measured_at,
        STALE_AFTER_S if load.beats else float("inf"),
        endpoint.breaker.closed_until,
        endpoint.eligible,
        in_flight,
        ours,
        endpoint.identity,
        endpoint.unanswered,
    )
