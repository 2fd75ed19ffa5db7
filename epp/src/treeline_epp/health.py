"""The standard gRPC health service.

`liveness` is served as long as the process lives; all other names when the picker is ready. The control port serves all
of it by grpcio's own implementation, the ext_proc port its `Check`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Final, Self

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from treeline_epp.extproc.session import SERVICE as EXT_PROC
from treeline_epp.http2.grpc import CallError, Status

ALIVE_NAME: Final = "liveness"
READY_NAMES: Final = frozenset({"", "readiness", "inference-extension", EXT_PROC})
CHECK: Final = "/grpc.health.v1.Health/Check"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_TELL_S = 1.0
"""Longest time to notify watchers: one that does not read delays the others of the same name."""


class Health:
    """The picker's health; `starting` makes one, `set_ready` changes it."""

    def __init__(self, servicer: health.aio.HealthServicer) -> None:
        self.ready = False
        self._servicer = servicer

    @classmethod
    async def starting(cls) -> Self:
        """Return a health that is alive, and not ready yet."""
        made = cls(health.aio.HealthServicer())
        await made._servicer.set(ALIVE_NAME, _SERVING)
        await made.set_ready(False)
        return made

    async def set_ready(self, ready: bool) -> None:
        """Set readiness: discovery has synced and requests can be decided."""
        self.ready = ready
        status = _SERVING if ready else _NOT_SERVING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TELL_S):
                await asyncio.gather(*(self._servicer.set(name, status) for name in READY_NAMES))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)


class Check:
    """The health check as a `Call` of the ext_proc port: one request, one answer."""

    lingers = False

    def __init__(self, health: Health) -> None:
        self._health = health
        self.ended = False

    def answers(self, data: bytes | None) -> Iterator[bytes | None]:
        """See `Call`."""
        try:
            name = health_pb2.HealthCheckRequest.FromString(data or b"").service
        except DecodeError as error:
            raise CallError(Status.INVALID_ARGUMENT, f"not a HealthCheckRequest: {error}") from None
        if name != ALIVE_NAME and name not in READY_NAMES:
            raise CallError(Status.NOT_FOUND, "this service is not known")
        self.ended = True
        serving = self._health.ready or name == ALIVE_NAME
        yield health_pb2.HealthCheckResponse(status=_SERVING if serving else _NOT_SERVING).SerializeToString()

    def close(self, *, lost: bool) -> None:
        """See `Call`."""
