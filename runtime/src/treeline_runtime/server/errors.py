"""Errors of endpoints, and headers of busy ones. Errors of a converted chat have the field names of its API, and
Anthropic's format.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from treeline_wire import headers as wire_headers
from treeline_wire.anthropic_errors import anthropic_error_body
from treeline_wire.openai_errors import error_body, no_such_model

Header = tuple[bytes, bytes]

RETRY: tuple[Header, ...] = ((b"retry-after", b"1"),)
ELSEWHERE: tuple[Header, ...] = (*RETRY, (wire_headers.ELSEWHERE.encode(), b"true"))
OVERLOADED: tuple[Header, ...] = (*RETRY, (wire_headers.OVERLOADED.encode(), b"true"))
_SHORT = 100
NO_THREADS: Final = "thread_unsupported_request"
"""The code that makes Anthropic's client repeat a request without `thread`, with its whole conversation."""


class ApiError(Exception):
    """An error answer in OpenAI's format. `type`: None = that of the status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Iterable[Header] = (),
    ) -> None:
        super().__init__(message)
        if type is None:
            type = "server_error" if status >= 500 else "invalid_request_error"
        self.status = status
        self.body = error_body(message, type, param, code)
        self.told: dict[str, Any] = self.body["error"]
        """The other arguments by name."""
        self.headers = tuple(headers)


def short(name: object) -> str:
    """A client's text, short enough to quote."""
    text = str(name)
    return text if len(text) <= _SHORT else text[:_SHORT] + "…"


def wrong(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400 for a field. `param`: its path in the body."""
    return ApiError(400, message, param=param, code=code)


def invalid(param: str, what: str, code: str | None = "invalid_value") -> ApiError:
    """400 for an impossible value."""
    return wrong(param, f"Invalid value for {param!r}: {what}", code)


def missing(param: str) -> ApiError:
    return wrong(param, f"Missing required parameter: {param!r}", "missing_required_parameter")


def unsupported(param: str, why: str) -> ApiError:
    return invalid(param, why, "unsupported_parameter")


def overloaded(message: str) -> ApiError:
    return ApiError(503, message, type="overloaded_error", code="overloaded", headers=OVERLOADED)


def rate_limited(message: str, headers: Iterable[Header] = RETRY) -> ApiError:
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)


class UnknownModel(ApiError):
    """404: a client never gets another model than it named."""

    def __init__(self, name: object, *served: str) -> None:
        self.name, self.served = short(name), served
        super().__init__(404, no_such_model(self.name, served), param="model", code="model_not_found")

    def without_picker(self) -> ApiError:
        """The same if no picker was asked: it may be an InferenceModel's name, or another pool's model."""
        return ApiError(
            503,
            f"The model `{self.name}` cannot be found while the endpoint picker is away: only the names that pools "
            "themselves serve are known then. Try again soon.",
            type="service_unavailable",
            param="model",
            code="picker_unavailable",
            headers=ELSEWHERE,
        )


class ClientGone(Exception):
    """The client disconnected before it had sent its request."""


@contextlib.contextmanager
def renamed(names: Mapping[str, str], members: Mapping[str, str]) -> Iterator[None]:
    """Names the field of the original request that a wrong chat field was made from: `names` has those with other
    names, `members` parts of their paths. An index into the chat's messages means nothing to a client."""
    try:
        yield
    except UnknownModel:
        raise
    except ApiError as error:
        param = error.told["param"]
        if param is None:
            raise
        new = renamed_param(param, names, members)
        message = error.told["message"].replace(param, new)
        for quoted, called in names.items():
            message = message.replace(f"{quoted!r}", f"{called!r}")
        told = error.told | {"message": message, "param": new}
        raise ApiError(error.status, **told, headers=error.headers) from None


def renamed_param(param: str, names: Mapping[str, str], members: Mapping[str, str]) -> str:
    """The request's name of a chat field made from it; `names` and `members` as above."""
    found = re.match(r"[^.\[]*", param)
    name = param if found is None else found[0]
    if name == "messages":
        return names[name]
    within = param[len(name) :]
    for member, called in members.items():
        within = within.replace(member, called)
    return names.get(name, name) + within


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The same in Anthropic's format."""
    told = error.told
    if told["code"] != NO_THREADS:
        return anthropic_error_body(error.status, told["message"])
    details = {"error_code": NO_THREADS, "unsupported": [told["param"]]}
    return anthropic_error_body(error.status, told["message"], details=details)
