"""The edge's allow-list: a route for every inference path, and 404 for everything else.

The picker's filter, and the one that stops what it named no endpoint for, are switched off unless a route switches them
on. So what is not in the list is refused at its headers: the picker is not asked, no body is read, and no endpoint is
named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from treeline_wire import headers
from treeline_wire.paths import BELOW, PathRule, inference_paths

from treeline_operator.envoy.messages import Message, expression, reply, typed

EXT_PROC_FILTER: Final = "envoy.filters.http.ext_proc"
PICKED_FILTER: Final = "envoy.filters.http.rbac"
_PICKED: Final[Message] = {
    "permissions": [{"any": True}],
    "principals": [{"header": {"name": headers.DESTINATION, "present_match": True}}],
}


def routes(engines: Iterable[str], to_pods: Message, *, picked_only: bool) -> list[Message]:
    """The routes of the engines' inference paths to `to_pods`, and last the one that refuses the rest. `picked_only`:
    what the picker named no endpoint for is refused."""
    asked = {EXT_PROC_FILTER: typed("extensions.filters.http.ext_proc.v3.ExtProcPerRoute", {"overrides": {}})}
    if picked_only:
        rules = {"rules": {"policies": {"picked": _PICKED}}}
        asked[PICKED_FILTER] = typed("extensions.filters.http.rbac.v3.RBACPerRoute", {"rbac": rules})
    served = [
        {"match": _match(rule), "route": to_pods, "typed_per_filter_config": asked} for rule in inference_paths(engines)
    ]
    # Its text is replaced by the mapper below.
    nothing = {"status": 404, "body": {"inline_string": "not found"}}
    return [*served, {"match": {"prefix": "/"}, "direct_response": nothing}]


def not_found() -> list[Message]:
    """The answer to what is not in the list. (A 404 of the picker says which model is unknown, and stays as it is.)"""
    return reply(
        expression('response.code_details in ["direct_response", "route_not_found"]'),
        "There is nothing to be asked by this method and path.",
        "invalid_request_error",
        "not_found",
    )


def _match(rule: PathRule) -> Message:
    methods = {"name": ":method", "string_match": {"safe_regex": {"regex": "|".join(rule.methods)}}}
    path = {"safe_regex": {"regex": re.escape(rule.path) + BELOW}} if rule.below else {"path": rule.path}
    return {**path, "headers": [methods]}
