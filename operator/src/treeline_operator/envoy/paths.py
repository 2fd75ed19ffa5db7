"""The edge's allow-list: a route for every inference path, and 404 for everything else.

The picker's filter is switched off unless a route switches it on. So what is not in the list is refused at its headers:
the picker is not asked, no body is read, and no endpoint is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.config.route import v3 as route_v3
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExtProcOverrides, ExtProcPerRoute
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import ResponseMapper
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher
from envoy_data_plane.google.protobuf import Any
from treeline_wire.paths import BELOW, PathRule, inference_paths

from treeline_operator.envoy import replies

EXT_PROC_FILTER = "envoy.filters.http.ext_proc"


def routes(engines: Iterable[str], to_pods: route_v3.RouteAction) -> list[route_v3.Route]:
    """The routes of the engines' inference paths to `to_pods`, and last the one that refuses the rest."""
    asked = {EXT_PROC_FILTER: Any.pack(ExtProcPerRoute(overrides=ExtProcOverrides()))}
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
