"""What endpoints depend on: the request with its body, read within the bounds of its path, and what that asks for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends, Request, Response

from treeline_runtime.models.pooling import Task as Model
from treeline_runtime.server.access import Guarded
from treeline_runtime.server.http import Answer, ApiRequest
from treeline_runtime.server.jobs import Answered, Kind, Task
from treeline_runtime.server.limits import INLINE_BYTES, MAX_BODY_BYTES, MAX_CONTROL_BYTES, Reservation
from treeline_runtime.server.service import Service


def service_of(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


Serving = Annotated[Service, Depends(service_of)]


class _Reading(Guarded):
    """Reads the body of a request that may use its path. `app.Observed` ends the request when its answer has left."""

    def __init__(self, limit: int, *, generates: bool = False) -> None:
        """`limit`: of the body, in bytes. `generates`: a drain waits for the request."""
        super().__init__()
        self._limit = limit
        self._generates = generates

    async def __call__(self, request: Request) -> ApiRequest:  # type: ignore[override]
        await super().__call__(request)
        service = service_of(request)
        asked = request.state.asked = ApiRequest(request.scope, request.receive)
        if self._generates and service.tracing is not None:
            asked.span = service.tracing.begin(asked)
        await asked.read_body(self._limit, Reservation(service.budget, asked.client))
        if self._generates:
            service.count_generating(1)
            asked.on_end = lambda: service.count_generating(-1)
        asked.watch()
        return asked


Controlling = Annotated[ApiRequest, Depends(_Reading(MAX_CONTROL_BYTES))]
"""Of endpoints that take no prompt."""
Converting = Annotated[ApiRequest, Depends(_Reading(MAX_BODY_BYTES))]
Checking = Annotated[ApiRequest, Depends(_Reading(MAX_CONTROL_BYTES, generates=True))]
Generating = Annotated[ApiRequest, Depends(_Reading(MAX_BODY_BYTES, generates=True))]


def task_of(kind: Kind, *models: Model, inline_bytes: int = INLINE_BYTES) -> Any:
    """The dependency of an endpoint that generates: what the body asks for. `models`: those that the path is for.
    `inline_bytes`: a smaller body is read in the event loop."""

    async def read(service: Serving, asked: Generating) -> Task:
        service.admit_for(asked, *models)
        return await service.read(asked, kind, inline_bytes)

    return Depends(read)


def converting(kind: Kind) -> Callable[[Service, ApiRequest], Awaitable[Response]]:
    """An endpoint of bodies that are answered as soon as they have been read."""

    async def convert(service: Serving, asked: Converting) -> Response:
        task = await service.read(asked, kind)
        assert isinstance(task, Answered)
        return Answer(task.body)

    return convert
