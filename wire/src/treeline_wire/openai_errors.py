"""The format of errors in OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

MOST_MODELS: Final = 10
"""Most models that an error names."""
_MOST_CHARS: Final = 256
"""Most characters of a model's name in an error."""


def error_body(
    message: str, type: str = "invalid_request_error", param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    """Returns `{"error": {...}}` with all four members, null if empty."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def no_such_model(name: str, served: Sequence[str]) -> str:
    """Returns the message of a 404 for a model: it lists the models that the client can ask for, at most
    `MOST_MODELS`.
    """
    said = f"The model `{_short(name)}` does not exist or you do not have access to it."
    if not served:
        return said
    listed = ", ".join(f"`{_short(one)}`" for one in served[:MOST_MODELS])
    left = len(served) - MOST_MODELS
    more = f" and {left} more (GET /v1/models)" if left > 0 else ""
    return f"{said} Served: {listed}{more}."


def _short(name: str) -> str:
    return name if len(name) <= _MOST_CHARS else f"{name[:_MOST_CHARS]}…"
