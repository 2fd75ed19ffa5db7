"""The explanation of a decision: for each endpoint, the reason that left it out, or its cost and its place."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from treeline_epp.endpoints.load import STALE_AFTER_S
from treeline_epp.endpoints.transfer import Role
from treeline_epp.explain_api import Verdict
from treeline_epp.picking.decision import Decision
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.filters import FILTERS
from treeline_epp.picking.request import Request
from treeline_epp.picking.table import Mask, Table


class Explanation(Struct, frozen=True, omit_defaults=True):
    """A decision with all considered endpoints, the best first. `refusal` is the message to the client if there is
    none. `forms` are the seconds of the request's forms, if there are several, `form` the chosen one, and
    `source_endpoint` the endpoint that then computes the prompt, or gives its pages.
    """

    policy: str
    refusal: str = ""
    endpoints: tuple[Verdict, ...] = ()
    form: str = ""
    source_endpoint: str = ""
    forms: dict[str, dict[str, float]] = {}


def dropped_by(request: Request, table: Table, now: float) -> dict[int, tuple[str, str]]:
    """Return each dropped row with the filter that drops it and the reason, as in `filters.rows_left`. O(endpoints)."""
    left: Mask = np.ones(table.size, np.bool_)
    dropped: dict[int, tuple[str, str]] = {}
    for one in FILTERS:
        mask = one.keep(request, table)
        if mask is None or not ((mask & left).any() or one.refusal):
            continue
        for row in np.flatnonzero(left & ~mask).tolist():
            if (endpoint := table.endpoints[row]) is not None:
                dropped[row] = one.name, _why(one.name, endpoint, request, now)
        left = left & mask
    return dropped


def explanation(
    policy: str,
    table: Table,
    dropped: Mapping[int, tuple[str, str]],
    decision: Decision | None,
    refusal: str,
) -> Explanation:
    """Return all endpoints: ranked, unranked, and left out. `decision` ranks them, unless there is a refusal."""
    ranked = () if decision is None else decision.ranked
    places = {scored.candidate.spec.name: place for place, scored in enumerate(ranked)}
    verdicts = []
    for row, endpoint in enumerate(table.endpoints):
        if endpoint is None:
            continue
        spec = endpoint.spec
        place = places.get(spec.name)
        if place is not None:
            terms = {name: round(value, 6) for name, value in ranked[place].terms.items()}
            verdicts.append(Verdict(spec.name, spec.address, spec.pool, place + 1, terms=terms))
        else:
            one, why = dropped.get(row, ("", refusal or "its policy does not rank it"))
            verdicts.append(Verdict(spec.name, spec.address, spec.pool, None, one, why))
    behind = len(verdicts) + 1
    verdicts.sort(key=lambda one: (one.rank or behind, one.filter, one.endpoint))
    if decision is None:
        return Explanation(policy, refusal, tuple(verdicts))
    source = "" if decision.source is None else decision.source.name
    return Explanation(policy, refusal, tuple(verdicts), decision.form, source, decision.seconds)


def _why(filter_name: str, endpoint: Endpoint, request: Request, now: float) -> str:
    if filter_name == "serving":
        return _not_serving(endpoint, request)
    if filter_name == "prefill":
        return "computes no prompts, and no prefill endpoint can for this request"
    if filter_name == "subset":
        return "not in the subset that the proxy allows"
    if filter_name == "healthy":
        if now < endpoint.breaker.closed_until:
            return f"answered nothing but errors; tried again in {endpoint.breaker.closed_until - now:.1f} s"
        report = endpoint.load.report
        age_s = now - report.at if report is not None else STALE_AFTER_S
        return f"has been silent for {age_s:.1f} s"
    return f"left out by {filter_name}"


def _not_serving(endpoint: Endpoint, request: Request) -> str:
    spec, report = endpoint.spec, endpoint.load.report
    if request.pool is not None and spec.pool != request.pool:
        return f"is of pool {spec.pool}, and the request is for {request.pool}"
    if spec.models and request.model is not None and request.model not in spec.models:
        return f"does not serve {request.model}"
    if spec.role is Role.PREFILL:
        return "computes prompts only"
    if endpoint.draining or (report is not None and report.draining):
        return "drains"
    return "is not ready"
