"""The edge's allow-list: a route for every inference path, and 404 for everything else.

The picker's filter, and the one that stops what it named no endpoint for, are switched off unless a route switches them
on. So what is not in the list is refused at its headers: the picker is not asked, no body is read, and no endpoint is
named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.config.rbac import v3 as rbac_v3
from envoy_data_plane.envoy.config.route import v3 as route_v3
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExtProcOverrides, ExtProcPerRoute
from envoy_data_plane.envoy.extensions.filters.http.rbac.v3 import Rbac, RbacPerRoute
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import ResponseMapper
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher
from envoy_data_plane.google.protobuf import Any
from treeline_wire import headers
from treeline_wire.paths import BELOW, PathRule, inference_paths

from treeline_operator.envoy import replies

EXT_PROC_FILTER = "envoy.filters.http.ext_proc"
PICKED_FILTER = "envoy.filters.http.rbac"
_PICKED = rbac_v3.Policy(
    permissions=[rbac_v3.Permission(any=True)],
    principals=[rbac_v3.Principal(header=route_v3.HeaderMatcher(name=headers.DESTINATION, present_match=True))],
)


def routes(engines: Iterable[str], to_pods: route_v3.RouteAction, *, picked_only: bool) -> list[route_v3.Route]:
    """The routes of the engines' inference paths to `to_pods`, and last the one that refuses the rest. `picked_only`:
    what the picker named no endpoint for is refused."""
    asked = {EXT_PROC_FILTER: Any.pack(ExtProcPerRoute(overrides=ExtProcOverrides()))}
    if picked_only:
        rules = rbac_v3.Rbac(action=rbac_v3.RbacAction.ALLOW, policies={"picked": _PICKED})
        asked[PICKED_FILTER] = Any.pack(RbacPerRoute(rbac=Rbac(rules=rules)))
    served = [
        route_v3.Route(match=_match(rule), route=to_pods, typed_per_filter_config=asked)
        for rule in inference_paths(engines)
    ]
    # Its text is replaced by the mapper below.
    nothing = route_v3.DirectResponseAction(status=404, body=DataSource(inline_string="not found"))
    return [*served, route_v3.Route(match=route_v3.RouteMatch(prefix="/"), direct_response=nothing)]


def not_found() -> list[ResponseMapper]:
    """The answer to what is not in the list. (A 404 of the picker says which model is unknown, and stays as it is.)"""
    return replies.reply(
        replies.expression('response.code_details in ["direct_response", "route_not_found"]'),
        "There is nothing to be asked by this method and path.",
        "invalid_request_error",
        "not_found",
    )


def _match(rule: PathRule) -> route_v3.RouteMatch:
    methods = route_v3.HeaderMatcher(
        name=":method", string_match=StringMatcher(safe_regex=RegexMatcher(regex="|".join(rule.methods)))
    )
    if rule.below:
        return route_v3.RouteMatch(safe_regex=RegexMatcher(regex=re.escape(rule.path) + BELOW), headers=[methods])
    return route_v3.RouteMatch(path=rule.path, headers=[methods])
