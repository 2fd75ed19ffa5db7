"""Who may use a path: the guards of the listeners, and the dependency that asks them."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from fastapi import Request
from fastapi.security import HTTPBearer
from treeline_wire.browsers import foreign_host, page_request

from treeline_runtime.server.errors import ApiError

Guard = Callable[[Request], None]
"""Raises ApiError for a request that a listener refuses."""


class Guarded(HTTPBearer):
    """Asks the guard of the listener. The OpenAPI document, of inference alone, says `ApiKey`."""

    def __init__(self) -> None:
        super().__init__(
            scheme_name="key",
            description="Where the server was started with --api-key. `x-api-key` takes it as well.",
        )

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        request.app.state.guard(request)


class ApiKey:
    """`Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it; anybody where there is no
    key."""

    def __init__(self, key: str | None) -> None:
        self._key = key

    def __call__(self, request: Request) -> None:
        if self._key is None or _holds(request, self._key):
            return
        named = request.headers.getlist("x-api-key")
        if len(named) != 1 or not _equal(named[0], self._key):
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")


class AdminKey:
    """`Authorization: Bearer KEY`, and no web pages. Without a key, which only a listener on loopback may do, the
    request must name loopback as its host."""

    def __init__(self, key: str | None, *, loopback: bool) -> None:
        self._key = key
        self._loopback = loopback

    def __call__(self, request: Request) -> None:
        headers = request.scope["headers"]
        refused = page_request(headers) or (foreign_host(headers) if self._loopback else None)
        if refused is not None:
            raise ApiError(403, f"Administration is refused: {refused}", code="forbidden")
        if self._key is not None and not _holds(request, self._key):
            raise ApiError(
                401,
                "Administration needs 'Authorization: Bearer KEY' with the key of --admin-key-file",
                code="invalid_admin_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )


def without_body(request: Request) -> None:
    """Anybody who can connect, but without a body: nothing here reads one."""
    if "transfer-encoding" in request.headers or request.headers.get("content-length", "0").strip("0 "):
        raise ApiError(413, "Nothing here takes a body", code="request_too_large")


def _holds(request: Request, key: str) -> bool:
    given = request.headers.getlist("authorization")
    if len(given) != 1:
        return False
    scheme, _, held = given[0].partition(" ")  # a scheme may be written in any case (RFC 9110, 11.1)
    return scheme.lower() == "bearer" and _equal(held.strip(" "), key)


def _equal(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode("latin-1"), key.encode())
