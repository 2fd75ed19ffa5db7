"""The gRPC server: both services on one port, behind the key of the API."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from treeline_runtime.args import ServerArgs
from treeline_runtime.grpc import inference, scheduler
from treeline_runtime.grpc.calls import Context, end, request_of
from treeline_runtime.listeners import ListenError
from treeline_runtime.server.dependencies import ApiKey, Guard
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.probes import Probes
from treeline_runtime.server.service import Service

MAX_MESSAGE_BYTES: Final = 4 << 20
"""gRPC's own default: a message is parsed in the event loop, at once."""
MAX_CALLS: Final = 1024
"""The most calls at once: each may hold a message before its bytes are counted."""

logger = logging.getLogger(__name__)


class _KeyNeeded(grpc.aio.ServerInterceptor):
    """Refuses calls without the key before their messages are read."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method not in inference.OPEN:
            try:
                self._guard(request_of(handler_call_details.invocation_metadata))
            except ApiError as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def _refusing(error: ApiError) -> grpc.RpcMethodHandler:
    async def refuse(_requests: Any, context: Context) -> None:
        await end(context, error)

    return grpc.stream_unary_rpc_method_handler(refuse)  # a stream of requests, which is not read


async def started(service: Service, probes: Probes, args: ServerArgs, host: str) -> grpc.aio.Server:
    """A server on `host` and `--grpc-port` that takes calls. Raises ListenError."""
    server = grpc.aio.server(
        interceptors=[_KeyNeeded(ApiKey(args.api_key))],
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    for name, handlers in (
        (inference.SERVICE, inference.InferenceService(service, probes).handlers),
        (scheduler.SERVICE, scheduler.SchedulerService(service, probes, args).handlers),
    ):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    shown = f"[{host}]" if ":" in host else host
    try:
        port = server.add_insecure_port(f"{shown}:{args.grpc_port}")
    except RuntimeError:
        raise ListenError(f"--grpc-port: cannot listen on {shown}:{args.grpc_port}") from None
    await server.start()
    logger.info("gRPC on %s:%d", shown, port)
    return server
