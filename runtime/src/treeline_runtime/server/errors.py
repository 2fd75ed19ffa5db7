"""Errors that endpoints answer, and the headers that go with being busy."""

from __future__ import annotations

from collections.abc import Iterable

from treeline_wire import headers as wire_headers
from treeline_wire.openai_errors import error_body

Header = tuple[bytes, bytes]

RETRY: tuple[Header, ...] = ((b"retry-after", b"1"),)
ELSEWHERE: tuple[Header, ...] = (*RETRY, (wire_headers.ELSEWHERE.encode(), b"true"))
OVERLOADED: tuple[Header, ...] = (*RETRY, (wire_headers.OVERLOADED.encode(), b"true"))
_SHORT = 100


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Iterable[Header] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, type, param, code)
        self.headers = tuple(headers)


def short(name: object) -> str:
    """What a client wrote, short enough to be quoted in an error."""
    text = str(name)
    return text if len(text) <= _SHORT else text[:_SHORT] + "…"


def invalid(param: str, what: str, code: str | None = "invalid_value") -> ApiError:
    """400 for a value that cannot be. `param`: the field, as a path of the body."""
    return ApiError(400, f"Invalid value for {param!r}: {what}", param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    """400 for a value that is nothing to this server."""
    return invalid(param, why, "unsupported_parameter")


def overloaded(message: str) -> ApiError:
    return ApiError(503, message, type="overloaded_error", code="overloaded", headers=OVERLOADED)


class UnknownModel(ApiError):
    """404: a client never gets another model than the one that it named."""

    def __init__(self, name: object) -> None:
        self.name = short(name)
        message = f"The model `{self.name}` does not exist or you do not have access to it."
        super().__init__(404, message, param="model", code="model_not_found")

    def without_picker(self) -> ApiError:
        """The same where no picker was asked: it may be the name of an InferenceModel, or of another pool's model."""
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
    """The client closed its connection before it had sent its request."""
