"""What endpoints depend on: the request with its body, read within the bounds of its path."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from treeline_runtime.server.access import Guarded
from treeline_runtime.server.http import ApiRequest
from treeline_runtime.server.limits import MAX_BODY_BYTES, MAX_CONTROL_BYTES, Reservation
from treeline_runtime.server.service import Service


class _Reading(Guarded):
    """Reads the body of a request that may use its path. `app.Observed` ends the request when its answer has left."""

    def __init__(self, limit: int, *, generates: bool = False) -> None:
        """`limit`: of the body, in bytes. `generates`: a drain waits for the request."""
        super().__init__()
        self._limit = limit
        self._generates = generates

    async def __call__(self, request: Request) -> ApiRequest:  # type: ignore[override]
        await super().__call__(request)
        service: Service = request.app.state.service
        asked = request.state.asked = ApiRequest(request.scope, request.receive, service)
        if self._generates and service.tracing is not None:
            asked.span = service.tracing.begin(asked)
        await asked.read_body(self._limit, Reservation(service.budget, asked.client))
        if self._generates:
            asked.counted = True
            service.count_generating(1)
        asked.watch()
        return asked


Controlling = Annotated[ApiRequest, Depends(_Reading(MAX_CONTROL_BYTES))]
"""Of endpoints that take no prompt."""
Converting = Annotated[ApiRequest, Depends(_Reading(MAX_BODY_BYTES))]
Checking = Annotated[ApiRequest, Depends(_Reading(MAX_CONTROL_BYTES, generates=True))]
Generating = Annotated[ApiRequest, Depends(_Reading(MAX_BODY_BYTES, generates=True))]


class ReadingRoute(APIRoute):
    """The route of an endpoint whose one argument is the request with its body: it calls the two itself. FastAPI's
    solver of dependencies and its exit stacks, of which there is no use here, cost a small completion a quarter of its
    time. The document shows such a route as any other."""

    @functools.cached_property
    def _read(self) -> Callable[[Request], Awaitable[ApiRequest]]:
        (reading,) = self.dependant.dependencies
        found: Any = reading.call
        assert isinstance(found, _Reading)
        return found

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        asked = await self._read(Request(scope, receive, send))
        answer = await self.endpoint(asked)
        await answer(scope, receive, send)
