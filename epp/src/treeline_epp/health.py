"""The standard gRPC health service, by the name of what is asked.

`liveness` is served as long as the process lives; all other names when the picker is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Self

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from treeline_epp.extproc.http2_server import Methods, Push
from treeline_epp.extproc.session import SERVICE as EXT_PROC
from treeline_epp.http2.grpc import CallError, Status

ALIVE_NAME = "liveness"
READY_NAMES = frozenset({"", "readiness", "inference-extension", EXT_PROC})
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE = "grpc.health.v1.Health"
_TELL_S = 1.0
"""Telling watchers may take so long: one that does not read holds up those of its name."""


class Health:
    """What probes are answered; `starting` makes one, `set_ready` changes it."""

    def __init__(self, servicer: health.aio.HealthServicer) -> None:
        self.ready = False
        self._servicer = servicer
        self._watchers: set[Callable[[], None]] = set()

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
        for told in list(self._watchers):
            told()
        status = _SERVING if ready else _NOT_SERVING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TELL_S):
                await asyncio.gather(*(self._servicer.set(name, status) for name in READY_NAMES))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve it there, too."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def status(self, name: str) -> int | None:
        """Of a name, as the service's protocol has it; None: it is unknown."""
        if name == ALIVE_NAME:
            return int(_SERVING)
        return int(_SERVING if self.ready else _NOT_SERVING) if name in READY_NAMES else None

    def methods(self) -> Methods:
        """The same service for a server of our own."""
        return {
            f"/{_SERVICE}/Check": lambda _push, _fields: _Check(self),
            f"/{_SERVICE}/Watch": lambda push, _fields: _Watch(self, push),
        }

    @contextlib.contextmanager
    def watched(self, told: Callable[[], None]) -> Iterator[None]:
        """`told` is called when something has changed."""
        self._watchers.add(told)
        try:
            yield
        finally:
            self._watchers.discard(told)


class _Check:
    """Implements `Call`: one request, one answer."""

    lingers = False

    def __init__(self, health: Health) -> None:
        self._health = health
        self.ended = False

    def answers(self, data: bytes | None) -> Iterator[bytes | None]:
        status = self._health.status(_service_of(data))
        if status is None:
            raise CallError(Status.NOT_FOUND, "this service is not known")
        self.ended = True
        yield _answer(status)

    def close(self, *, lost: bool) -> None:
        pass


class _Watch:
    """Implements `Call`: the status now, and whenever it changes."""

    ended, lingers = False, False

    def __init__(self, health: Health, push: Push) -> None:
        self._health = health
        self._push = push
        self._open = contextlib.ExitStack()
        self._name: str | None = None
        self._told: int | None = None

    def answers(self, data: bytes | None) -> Iterator[bytes | None]:
        if self._name is None:
            self._name = _service_of(data)
            self._told = self._status()
            self._open.enter_context(self._health.watched(self._changed))
            yield _answer(self._told)

    def close(self, *, lost: bool) -> None:
        self._open.close()

    def _status(self) -> int:
        status = self._health.status(self._name or "")
        return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN) if status is None else status

    def _changed(self) -> None:
        status = self._status()
        if status != self._told:
            self._told = status
            self._push(_answer(status))


def _service_of(data: bytes | None) -> str:
    if data is None:
        raise CallError(Status.RESOURCE_EXHAUSTED, "no HealthCheckRequest is so large")
    try:
        return str(health_pb2.HealthCheckRequest.FromString(data).service)
    except DecodeError as error:
        raise CallError(Status.INVALID_ARGUMENT, f"not a HealthCheckRequest: {error}") from None


def _answer(status: int) -> bytes:
    return bytes(health_pb2.HealthCheckResponse(status=status).SerializeToString())
