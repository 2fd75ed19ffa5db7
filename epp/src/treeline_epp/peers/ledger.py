"""The requests in flight: our own, in the form for other pickers, and theirs, in the form for our picker.

The picker calls an `Own` when it opens and closes leases. An `Others` has another picker's requests in flight: each is
a reservation at the endpoint, which ends by itself as our own do, and a prediction of its prompt in the cache. Both are
bounded, whatever the requests.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace
from treeline_wire.peers import Closed, How, Opened, Record, endpoint_ref

from treeline_epp.endpoints.reservations import Reservation
from treeline_epp.index.pods import Match
from treeline_epp.peers.landmarks import Foresight, Landmarks, told
from treeline_epp.picking.decision import Lease, Outcome
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.picker import Picker

MOST_OPEN = 16_384
"""Most requests of one picker that others count; the oldest go first."""
MOST_PENDING = 16_384
"""Most records that wait to be sent; beyond that others get a snapshot."""
MOST_TOKENS = 1 << 28
MOST_PREFILL_MS = 600_000
"""Most that a picker may claim for one request: its reservation lives three times its predicted prefill."""
_REBUILD_S = 0.1


class Own:
    """Our own requests. `wake` is called at the first record to send, and with True at the first urgent one."""

    def __init__(self, landmarks: Landmarks) -> None:
        self.wake: Callable[[bool], None] = lambda _urgent: None
        self._pending: list[Record] = []
        self._urgent = False
        self._landmarks = landmarks
        self._open: OrderedDict[Lease, Opened] = OrderedDict()
        self._last_id = 0
        self._refs: dict[tuple[str, str], bytes] = {}

    def opened(self, lease: Lease, now: float) -> None:
        """See `picking.decision.Elsewhere`. O(bytes of the key) at memory speed."""
        request, best, spec = lease.decision.request, lease.decision.best, lease.endpoint.spec
        marks: tuple[int, ...] = ()
        if request.key and lease.answer.predicted_until is not None:
            known = self._landmarks.marks(lease.answer.pod.scope, request.namespace_at(spec), request.key)
            marks = told(known, best.candidate.hit.end)
        self._last_id += 1
        record = Opened(
            self._last_id,
            self._ref(spec.name, spec.address),
            min(MOST_TOKENS, lease.answer.reservation.tokens),
            min(MOST_PREFILL_MS, math.ceil(1000 * lease.decision.ttft_s)),
            rank=lease.endpoint.pods.index(lease.answer.pod),
            marks=marks,
            session=request.session,
        )
        self._open[lease] = record
        if len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
        self._tell(record)

    def closed(self, lease: Lease, outcome: Outcome, *, began: bool) -> None:
        """See `picking.decision.Elsewhere`. O(1)."""
        record = self._open.pop(lease, None)
        if record is None:
            return
        if outcome is Outcome.HEADERS:
            how = How.PREFILLED if began else How.ANSWERED
        else:
            how = How.OVERLOADED if outcome is Outcome.OVERLOADED else How.FAILED
        self._tell(Closed(record.id, how))

    def foreseen(self, match: Match, scope: str, namespace: str | None, key: bytes, now: float) -> Match:
        """See `picking.decision.Elsewhere`. O(bytes of the key) at memory speed, or O(1) where nothing is foreseen."""
        landmarks = self._landmarks
        return landmarks.foreseen(match, landmarks.marks(scope, namespace, key), now) if len(landmarks) else match

    def snapshot(self, now: float) -> list[Opened]:
        """Return the requests in flight, with their age. O(requests)."""
        return [
            replace(record, age_ms=max(0, int(1000 * (now - lease.opened_at))))
            for lease, record in self._open.items()
            if lease.answer.reservation.open
        ]

    def __len__(self) -> int:
        return len(self._open)

    def take(self) -> list[Record]:
        """Return the records to send, once."""
        pending, self._pending, self._urgent = self._pending, [], False
        return pending

    def _tell(self, record: Record) -> None:
        urgent = isinstance(record, Opened)
        self._pending.append(record)
        if (urgent and not self._urgent) or len(self._pending) == 1:
            self._urgent = urgent
            self.wake(urgent)

    def _ref(self, name: str, address: str) -> bytes:
        ref = self._refs.get((name, address))
        if ref is None:
            if len(self._refs) > MOST_OPEN:  # endpoints come and go
                self._refs.clear()
            ref = self._refs[name, address] = endpoint_ref(name, address)
        return ref


class Places:
    """The endpoints of our picker by their names on the wire."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._built_at = float("-inf")
        self._found: dict[bytes, str | None] = {}

    def endpoint(self, ref: bytes, now: float) -> Endpoint | None:
        """Return an endpoint; None if it is unknown here, or if several have this name."""
        name = self._found.get(ref)
        endpoint = None if name is None else self._picker.endpoints.get(name)
        if endpoint is not None and endpoint_ref(endpoint.spec.name, endpoint.spec.address) == ref:
            return endpoint
        if now < self._built_at + _REBUILD_S:
            return None
        self._built_at = now
        self._found = {}
        for name, endpoint in self._picker.endpoints.items():
            one = endpoint_ref(name, endpoint.spec.address)
            self._found[one] = None if one in self._found else name
        name = self._found.get(ref)
        return None if name is None else self._picker.endpoints[name]


@dataclass(frozen=True, slots=True)
class _Held:
    endpoint: Endpoint
    reservation: Reservation
    opened: Opened
    foresight: Foresight | None


@dataclass(slots=True)
class Others:
    """The requests that one other picker has in flight."""

    picker: Picker
    landmarks: Landmarks
    places: Places
    unplaced: int = 0
    """Number of requests at endpoints that are unknown here."""
    _held: OrderedDict[int, _Held] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, record: Record, now: float) -> None:
        """Apply a record of one request. Unknown numbers change nothing. O(marks)."""
        if isinstance(record, Opened):
            self._open(record, now)
        else:
            held = self._held.pop(record.id, None)
            if held is not None:
                self._close(held, record.how, now)

    def reconcile(self, records: tuple[Opened, ...], now: float) -> None:
        """Replace all requests by those of a snapshot: others are over. O(both)."""
        there = {record.id for record in records}
        for id in [id for id in self._held if id not in there]:
            self._close(self._held.pop(id), How.PREFILLED, now)
        for record in records:
            if record.id not in self._held:
                self._open(record, now)

    def tick(self) -> None:
        """Drop requests whose reservation has ended. O(in flight); call about every second."""
        for id in [id for id, held in self._held.items() if not held.reservation.open]:
            del self._held[id]

    def clear(self, now: float) -> None:
        """Drop all requests of a picker that is gone: their ends will never be reported."""
        while self._held:
            self._close(self._held.popitem()[1], How.PREFILLED, now)

    def _open(self, record: Opened, now: float) -> None:
        if record.id in self._held:
            return
        endpoint = self.places.endpoint(record.ref, now)
        if endpoint is None:
            self.unplaced += 1
            return
        tokens, age_s = min(MOST_TOKENS, record.tokens), record.age_ms / 1000
        prefill_s = min(MOST_PREFILL_MS, record.prefill_ms) / 1000
        reservation = self.picker.parts.charge(endpoint, tokens, prefill_s, now, age_s)
        if reservation.expires_at <= now:  # it would have ended by now
            endpoint.load.reservations.close(reservation)
            return
        if record.session:
            self.picker.sessions.remember(record.session, endpoint.spec.name, now - age_s)
        pod = endpoint.expecting(record.rank)
        limits = self.picker.index.limits
        life = limits.prediction_life_s if pod.precise else limits.eventless_life_s
        foresight = self.landmarks.add(record, pod, now - age_s + life)
        self._held[record.id] = _Held(endpoint, reservation, record, foresight)
        if len(self._held) > MOST_OPEN:
            self._close(self._held.popitem(last=False)[1], How.PREFILLED, now)

    def _close(self, held: _Held, how: How, now: float) -> None:
        outcome = Outcome.HEADERS if how in (How.PREFILLED, How.ANSWERED) else Outcome.CANCELLED
        if how is How.OVERLOADED:
            outcome = Outcome.OVERLOADED
        self.picker.parts.discharge(held.endpoint, held.reservation, outcome, now, began=how is How.PREFILLED)
        if outcome is not Outcome.HEADERS and held.foresight is not None:
            self.landmarks.withdraw(held.opened, held.foresight)
