"""What policies know of the endpoints of one pick: arrays of one length, a place for each candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from msgspec import Struct

from treeline_epp.index.pods import Pod
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.table import Floats, Mask, Rows, Table

_NONE: Floats = np.zeros(0)


def _nobody(_name: str) -> int | None:
    return None


def _no_adapter(_name: str) -> Mask:
    return np.zeros(0, np.bool_)


class Candidates(Struct, frozen=True):
    """The candidates of one pick, at `now`.

    `cost_s`, `cached_tokens` and `uncached_tokens` (of the prompt) are those of each; `identity` is a number below 2⁵²
    that is the endpoint's own, whichever picker asks (see `Endpoint.identity`); `in_flight` are its requests, by its
    last report and the reservations since, or the reservations alone where it does not report. `find(name)` is the
    place of the one with this name, None if it is no candidate; `has_adapter(lora)` those that are known to have loaded
    an adapter.
    """

    cost_s: Floats
    cached_tokens: Floats
    uncached_tokens: Floats = _NONE
    identity: Floats = _NONE
    in_flight: Floats = _NONE
    find: Callable[[str], int | None] = _nobody
    has_adapter: Callable[[str], Mask] = _no_adapter
    now: float = 0.0


def candidates_of(
    table: Table,
    known: Mapping[str, Endpoint],
    rows: Rows,
    identity: Floats | None,
    in_flight: Floats,
    tokens: tuple[Floats, Floats],
    cost_s: Floats,
    now: float,
) -> Candidates:
    """The endpoints in these rows; `tokens` are the prompt's `(cached, uncached)`. `identity` is None for a policy that
    asks for costs alone. `known` are all endpoints by name. O(1); the rest when it is asked for.
    """

    def find(name: str) -> int | None:
        named = known.get(name)
        if named is None:
            return None
        at = int(np.searchsorted(rows, named.pod.row))
        return at if at < len(rows) and rows[at] == named.pod.row else None

    def has_adapter(lora: str) -> Mask:
        owners = (table.endpoints[row] for row in rows.tolist())
        pods: list[tuple[Pod, ...]] = [() if owner is None else owner.pods for owner in owners]
        found = [lora in own[0].adapters if len(own) == 1 else any(lora in pod.adapters for pod in own) for own in pods]
        return np.array(found, np.bool_)

    return Candidates(
        cost_s,
        tokens[0],
        tokens[1],
        _NONE if identity is None else identity,
        in_flight,
        find,
        has_adapter,
        now,
    )
