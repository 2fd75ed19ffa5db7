"""The shape in which OpenAI's API reports an error."""

from __future__ import annotations

from typing import Any


def error_body(
    message: str, type: str = "invalid_request_error", param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    """Return `{"error": {...}}` with all four members, null where there is nothing to say."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}
