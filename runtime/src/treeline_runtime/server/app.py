"""The FastAPI application of one listener: routers and error answers. `surfaces` says which listener serves what."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from treeline_wire import headers as wire_headers
from treeline_wire.anthropic_errors import is_anthropics
from treeline_wire.ollama_errors import is_ollamas, ollama_error_body

from treeline_runtime.server import schema
from treeline_runtime.server.dependencies import Guard
from treeline_runtime.server.docs_page import HEADERS, docs_page
from treeline_runtime.server.errors import ApiError, ClientGone, UnknownModel, anthropic_error
from treeline_runtime.server.http import ApiRequest, json_answer
from treeline_runtime.server.limits import TooMuchInFlight
from treeline_runtime.server.service import BROKEN, Service

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""nginx's status for a disconnected client; no client sees it."""
PREFLIGHT_MAX_AGE_S = 600


def application(
    service: Service,
    guard: Guard,
    routers: Iterable[APIRouter],
    *,
    hints: Mapping[str, str],
    documented: bool = False,
    allowed_origins: Sequence[str] = (),
) -> ASGIApp:
    """`guard`: called by `Guarded`. `routers`: most frequent first. `hints`: messages for paths served elsewhere.
    `documented`: serves the OpenAPI document and its page. `allowed_origins`: of web pages; "*" = any.
    """
    # Included routers would match each path twice.
    routes: list[BaseRoute] = [route for router in routers for route in router.routes]
    if documented:
        routes += [Route("/openapi.json", _document), Route("/docs", _docs)]
    app = FastAPI(
        title="Treeline",
        version=importlib.metadata.version("treeline-runtime"),
        description=schema.DESCRIPTION,
        # The page that FastAPI has would load scripts from another host.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        routes=routes,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service, app.state.guard, app.state.hints = service, guard, hints
    if documented:
        document = schema.document(app)
        app.state.document = json.dumps(document).encode()
        app.state.docs = docs_page(document).encode()
    for kind, answer in (
        (ApiError, _refused),
        (TooMuchInFlight, _full),
        (HTTPException, _not_served),
        (ClientGone, _left),
        (Exception, _broken),
    ):
        app.add_exception_handler(kind, answer)
    served: ASGIApp = app
    if allowed_origins:
        # Credentials (cookies) are never allowed: the API knows none, and keys come in a header that a preflight names.
        served = CORSMiddleware(
            app,
            allow_origins=allowed_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=(
                wire_headers.PROMPT_TOKENS,
                wire_headers.CACHED_TOKENS,
                wire_headers.IGNORED,
                "retry-after",
            ),
            max_age=PREFLIGHT_MAX_AGE_S,
        )
    return Observed(served, service)


class Observed:
    """Counts answers, adds the header of ignored fields, ends requests, and while the server drains their connections.
    HEAD is a GET without the body, which the server leaves out."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._metrics = service.metrics
        self._state = service.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        state = scope.setdefault("state", {})
        ended = False

        async def observed(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                if message["status"] != CLIENT_LEFT:
                    self._metrics.http_requests.labels(_path_of(scope), message["status"]).inc()
                if self._state.draining:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
                asked: ApiRequest | None = state.get("asked")
                if asked is not None and asked.ignored:
                    ignored = (wire_headers.IGNORED.encode(), ", ".join(asked.ignored).encode())
                    message["headers"] = [*message["headers"], ignored]
                if asked is not None and asked.span is not None and message["status"] < 400:
                    asked.span.answered()
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self._app(scope, receive, observed)
        except asyncio.CancelledError as error:
            _note(state, error)
            task = asyncio.current_task()
            if "asked" not in state or not state["asked"].left or task is None or task.uncancel():
                raise
        except Exception:
            # Starlette raises an error again that it has answered with a 500; the server would close the connection for
            # it.
            if not ended:
                raise
            logger.exception("%s %s failed", scope["method"], _path_of(scope))
        finally:
            if "asked" in state:
                state.pop("asked").end()


def _note(state: Mapping[str, Any], error: BaseException) -> None:
    if "asked" in state and state["asked"].span is not None:
        state["asked"].span.failed(error)


def _path_of(scope: Scope) -> str:
    """The route's path with parameter names, which clients cannot choose."""
    if "route" in scope:
        return str(scope["route"].path)
    return str(scope["path"]) if "endpoint" in scope else "other"  # FastAPI's own routes have no parameters


async def _document(request: Request) -> Response:
    """The OpenAPI document. Anyone may ask for it, so it is encoded once."""
    return Response(request.app.state.document, media_type="application/json")


async def _docs(request: Request) -> Response:
    """The document as a page. It was made once, too."""
    return Response(request.app.state.docs, media_type="text/html", headers=HEADERS)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    _note(request.scope["state"], error)
    headers = request.headers
    # The edge fails open: no picker chose this replica.
    bypassed = wire_headers.EDGE in headers and wire_headers.DESTINATION not in headers
    if isinstance(error, UnknownModel) and bypassed:
        error = error.without_picker()
    path, body = request.url.path, error.body
    if is_anthropics(path):
        body = anthropic_error(error)
    elif is_ollamas(path):
        body = ollama_error_body(error.told["message"])
    return json_answer(body, error.status, error.headers)


async def _full(request: Request, _: Exception) -> Response:
    service: Service = request.app.state.service
    return await _refused(request, service.overloaded("Requests in flight use all memory that is allowed"))


async def _not_served(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 405:
        headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
        refused = ApiError(405, f"{method} is not allowed here", code="method_not_allowed", headers=headers)
    else:
        said = request.app.state.hints.get(path, f"There is no {method} {path}")
        refused = ApiError(error.status_code, said, code="not_found")
    return await _refused(request, refused)


async def _left(request: Request, error: Exception) -> Response:
    _note(request.scope["state"], error)
    return Response(status_code=CLIENT_LEFT)


async def _broken(request: Request, error: Exception) -> Response:
    """`Observed` logs the traceback."""
    _note(request.scope["state"], error)
    return await _refused(request, BROKEN)
