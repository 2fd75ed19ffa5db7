"""Calls as requests of the HTTP side, so that keys, limits, budgets and drains are the same.

A call becomes an `ApiRequest` whose headers are the call's metadata, and its body one of `/generate`. Whatever ends the
call (a deadline, its client, an error) ends its generations.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError, Message
from starlette.types import Message as Received

from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.http import ApiRequest
from treeline_runtime.server.jobs import GenerateTask
from treeline_runtime.server.limits import Reservation, TooMuchInFlight
from treeline_runtime.server.pacing import encode_json
from treeline_runtime.server.service import BROKEN, Service
from treeline_runtime.tokenizer_manager import InflightRequest

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Any
"""Pairs of names and texts, or bytes."""
_STATUS: Final[Mapping[int, grpc.StatusCode]] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""Of HTTP → of gRPC; others are INTERNAL."""

logger = logging.getLogger(__name__)


def request_of(metadata: Metadata, method: str = "") -> ApiRequest:
    """A call as a request whose body has not been set."""
    pairs = [(name.encode(), text if isinstance(text, bytes) else text.encode("latin-1")) for name, text in metadata]
    return ApiRequest({"type": "http", "method": "POST", "path": method, "headers": pairs}, _nothing)


async def _nothing() -> Received:
    raise AssertionError("the body has been read")


@contextlib.asynccontextmanager
async def generating(
    service: Service, context: Context, method: str, body: Mapping[str, Any]
) -> AsyncIterator[tuple[GenerateTask, InflightRequest]]:
    """The running generations of a body of `/generate`. Raises ApiError, TooMuchInFlight."""
    asked = request_of(context.invocation_metadata(), method)
    try:
        asked.parts = [encode_json(body)]
        asked.size = len(asked.parts[0])
        asked.reservation = Reservation(service.budget, asked.client)
        asked.reservation.grow(asked.size)
        service.count_generating(1)
        asked.on_end = lambda: service.count_generating(-1)
        service.admit_for(asked, "generate")
        task = await service.read(asked, "generate")
        assert isinstance(task, GenerateTask)
        yield task, await service.open(task, asked)
    finally:
        asked.end()


def told(error: Exception) -> ApiError:
    """An exception of a call as the error that its client gets."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TooMuchInFlight):
        return ApiError(503, "Requests in flight use all memory that is allowed")
    logger.error("a gRPC call failed", exc_info=error)
    return BROKEN


async def end(context: Context, error: Exception) -> NoReturn:
    """Ends a call with the status of an exception."""
    shown = told(error)
    await context.abort(_STATUS.get(shown.status, grpc.StatusCode.INTERNAL), shown.told["message"])


def unary(
    method: Callable[[Any, Context], Awaitable[Message]], request: type[Message], *, empty: bool = False
) -> grpc.RpcMethodHandler:
    """The handler of a method with one answer. `empty`: nothing is asked, so that the call need not be waited for."""

    async def call(asked: Any, context: Context) -> Message:
        try:
            return await method(request() if empty else _message(asked, request), context)
        except Exception as error:
            await end(context, error)

    made = grpc.stream_unary_rpc_method_handler if empty else grpc.unary_unary_rpc_method_handler
    return made(call, None, _encode)


def streaming(
    method: Callable[[Any, Context], AsyncGenerator[Message]], request: type[Message], *, both: bool = False
) -> grpc.RpcMethodHandler:
    """The handler of a method with a stream of answers. `both`: it gets a stream of requests, too."""

    async def call(asked: Any, context: Context) -> AsyncIterator[Message]:
        try:
            read = (_message(one, request) async for one in asked) if both else _message(asked, request)
            async with contextlib.aclosing(method(read, context)) as answers:
                async for answer in answers:
                    yield answer
        except Exception as error:
            await end(context, error)

    made = grpc.stream_stream_rpc_method_handler if both else grpc.unary_stream_rpc_method_handler
    return made(call, None, _encode)


def _message(data: bytes, kind: type[Message]) -> Message:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ApiError(400, "The message cannot be read: it is none of this method's") from None


def _encode(message: Message) -> bytes:
    return message.SerializeToString()
