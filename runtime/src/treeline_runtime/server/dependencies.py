"""Dependencies of endpoints: authorization, the request with its body read within bounds, and its meaning."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from fastapi import Depends, Request, Response
from fastapi.security import HTTPBearer
from treeline_wire.browsers import foreign_host, page_request

from treeline_runtime.models.pooling import Task as Model
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.http import Answer, ApiRequest
from treeline_runtime.server.jobs import Answered, Kind, Task
from treeline_runtime.server.limits import INLINE_BYTES, MAX_BODY_BYTES, MAX_CONTROL_BYTES, Reservation
from treeline_runtime.server.service import Service

TaskT = TypeVar("TaskT", bound=Task)
Guard = Callable[[Request], None]
"""Raises ApiError for a request that a listener refuses."""


class Guarded(HTTPBearer):
    """Calls the listener's guard. The OpenAPI document, for inference only, shows `ApiKey`."""

    def __init__(self) -> None:
        super().__init__(
            scheme_name="key",
            description="Needed if the server was started with --api-key. `x-api-key` works, too.",
        )

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        request.app.state.guard(request)


class ApiKey:
    """`Authorization: Bearer KEY`, or `x-api-key: KEY` from Anthropic's clients; anyone if there is no key."""

    def __init__(self, key: str | None) -> None:
        self._key = key

    def __call__(self, request: Request) -> None:
        if self._key is None or _holds(request, self._key):
            return
        named = request.headers.getlist("x-api-key")
        if len(named) != 1 or not _equal(named[0], self._key):
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")


class AdminKey:
    """`Authorization: Bearer KEY`, and no web pages. Without a key, possible only on loopback, the request's host must
    be a loopback name."""

    def __init__(self, key: str | None, *, loopback: bool) -> None:
        self._key = key
        self._loopback = loopback

    def __call__(self, request: Request) -> None:
        headers = request.scope["headers"]
        refused = page_request(headers) or (foreign_host(headers) if self._loopback else None)
        if refused is not None:
            raise ApiError(403, f"Administration is refused: {refused}", code="forbidden")
        if self._key is not None and not _holds(request, self._key):
            raise ApiError(
                401,
                "Administration needs 'Authorization: Bearer KEY' with the key of TREELINE_ADMIN_KEY",
                code="invalid_admin_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )


def without_body(request: Request) -> None:
    """Allows any client, but reads no body."""
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


class _Reading(Guarded):
    """Reads the body of an allowed request. `app.Observed` ends the request when its answer has been sent."""

    def __init__(self, limit: int, *, generates: bool = False) -> None:
        """`limit`: the largest body in bytes. `generates`: a drain waits for the request, once it is read."""
        super().__init__()
        self._limit = limit
        self._generates = generates

    async def __call__(self, request: Request) -> ApiRequest:  # type: ignore[override]
        await super().__call__(request)
        service: Service = request.app.state.service
        asked = request.state.asked = ApiRequest(request.scope, request.receive)
        if self._generates and service.tracing is not None:
            asked.span = service.tracing.begin(asked)
        if self._generates:
            service.count_generating(1, reading=1)
            asked.on_end = lambda: service.count_generating(-1)
        try:
            await asked.read_body(self._limit, Reservation(service.budget, asked.client))
        finally:
            if self._generates:
                service.count_generating(0, reading=-1)
        asked.watch()
        return asked


Controlling = Annotated[ApiRequest, Depends(_Reading(MAX_CONTROL_BYTES))]
Checking = Annotated[ApiRequest, Depends(_Reading(MAX_CONTROL_BYTES, generates=True))]


class Call(NamedTuple, Generic[TaskT]):
    """The argument of endpoints with a prompt, as one object: FastAPI needs some 30 µs per dependency."""

    service: Service
    asked: ApiRequest
    task: TaskT


class _Calling(_Reading):
    """Reads the body and its meaning, for a path with a prompt; see `call_of`."""

    def __init__(self, kind: Kind, models: tuple[Model, ...], inline_bytes: int) -> None:
        super().__init__(MAX_BODY_BYTES, generates=bool(models))
        self._kind: Kind = kind
        self._models = models
        self._inline_bytes = inline_bytes

    async def __call__(self, request: Request) -> Call[Any]:  # type: ignore[override]
        asked = await super().__call__(request)
        service: Service = request.app.state.service
        if self._models:
            service.admit_for(asked, *self._models)
        return Call(service, asked, await service.read(asked, self._kind, self._inline_bytes))


def call_of(kind: Kind, *models: Model, inline_bytes: int = INLINE_BYTES) -> Any:
    """The dependency of an endpoint with a prompt: its `Call`. `models`: kinds of models that the path generates with;
    none = it does not generate. `inline_bytes`: smaller bodies are read in the event loop."""
    return Depends(_Calling(kind, models, inline_bytes))


def converting(kind: Kind) -> Callable[[Call[Answered]], Awaitable[Response]]:
    """An endpoint whose answer follows directly from its body."""

    async def convert(call: Call[Answered] = call_of(kind)) -> Response:  # noqa: B008 - annotations cannot name `kind`
        return Answer(call.task.body)

    return convert
