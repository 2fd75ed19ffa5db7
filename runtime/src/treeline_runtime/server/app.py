"""The ASGI application of one listener: its routes, who may use them, errors, and the bond between a request and its
connection. Which listener serves what is in `surfaces`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from treeline_runtime.server.errors import UnknownModel
from treeline_runtime.server.http import (
    ApiError,
    ClientGone,
    Receive,
    Request,
    Response,
    Scope,
    Send,
    error_response,
    event,
    run_while_connected,
)
from treeline_runtime.server.limits import MAX_CONTROL_BYTES, Reservation, TooMuchInFlight
from treeline_runtime.server.service import Service

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response | None]]
"""Returns the answer, or None when it has streamed one."""


@dataclass(frozen=True)
class Route:
    handler: Handler
    open: bool = False
    """Needs no API key."""
    generates: bool = False
    """Is waited for when the server drains."""
    max_body: int = MAX_CONTROL_BYTES
    """Bytes."""


Guard = Callable[[Request, Route], None]
"""Raises ApiError for a request that may not use the route. It is asked before the body is read."""


@dataclass(frozen=True)
class Surface:
    """What one listener serves."""

    routes: Mapping[tuple[str, str], Route]
    """By method and path."""
    guard: Guard
    tails: Mapping[str, Route] = field(default_factory=dict)
    """GET routes that end in a parameter, by what stands before it."""
    served_by_other: Mapping[str, str] = field(default_factory=dict)
    """Paths that another listener serves, and the words that say where."""


class App:
    """`await app(scope, receive, send)`. Knows the paths of its surface; anything else is a 404 in OpenAI's shape."""

    def __init__(self, surface: Surface, service: Service) -> None:
        self._surface = surface
        self._service = service
        self._paths = {path for _, path in surface.routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is configured for HTTP alone"
        request = Request(scope, receive, send)
        status = 200
        try:
            response = await self._answer(request)
        except ClientGone:
            return  # nobody is there to be answered
        except UnknownModel as error:
            response = error_response(error.without_picker() if request.bypassed_picker else error)
        except ApiError as error:
            response = error_response(error)
        except TooMuchInFlight:
            response = error_response(
                self._service.overloaded("Requests in flight take all the memory that they may have")
            )
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            broken = ApiError(500, "The server failed to answer; its log says why", type="server_error")
            if request.streaming:
                await request.end_events(event(broken.body))
                return
            response = error_response(broken)
        finally:
            if request.reservation is not None:
                request.reservation.release()
        if response is not None:
            status = response.status
            await response.send(send)
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._service.metrics.http_requests.labels(path, status).inc()

    async def _answer(self, request: Request) -> Response | None:
        route = self._route(request)
        self._surface.guard(request, route)
        await request.read_body(route.max_body, Reservation(self._service.budget))
        answering = run_while_connected(request.receive, _call(route.handler, request))
        if not route.generates:
            return await answering
        with self._service.generating():
            return await answering

    def _route(self, request: Request) -> Route:
        method, path = request.scope["method"], request.path
        if method == "HEAD":  # as GET; the server leaves out the body
            method = "GET"
        route = self._surface.routes.get((method, path))
        if route is not None:
            return route
        methods = [known for known, its in self._surface.routes if its == path]
        for prefix, route in self._surface.tails.items():
            if not methods and path.startswith(prefix):
                if method == "GET":
                    request.path_tail = unquote(path.removeprefix(prefix))
                    return route
                methods = ["GET"]
        if not methods:
            message = self._surface.served_by_other.get(path, f"There is no {method} {path}")
            raise ApiError(404, message, code="not_found")
        allowed = allow(methods)
        if method == "OPTIONS":
            return Route(functools.partial(options, allowed), open=True)
        raise ApiError(
            405, f"{method} is not allowed here", code="method_not_allowed", headers=[(b"allow", allowed)]
        )


def allow(methods: Iterable[str]) -> bytes:
    """The value of `Allow` for a path that has these methods."""
    known = {*methods, "OPTIONS"}
    return ", ".join(sorted(known | ({"HEAD"} if "GET" in known else set()))).encode()


async def options(allowed: bytes, _request: Request) -> Response:
    return Response(b"", 204, headers=((b"allow", allowed),))


async def _call(handler: Handler, request: Request) -> Response | None:
    return await handler(request)
