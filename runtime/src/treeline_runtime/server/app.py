"""The FastAPI application of one listener: its routes, who may use them, and errors. Which listener serves what is in
`surfaces`.

FastAPI finds the route and describes it; from there on a request is plain ASGI. FastAPI's own way to an endpoint would
validate bodies in the event loop, which a large one then holds up for everybody, before anything bounds them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from starlette.types import ASGIApp
from treeline_wire.anthropic_errors import is_anthropics

from treeline_runtime.server import schema
from treeline_runtime.server.apis.errors import ANTHROPIC_ERRORS
from treeline_runtime.server.errors import UnknownModel
from treeline_runtime.server.http import (
    OPENAI_ERRORS,
    ApiError,
    ClientGone,
    ErrorShape,
    Receive,
    Request,
    Response,
    Scope,
    Send,
    encode_json,
    error_response,
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
    errors: ErrorShape = OPENAI_ERRORS
    """How its API writes them."""
    operation: schema.Operation | None = None
    """What the OpenAPI document says of it; None: nothing."""


Guard = Callable[[Request, Route], None]
"""Raises ApiError for a request that may not use the route. It is asked before the body is read."""


@dataclass(frozen=True)
class Surface:
    """What one listener serves."""

    routes: Mapping[tuple[str, str], Route]
    """By method and path. A path has one method."""
    guard: Guard
    served_by_other: Mapping[str, str] = field(default_factory=dict)
    """Paths that another listener serves, and the words that say where."""
    documented: bool = False
    """Serves its OpenAPI document, and a page that shows it."""


Chooser = Callable[[Request], Route]
"""The route of a request whose path is known. Raises ApiError where it has none."""


class App(FastAPI):
    """`await app(scope, receive, send)`. Knows the paths of its surface; anything else is a 404 in OpenAI's shape."""

    def __init__(self, surface: Surface, service: Service) -> None:
        routes = dict(surface.routes)
        if surface.documented:
            routes["GET", "/openapi.json"] = Route(self._openapi, open=True)
            routes["GET", "/docs"] = Route(_docs, open=True)
        endpoints = [Endpoint(*named, route, self.answer) for named, route in routes.items()]
        super().__init__(
            title="Treeline",
            version=importlib.metadata.version("treeline-runtime"),
            routes=[*endpoints],
            openapi_url=None,  # the document and its page are routes like all others
            redirect_slashes=False,
            telemetry={"tracing": False, "metrics": False, "logs": False},
        )
        self.router.default = functools.partial(self.answer, self._unknown)
        self._surface = surface
        self._service = service
        self._endpoints = {one.path: one for one in endpoints if not one.param_convertors}
        if surface.documented:
            described = [route.operation for route in routes.values() if route.operation is not None]
            self._document = encode_json(schema.document(self, described))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Looks up a path without parameters, where FastAPI's router asks one route after the other for the rest."""
        endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            await endpoint.handle(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """None of FastAPI's: errors are answered below, bodies bounded where they are read."""
        return self.router

    async def answer(self, choose: Chooser, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is configured for HTTP alone"
        request = Request(scope, receive, send)
        status = 200
        try:
            response = await self._answer(choose(request), request)
        except ClientGone:
            return  # nobody is there to be answered
        except UnknownModel as error:
            response = error_response(error.without_picker() if request.bypassed_picker else error, request.errors)
        except ApiError as error:
            response = error_response(error, request.errors)
        except TooMuchInFlight:
            full = self._service.overloaded("Requests in flight take all the memory that they may have")
            response = error_response(full, request.errors)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            broken = ApiError(500, "The server failed to answer; its log says why", type="server_error")
            if request.streaming:
                await request.end_events(request.errors.event(broken))
                return
            response = error_response(broken, request.errors)
        finally:
            if request.reservation is not None:
                request.reservation.release()
        if response is not None:
            status = response.status
            await response.send(send, request.answer_headers)
        path = scope["path"] if scope["path"] in self._endpoints else "other"
        self._service.metrics.http_requests.labels(path, status).inc()

    async def _answer(self, route: Route, request: Request) -> Response | None:
        tracing = self._service.tracing
        if tracing is None or not route.generates:
            return await self._serve(route, request)
        with tracing.serving(request) as answered:
            return answered(await self._serve(route, request))

    async def _serve(self, route: Route, request: Request) -> Response | None:
        request.errors = route.errors
        self._surface.guard(request, route)
        await request.read_body(route.max_body, Reservation(self._service.budget, request.client))
        answering = run_while_connected(request.receive, _call(route.handler, request))
        if not route.generates:
            return await answering
        with self._service.generating():
            return await answering

    def _unknown(self, request: Request) -> Route:
        if is_anthropics(request.path):
            request.errors = ANTHROPIC_ERRORS
        said = f"There is no {request.method} {request.path}"
        raise ApiError(404, self._surface.served_by_other.get(request.path, said), code="not_found")

    async def _openapi(self, _request: Request) -> Response:
        return Response(self._document)


class Endpoint(APIRoute):
    """One path of a surface, and the method that it has; HEAD and OPTIONS come with it."""

    def __init__(self, method: str, path: str, route: Route, answer: Callable[..., Awaitable[None]]) -> None:
        super().__init__(
            path,
            _endpoint,
            methods=[method],
            operation_id="_".join(re.findall(r"\w+", path)),
            include_in_schema=route.operation is not None,
            openapi_extra=None if route.operation is None else route.operation.written(open=route.open),
        )
        self._method = method
        self._route = route
        self._answer = answer

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(self._choose, scope, receive, send)

    def _choose(self, request: Request) -> Route:
        request.errors = self._route.errors
        method = "GET" if request.method == "HEAD" else request.method  # the server leaves out the body
        if method == self._method:
            return self._route
        allowed = allow(self._method)
        if method == "OPTIONS":
            return Route(functools.partial(options, allowed), open=True)
        raise ApiError(405, f"{method} is not allowed here", code="method_not_allowed", headers=[(b"allow", allowed)])


def allow(method: str) -> bytes:
    """The value of `Allow` for a path that has this method."""
    return ", ".join(sorted({method, "OPTIONS"} | ({"HEAD"} if method == "GET" else set()))).encode()


async def options(allowed: bytes, _request: Request) -> Response:
    return Response(b"", 204, headers=((b"allow", allowed),))


async def _call(handler: Handler, request: Request) -> Response | None:
    return await handler(request)


async def _endpoint() -> None:  # what FastAPI asks for; `Endpoint.handle` is in its place
    raise NotImplementedError


async def _docs(_request: Request) -> Response:
    page = get_swagger_ui_html(openapi_url="openapi.json", title="Treeline")
    return Response(bytes(page.body), content_type=b"text/html; charset=utf-8")
