"""Who may use a path: the security dependencies of the listeners."""

from __future__ import annotations

import hmac

from fastapi import Request
from fastapi.security import HTTPBearer
from treeline_wire.browsers import foreign_host, page_request

from treeline_runtime.server.errors import ApiError


class ApiKey(HTTPBearer):
    """`Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it; anybody where there is no
    key."""

    def __init__(self, key: str | None) -> None:
        super().__init__(
            scheme_name="key",
            description="Where the server was started with --api-key. `x-api-key` takes it as well.",
        )
        self._key = key

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        if self._key is None or _holds(request, self._key):
            return
        named = request.headers.getlist("x-api-key")
        if len(named) != 1 or not _equal(named[0], self._key):
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")


class AdminKey(HTTPBearer):
    """`Authorization: Bearer KEY`, and no web pages. Without a key, which only a listener on loopback may do, the
    request must name loopback as its host."""

    def __init__(self, key: str | None, *, loopback: bool) -> None:
        super().__init__(scheme_name="admin key")
        self._key = key
        self._loopback = loopback

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        headers = request.scope["headers"]
        refused = page_request(headers) or (foreign_host(headers) if self._loopback else None)
        if refused is not None:
            raise ApiError(403, f"Administration is refused: {refused}", code="forbidden")
        if self._key is not None and not _holds(request, self._key):
            raise ApiError(
                401,
                "Administration needs 'Authorization: Bearer KEY' with the key of --admin-key",
                code="invalid_admin_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )


async def without_body(request: Request) -> None:
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
