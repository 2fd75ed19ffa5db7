"""The data of all endpoints that decide a pick, in columns: a pick reads thousands of them in a few operations.

A row is copied from its owners (load, breaker, pod) at the next look after the picker has marked it as changed
(`touch`), and when time alone changes it (`EDGE`: a report becomes stale, a breaker may be tried again).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from treeline_wire.namespaces import adapter_of

from treeline_epp.endpoints.spec import EndpointSpec, split_address, unfit
from treeline_epp.endpoints.transfer import Protocol, Role, Transfer
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.request import Request

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

(
    QUEUED_TOKENS,
    REQUESTS,
    UNANSWERED,
    IN_FLIGHT,
    EXCESS,
    MAX_RUNNING,
    TOKEN_S,
    SLOWER_S,
    FREE_TOKENS,
    HIT_SHARE,
    FULL_UNTIL,
    OWN_RATE,
    RATE_SAMPLES,
    MEASURED_AT,
    IDENTITY,
    ARRIVALS,
    ARRIVED_AT,
    HOST_RATE,
    DISK_RATE,
    ELIGIBLE,
    HEALTHY,
    EDGE,
) = range(22)
"""The columns. They have a report's values while it is fresh, then the values without one. QUEUED_TOKENS: before a new
request. REQUESTS: reported, running or not, or sent there since; IN_FLIGHT: those, and others that the endpoint has;
UNANSWERED are ours alone. EXCESS: REQUESTS over MAX_RUNNING, -inf if unknown. SLOWER_S: TOKEN_S beyond a step of a
small batch. FREE_TOKENS: free in its cache once waiting prompts are in it; inf if unknown. HOST_RATE and DISK_RATE: see
`EndpointLoad`."""
_COLUMNS = 22
_NEVER, _UNKNOWN = float("-inf"), float("inf")
_NO_ROWS: Rows = np.zeros(0, np.int64)
_MOST_ASKED = 256
"""Most pairs of pool and model whose endpoints are cached: engines that take any name may be asked for many."""


class _Group(Struct):
    """The endpoints of one pool with the same models, adapters and role, and the same way to hand over prompts."""

    spec: EndpointSpec
    rows: dict[int, None]


_Key = tuple[str, tuple[str, ...], frozenset[tuple[str, str]], Role, Transfer | None]


class _Asked(NamedTuple):
    """The endpoints that serve one pool and model: those that answer; of those that cannot serve a request alone, and
    of those that give pages to others, the rows of each group, with one of its endpoints; and the index's scopes of
    all, each with the rows by the adapter's name in the endpoints' events (None: it is no adapter there).
    """

    serving: Mask
    halves: Sequence[tuple[EndpointSpec, Rows]]
    lenders: Sequence[tuple[EndpointSpec, Rows]]
    scopes: Mapping[str, Mapping[str | None, Sequence[int]]]


class Table:
    """The rows of all endpoints; `columns` is of shape (columns, rows), valid after `refresh`."""

    def __init__(self) -> None:
        self.columns: Floats = np.zeros((_COLUMNS, 64))
        self.endpoints: list[Endpoint | None] = []
        self._free: list[int] = []
        self._touched: set[int] = set()
        self._stale: set[int] = set()
        self._groups: dict[_Key, _Group] = {}
        self._serving: dict[tuple[str | None, str | None], _Asked] = {}
        self.left: dict[tuple[str | None, str | None, bool], Rows] = {}
        """By pool, model, and whether another endpoint may compute the prompt: the rows that pass all filters of a
        request without a subset. For `filters`."""
        self.now = _NEVER
        """The time of the last look."""
        self._edge = _UNKNOWN
        self._by_address: dict[tuple[str, str], dict[int, None]] = {}

    # Endpoints

    def take_row(self) -> int:
        """Return a row for a new endpoint. O(1)."""
        if self._free:
            return self._free.pop()
        self.endpoints.append(None)
        self._forget_serving()
        if len(self.endpoints) > self.columns.shape[1]:
            self.columns = np.concatenate((self.columns, np.zeros_like(self.columns)), axis=1)
        return len(self.endpoints) - 1

    def add(self, endpoint: Endpoint) -> None:
        """Add an endpoint, in the row of its pod. O(1)."""
        row, spec = endpoint.pod.row, endpoint.spec
        self.endpoints[row] = endpoint
        group = self._groups.setdefault(_key(spec), _Group(spec, {}))
        group.rows[row] = None
        for place in _places(spec):
            self._by_address.setdefault(place, {})[row] = None
        self._forget_serving()
        self._touched.add(row)

    def remove(self, endpoint: Endpoint) -> None:
        """Remove an endpoint that has gone, or is about to change its spec. O(1)."""
        row, spec = endpoint.pod.row, endpoint.spec
        group = self._groups[_key(spec)]
        del group.rows[row]
        if not group.rows:
            del self._groups[_key(spec)]
        for place in _places(spec):
            del self._by_address[place][row]
            if not self._by_address[place]:
                del self._by_address[place]
        self._forget_serving()
        self.endpoints[row] = None
        self._touched.discard(row)

    def give_row(self, row: int) -> None:
        """Free the row of an endpoint that is gone."""
        self.columns[ELIGIBLE, row], self.columns[EDGE, row] = 0.0, _UNKNOWN
        self._free.append(row)

    def _forget_serving(self) -> None:
        self._serving.clear()
        self.left.clear()

    def touch(self, row: int) -> None:
        """Mark a row whose endpoint has changed. O(1)."""
        self._touched.add(row)

    def refresh(self, now: float) -> None:
        """Update which endpoints may be picked at `now`; other changes wait for `take`. O(touched rows), and O(rows) at
        memory speed if time has changed one.
        """
        self.now, columns, size = now, self.columns, self.size
        due = now >= self._edge
        if due:
            self._touched.update(np.flatnonzero(columns[EDGE, :size] <= now).tolist())
        for row in self._touched:
            endpoint = self.endpoints[row]
            if endpoint is not None:
                eligible, healthy, edge = _state(endpoint, now)
                if eligible != columns[ELIGIBLE, row] or healthy != columns[HEALTHY, row]:
                    columns[ELIGIBLE, row], columns[HEALTHY, row] = eligible, healthy
                    self.left.clear()
                columns[EDGE, row] = edge
                self._edge = min(self._edge, edge)
        self._stale |= self._touched
        self._touched.clear()
        if due:
            self._edge = float(columns[EDGE, :size].min()) if size else _UNKNOWN

    # Lookups

    @property
    def size(self) -> int:
        """The number of rows, free ones included."""
        return len(self.endpoints)

    def serving(self, request: Request) -> Mask:
        """Return which rows are in the request's pool and serve its model, not counting those that only compute
        prompts. O(1); O(rows) after changes.
        """
        return self._asked(request).serving

    def partners(self, request: Request, decode: EndpointSpec) -> Rows:
        """Return the endpoints that may compute the request's prompt for this one. O(rows) at memory speed; O(1) for an
        endpoint without the role decode.
        """
        halves = self._asked(request).halves if request.apart and decode.role is Role.DECODE else ()
        return self._fitting(request, [half for half in halves if half[0].role is Role.PREFILL], decode)

    def lenders(self, request: Request, spec: EndpointSpec) -> Rows:
        """Return the endpoints whose pages this one may pull. O(rows) at memory speed; O(1) where it cannot pull."""
        pulls = spec.protocol is Protocol.TREELINE
        return self._fitting(request, self._asked(request).lenders if pulls else (), spec)

    def _fitting(self, request: Request, asked: Sequence[tuple[EndpointSpec, Rows]], spec: EndpointSpec) -> Rows:
        name = request.model or ""  # of an adapter, perhaps, whose files then must be the same
        same = (one for one in asked if len({one[0].adapters.get(name), spec.adapters.get(name)} - {None}) < 2)
        fitting = [rows for one, rows in same if not unfit(one, spec)]
        if not fitting:
            return _NO_ROWS
        rows = np.sort(np.concatenate(fitting))
        rows = rows[(self.columns[ELIGIBLE, rows] > 0.0) & (self.columns[HEALTHY, rows] > 0.0)]
        return rows if request.subset is None else np.intersect1d(rows, self.at(request.subset))

    def computing(self, request: Request) -> Mask:
        """Return which rows can compute the prompt, or have another endpoint for that. O(rows) at memory speed."""
        asked = self._asked(request)
        mask = asked.serving.copy()
        for one, rows in asked.halves:
            mask[rows] = len(self.partners(request, one)) > 0
        return mask

    def scopes(self, request: Request) -> Mapping[str, Mapping[str | None, Sequence[int]]]:
        """Return the index's scopes of these endpoints: one, unless the request could go to several models. Of
        each, the rows by the adapter's name there: one name, unless its files differ. O(1).
        """
        return self._asked(request).scopes

    def _asked(self, request: Request) -> _Asked:
        known = self._serving.get((request.pool, request.model))
        if known is None:
            if len(self._serving) > _MOST_ASKED:
                self._forget_serving()
            groups = [group for group in self._groups.values() if serves(group.spec, request)]
            mask = np.zeros(self.size, np.bool_)
            halves, lenders = list[tuple[EndpointSpec, Rows]](), list[tuple[EndpointSpec, Rows]]()
            for group in groups:
                rows = np.fromiter(group.rows, np.int64, len(group.rows))
                mask[rows] = group.spec.role is not Role.PREFILL
                if not group.spec.alone:
                    halves.append((group.spec, rows))
                if group.spec.lends:
                    lenders.append((group.spec, rows))
            scopes: dict[str, dict[str | None, list[int]]] = {}
            for group in groups:
                adapters = scopes.setdefault(self.at_row(next(iter(group.rows))).pod.scope, {})
                adapters.setdefault(group.spec.adapters.get(request.model or ""), []).extend(group.rows)
            known = self._serving[request.pool, request.model] = _Asked(mask, halves, lenders, scopes)
        return known

    def at_row(self, row: int) -> Endpoint:
        """Return the endpoint in a used row."""
        endpoint = self.endpoints[row]
        assert endpoint is not None
        return endpoint

    def take(self, rows: Rows) -> Floats:
        """Return the columns of some rows; without a copy if these are all. O(changed rows) in Python."""
        for row in self._stale:
            endpoint = self.endpoints[row]
            if endpoint is not None:
                self.columns[:ELIGIBLE, row] = _values(endpoint, self.now)
        self._stale.clear()
        return self.columns[:, : self.size] if len(rows) == self.size else self.columns[:, rows]

    def has_adapter(self, rows: Rows, slots: Floats, lora: str) -> Mask:
        """Return which of these rows are known to have loaded an adapter: by their events, or as of `adapter_slots`.
        O(rows), one by one.
        """
        named = (any(lora in pod.adapters for pod in self.at_row(row).pods) for row in rows.tolist())
        mask: Mask = np.fromiter(named, np.bool_, len(rows)) | (slots > 0.0)
        return mask

    def adapter_slots(self, request: Request, rows: Rows) -> Floats:
        """Return for each of these rows 1 if its report says that the request's adapter has a slot on the device, -1 if
        it has none, 0 if it does not say that. O(rows), one by one for a request for an adapter.
        """
        slots: Floats = np.zeros(len(rows))
        lora = adapter_of(request.namespace)
        if lora is None:
            return slots
        for at, row in enumerate(rows.tolist()):
            one = self.at_row(row)
            report, name = one.load.report, one.spec.adapters.get(request.model or "", lora)
            if report is not None and (name in report.adapters or report.only_resident):
                slots[at] = 1.0 if report.adapters.get(name) else -1.0
        return slots

    def at(self, addresses: Iterable[str]) -> Rows:
        """Return the rows at any of these addresses (`ip:port`, or `ip` for all its ports), in order. O(addresses)."""
        found: dict[int, None] = {}
        for address in addresses:
            found.update(self._by_address.get(split_address(address), {}))
        return np.array(sorted(found), np.int64)


def _key(spec: EndpointSpec) -> _Key:
    return spec.pool, spec.models, frozenset(spec.adapters.items()), spec.role, spec.transfer


def serves(spec: EndpointSpec, request: Request) -> bool:
    """Return whether an endpoint is in the request's pool and serves its model."""
    if request.pool is not None and spec.pool != request.pool:
        return False
    return not spec.models or request.model is None or request.model in spec.models


def _places(spec: EndpointSpec) -> set[tuple[str, str]]:
    host, port = split_address(spec.address)
    return {(host, ""), (host, port)}


def _state(endpoint: Endpoint, now: float) -> tuple[bool, bool, float]:
    """Return whether an endpoint is eligible, and healthy, and when time alone will change that or its report."""
    load, closed_until = endpoint.load, endpoint.breaker.closed_until
    edge = _UNKNOWN if now >= closed_until else closed_until
    if load.report is not None and now <= load.report.fresh_until:
        edge = min(edge, load.report.fresh_until)
    return endpoint.eligible, now >= closed_until and not load.silent(now), edge


def _values(endpoint: Endpoint, now: float) -> tuple[float, ...]:
    """Return the columns before ELIGIBLE."""
    load = endpoint.load
    report, reserved = load.report, load.reservations
    tokens, requests = reserved.tokens, 0
    in_flight, excess, most, step, slower, free = len(reserved), _NEVER, 0, 0.0, 0.0, _UNKNOWN
    if report is not None and load.fresh(now):
        tokens, waiting = report.queue(reserved)
        requests, most, step = report.running + waiting, report.max_running, report.token_s
        in_flight = max(report.in_flight + waiting - report.waiting, in_flight)
        if most:
            excess = float(requests - most)
        slower = load.slower_s(report)
        if report.tokens_total:
            free = max(0.0, report.tokens_total - max(report.tokens_held, endpoint.held_tokens) - tokens)
    return (
        tokens,
        requests,
        endpoint.unanswered,
        in_flight,
        excess,
        most,
        step,
        slower,
        free,
        load.hit_share,
        load.overloaded_until,
        load.own_rate(),
        load.rate_samples,
        load.measured_at,
        endpoint.identity,
        reserved.arrivals,
        reserved.arrived_at,
        load.host_rate,
        load.disk_rate,
    )
