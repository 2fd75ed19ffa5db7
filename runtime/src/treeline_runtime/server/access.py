"""Who may use a route: the guards of the listeners."""

from __future__ import annotations

import hmac

from treeline_wire.browsers import foreign_host, page_request

from treeline_runtime.server.app import Guard, Route
from treeline_runtime.server.http import ApiError, Request


def api_key(key: str | None) -> Guard:
    """`Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients say it, for every route that is not open;
    anybody where there is no key."""
    wanted = None if key is None else key.encode()

    def guard(request: Request, route: Route) -> None:
        if wanted is None or route.open:
            return
        if not _holds(request, wanted) and not _named(request, wanted):
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")

    return guard


def admin_key(key: str | None, *, loopback: bool) -> Guard:
    """`Authorization: Bearer KEY` for every route, and no web pages. Without a key, which only a listener on loopback
    may do, the request must name loopback as its host.
    """
    wanted = None if key is None else key.encode()

    def guard(request: Request, _route: Route) -> None:
        headers = request.scope["headers"]
        refused = page_request(headers) or (foreign_host(headers) if loopback else None)
        if refused is not None:
            raise ApiError(403, f"Administration is refused: {refused}", code="forbidden")
        if wanted is not None and not _holds(request, wanted):
            raise ApiError(
                401,
                "Administration needs 'Authorization: Bearer KEY' with the key of --admin-key",
                code="invalid_admin_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )

    return guard


def read_only(request: Request, _route: Route) -> None:
    """Anybody who can connect, but without a body: nothing here reads one."""
    for name, value in request.scope["headers"]:
        if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 ")):
            raise ApiError(413, "Nothing here takes a body", code="request_too_large")


def _named(request: Request, wanted: bytes) -> bool:
    given = [value for name, value in request.scope["headers"] if name == b"x-api-key"]
    return len(given) == 1 and hmac.compare_digest(given[0], wanted)


def _holds(request: Request, wanted: bytes) -> bool:
    given = [value for name, value in request.scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, key = given[0].partition(b" ")  # a scheme may be written in any case (RFC 9110, 11.1)
    return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(b" "), wanted)
