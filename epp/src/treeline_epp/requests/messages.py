"""What passes between the proxy's protocol and the router: a request in, a destination or an answer out."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from treeline_wire import headers as names

from treeline_epp.requests.body import Body


class Immediate(msgspec.Struct, frozen=True, gc=False):
    """The proxy is to answer the client itself, at once. Last reply of a stream."""

    status: int
    body: bytes
    headers: list[tuple[str, bytes]]
    details: str


def path_of(headers: Mapping[str, str]) -> str:
    """The path of a request, without its query."""
    return headers.get(":path", "").partition("?")[0]


class RouteRequest(msgspec.Struct, frozen=True, gc=False):
    """Everything there is to decide on. `body` is `None` when the proxy will not show it, or not all of it; it is a
    `Body` where it has more than WHOLE_BYTES."""

    headers: Mapping[str, str]
    body: bytes | Body | None
    subset: frozenset[str] | None
    pool: str | None = None
    shows_response: bool = False
    """The proxy will show the response's body."""

    @property
    def id(self) -> str:
        """The proxy's id of the request."""
        return self.headers.get(names.REQUEST_ID, "")

    @property
    def path(self) -> str:
        return path_of(self.headers)
