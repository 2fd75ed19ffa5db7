"""The format of errors in Anthropic's API. https://platform.claude.com/docs/en/api/errors"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_PATH: Final = "/v1/messages/"
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""A busy server answers 503, not Anthropic's 529, since routers and proxies look for 503."""


def is_anthropics(path: str) -> bool:
    """Whether clients of this path (without query) expect errors in Anthropic's format."""
    return _PATH in f"{path}/"


def anthropic_error_body(status: int, message: str, **more: Any) -> dict[str, Any]:
    """Returns `{"type": "error", "error": {"type", "message", …}}`; `more`: further members of the inner object."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, **more}}
