"""The format of errors in OpenAI's API."""

from __future__ import annotations

from typing import Any


def error_body(
    message: str, type: str = "invalid_request_error", param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    """Returns `{"error": {...}}` with all four members, null if empty."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}
