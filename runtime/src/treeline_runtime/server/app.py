"""The ASGI application: routes, API key, errors, and the bond between a request and its connection."""

from __future__ import annotations

import functools
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from treeline_runtime.server import native
from treeline_runtime.server.chat import chat_completions
from treeline_runtime.server.completions import completions
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
from treeline_runtime.server.probes import Probes
from treeline_runtime.server.service import Service, UnknownModel

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


class App:
    """`await app(scope, receive, send)`. Knows every path; anything else is a 404 in OpenAI's shape."""

    def __init__(self, service: Service, probes: Probes, api_key: str | None) -> None:
        self._service = service
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self._routes = _routes(service, probes)
        self._paths = {path for _, path in self._routes}
        self._model_route = Route(probes.model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is configured for HTTP alone"
        request = Request(scope, receive, send)
        status = 200
        try:
            response = await self._answer(request)
        except ClientGone:
            return  # nobody is there to be answered
        except UnknownModel as error:
            response = error_response(error.without_picker() if request.unpicked else error)
        except ApiError as error:
            response = error_response(error)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            broken = ApiError(500, "The server failed to answer; its log says why", type="server_error")
            if request.streaming:
                await request.end_events(event(broken.body))
                return
            response = error_response(broken)
        if response is not None:
            status = response.status
            await response.send(send)
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._service.metrics.http_requests.labels(path, status).inc()

    async def _answer(self, request: Request) -> Response | None:
        route = self._route(request)
        if self._authorization is not None and not route.open:
            given = request.header(b"authorization") or b""
            if not hmac.compare_digest(given, self._authorization):
                raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")
        await request.read_body()
        answering = run_while_connected(request.receive, _call(route.handler, request))
        if not route.generates:
            return await answering
        with self._service.generating():
            return await answering

    def _route(self, request: Request) -> Route:
        method, path = request.scope["method"], request.path
        route = self._routes.get((method, path))
        if route is not None:
            return route
        if path in self._paths:
            raise ApiError(405, f"{method} is not allowed here", code="method_not_allowed")
        if method == "GET" and path.startswith("/v1/models/"):
            request.path_tail = path.removeprefix("/v1/models/")
            return self._model_route
        raise ApiError(404, f"There is no {method} {path}", code="not_found")


async def _call(handler: Handler, request: Request) -> Response | None:
    return await handler(request)


def _routes(service: Service, probes: Probes) -> dict[tuple[str, str], Route]:
    def bound(handler: Callable[[Service, Request], Awaitable[Response | None]]) -> Handler:
        return functools.partial(handler, service)

    flush, abort = Route(bound(native.flush_cache)), Route(bound(native.abort_request))
    model_info, server_info = Route(probes.model_info, open=True), Route(probes.server_info, open=True)
    ready = Route(probes.ready, open=True)
    return {
        ("POST", "/v1/chat/completions"): Route(bound(chat_completions), generates=True),
        ("POST", "/v1/completions"): Route(bound(completions), generates=True),
        ("POST", "/generate"): Route(bound(native.generate), generates=True),
        ("GET", "/v1/models"): Route(probes.models),
        ("GET", "/v1/loads"): Route(probes.loads),
        ("POST", "/tokenize"): Route(bound(native.tokenize)),
        ("POST", "/detokenize"): Route(bound(native.detokenize)),
        ("POST", "/v1/tokenize"): Route(bound(native.tokenize)),
        ("POST", "/v1/detokenize"): Route(bound(native.detokenize)),
        ("GET", "/flush_cache"): flush,
        ("POST", "/flush_cache"): flush,
        ("POST", "/abort_request"): abort,
        ("GET", "/live"): Route(probes.live, open=True),
        ("GET", "/ready"): ready,
        ("GET", "/health"): ready,
        ("GET", "/health_generate"): Route(probes.health_generate, generates=True),
        ("GET", "/model_info"): model_info,
        ("GET", "/get_model_info"): model_info,
        ("GET", "/server_info"): server_info,
        ("GET", "/get_server_info"): server_info,
        ("GET", "/metrics"): Route(probes.metrics, open=True),
        ("GET", "/treeline/tokenizer"): Route(probes.tokenizer, open=True),
        ("GET", "/debug/radix"): Route(probes.debug_radix),
    }
