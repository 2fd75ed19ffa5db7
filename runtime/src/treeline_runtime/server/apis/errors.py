"""Errors of a chat that was converted from another API: in the names of that API, and Anthropic's in its shape."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from treeline_runtime.server.errors import UnknownModel
from treeline_runtime.server.http import ApiError, ErrorShape, named_event

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""https://platform.claude.com/docs/en/api/errors"""
NO_THREADS: Final = "thread_unsupported_request"
"""Upon this code Anthropic's client sends a request again without `thread`, its conversation whole."""


@contextlib.contextmanager
def renamed(names: Mapping[str, str], members: Mapping[str, str]) -> Iterator[None]:
    """Where a chat's field is at fault, tells the one that it was made of: `names` has those whose names differ, and
    `members` parts of the paths within them. An index among the messages of the chat means nothing to a client."""
    try:
        yield
    except UnknownModel:
        raise
    except ApiError as error:
        told = error.body["error"]
        param = told["param"]
        if param is None:
            raise
        new = _renamed(param, names, members)
        raise ApiError(
            error.status,
            told["message"].replace(param, new),
            type=told["type"],
            param=new,
            code=told["code"],
            headers=error.headers,
        ) from None


def _renamed(param: str, names: Mapping[str, str], members: Mapping[str, str]) -> str:
    found = re.match(r"[^.\[]*", param)
    name = param if found is None else found[0]
    if name == "messages":
        return names[name]
    within = param[len(name) :]
    for member, called in members.items():
        within = within.replace(member, called)
    return names.get(name, name) + within


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}}`. The status stays what it is: 503, not 529, says that a server
    is busy, since routers and proxies go by that."""
    type = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told = error.body["error"]
    made: dict[str, Any] = {"type": type, "message": told["message"]}
    if told["code"] == NO_THREADS:
        made["details"] = {"error_code": NO_THREADS, "unsupported": [told["param"]]}
    return {"type": "error", "error": made}


ANTHROPIC_ERRORS = ErrorShape(anthropic_error, lambda error: named_event("error", anthropic_error(error)))
