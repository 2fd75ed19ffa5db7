"""The format of errors in Ollama's API. https://docs.ollama.com/api/errors"""

from __future__ import annotations

from typing import Final

_PATHS: Final = ("/api/chat", "/api/generate", "/api/tags", "/api/show", "/api/ps", "/api/version")


def is_ollamas(path: str) -> bool:
    """Whether clients of this path (without query) expect errors in Ollama's format."""
    return path.rstrip("/").endswith(_PATHS)


def ollama_error_body(message: str) -> dict[str, str]:
    """Returns `{"error": message}`."""
    return {"error": message}
