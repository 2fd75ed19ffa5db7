"""Errors of a chat that was converted from another API: in the names of that API, and Anthropic's in its shape."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from treeline_wire.anthropic_errors import anthropic_error_body

from treeline_runtime.server.errors import ApiError, UnknownModel

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
        new = renamed_param(param, names, members)
        raise ApiError(
            error.status,
            _said(told["message"].replace(param, new), names),
            type=told["type"],
            param=new,
            code=told["code"],
            headers=error.headers,
        ) from None


def _said(message: str, names: Mapping[str, str]) -> str:
    """A message that quotes other fields besides."""
    for name, new in names.items():
        message = message.replace(f"{name!r}", f"{new!r}")
    return message


def renamed_param(param: str, names: Mapping[str, str], members: Mapping[str, str]) -> str:
    """What a request calls the field of a chat that was made of it; `names` and `members` as above."""
    found = re.match(r"[^.\[]*", param)
    name = param if found is None else found[0]
    if name == "messages":
        return names[name]
    within = param[len(name) :]
    for member, called in members.items():
        within = within.replace(member, called)
    return names.get(name, name) + within


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The same in Anthropic's shape."""
    told = error.body["error"]
    if told["code"] != NO_THREADS:
        return anthropic_error_body(error.status, told["message"])
    details = {"error_code": NO_THREADS, "unsupported": [told["param"]]}
    return anthropic_error_body(error.status, told["message"], details=details)
