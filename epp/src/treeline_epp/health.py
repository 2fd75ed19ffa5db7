"""The standard gRPC health service, by the name of what is asked.

`liveness` is served as long as the process lives; all other names when the picker is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from treeline_epp.extproc.server import SERVICE as EXT_PROC

ALIVE_NAME = "liveness"
READY_NAMES = frozenset({"", "readiness", "inference-extension", EXT_PROC})
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_TELL_S = 1.0
"""Telling watchers may take so long: one that does not read holds up those of its name."""


class Health:
    """What probes are answered; `starting` makes one, `set_ready` is told."""

    def __init__(self, servicer: health.aio.HealthServicer) -> None:
        self.ready = False
        self._servicer = servicer

    @classmethod
    async def starting(cls) -> Self:
        """Alive, and not ready yet."""
        made = cls(health.aio.HealthServicer())
        await made._servicer.set(ALIVE_NAME, _SERVING)
        await made.set_ready(False)
        return made

    async def set_ready(self, ready: bool) -> None:
        """Ready means: discovery has synced and requests can be decided."""
        self.ready = ready
        status = _SERVING if ready else _NOT_SERVING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TELL_S):
                await asyncio.gather(*(self._servicer.set(name, status) for name in READY_NAMES))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve it there, too."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
