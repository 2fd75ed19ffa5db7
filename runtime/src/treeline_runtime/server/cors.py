"""Cross-origin requests: whether pages of other origins may call the API from a browser. Off unless told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from treeline_wire import headers as wire_headers

from treeline_runtime.server.http import Header, Message, Receive, Scope, Send

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
PREFLIGHT_MAX_AGE_S = 600
_READABLE = ", ".join(
    (wire_headers.PROMPT_TOKENS, wire_headers.CACHED_TOKENS, wire_headers.IGNORED, "retry-after")
).encode()


class Cors:
    """An ASGI application around another one: answers preflight requests and marks answers to allowed origins.

    Credentials (cookies) are never allowed: the API knows none, and keys come in a header that a preflight asks for.
    """

    def __init__(self, app: AsgiApp, allowed: Sequence[str]) -> None:
        """`allowed`: origins as browsers send them, or "*"; none = the application as it is."""
        self._app = app
        self._any = "*" in allowed
        self._allowed = frozenset(origin.encode() for origin in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._allowed:
            return await self._app(scope, receive, send)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        granted = self._grant(headers.get(b"origin"))
        if scope["method"] == "OPTIONS" and granted and b"access-control-request-method" in headers:
            await _preflight(send, granted, headers)
            return None

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *granted, (b"vary", b"origin")]
            await send(message)

        return await self._app(scope, receive, marked)

    def _grant(self, origin: bytes | None) -> list[Header]:
        if origin is None or not (self._any or origin in self._allowed):
            return []
        return [
            (b"access-control-allow-origin", b"*" if self._any else origin),
            (b"access-control-expose-headers", _READABLE),
        ]


async def _preflight(send: Send, granted: list[Header], asked: dict[bytes, bytes]) -> None:
    headers = [
        *granted,
        (b"access-control-allow-methods", b"GET, HEAD, POST, OPTIONS"),
        (
            b"access-control-allow-headers",
            asked.get(b"access-control-request-headers", b"authorization, content-type"),
        ),
        (b"access-control-max-age", b"%d" % PREFLIGHT_MAX_AGE_S),
        (b"vary", b"origin, access-control-request-headers"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
