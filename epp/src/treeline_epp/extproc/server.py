"""The ext_proc service on grpc.aio: a driver that moves messages between a stream and its session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from treeline_epp.extproc.convert import read
from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.metrics import Sample
from treeline_epp.requests.router import Router

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_OVERHEAD_BYTES = 4 * 1024 * 1024
"""Room in a message beyond the body: headers, metadata, and bodies a little over the limit, which get a proper 413."""


class ExtProcService:
    """The `ExternalProcessor` service."""

    def __init__(self, router: Router, limits: SessionLimits) -> None:
        self._router = router
        self._limits = limits
        router.metrics.observe(self._samples)

    def handler(self) -> grpc.GenericRpcHandler:
        """What to add to a server."""
        # Messages come as bytes: a large body in one must not be copied on its way.
        process: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(self._process)
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    async def _process(self, _requests: Any, context: Any) -> None:
        session = ExtProcSession(self._router, self._limits)
        streams = self._router.metrics.streams
        streams.inc()
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                try:
                    request, large = read(data)
                except DecodeError as error:
                    self._router.metrics.protocol_errors.inc()
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a ProcessingRequest: {error}")
                del data
                for reply in session.steps(request, large):
                    if reply is None:
                        await asyncio.sleep(0)
                    else:
                        await context.write(reply)
                del request, large
                if session.ended:
                    return
        finally:
            # Envoy ends a stream by half-closing it, by a reset (which cancels us here), or by dying.
            streams.dec()
            session.close()

    def _samples(self) -> Iterator[Sample]:
        text = "Bytes of request bodies that wait for their decision, beyond the first 64 KiB of each."
        yield "gauge", "waiting_body_bytes", text, {}, self._limits.waiting.bytes


def server_options(body_limit: int) -> list[tuple[str, int]]:
    """gRPC settings for the port that carries ext_proc."""
    return [
        ("grpc.max_receive_message_length", body_limit + _OVERHEAD_BYTES),
        ("grpc.max_send_message_length", -1),
        # One busy port should be an error, not a second picker that takes half of the streams.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", 1 << 20),
    ]
