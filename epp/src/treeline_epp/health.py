"""The standard gRPC health service, written out: two messages of one field each.

Names: ``liveness`` is served as long as the process lives; all others when the picker is ready.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from treeline_epp.server import SERVICE as EXT_PROC

ALIVE_NAME = "liveness"
READY_NAMES = frozenset({"", "readiness", "inference-extension", EXT_PROC})
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


def _messages() -> tuple[Any, Any]:
    """``(HealthCheckRequest, HealthCheckResponse)``, in a pool of their own so that nobody's copy clashes."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="treeline/health.proto", package="grpc.health.v1", syntax="proto3"
    )
    asked = file.message_type.add(name="HealthCheckRequest")
    asked.field.add(name="service", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    answered = file.message_type.add(name="HealthCheckResponse")
    answered.field.add(
        name="status", number=1, type=field.TYPE_INT32, label=field.LABEL_OPTIONAL
    )  # an enum on the wire
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    one, two = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"grpc.health.v1.{name}"))
        for name in ("HealthCheckRequest", "HealthCheckResponse")
    )
    return one, two


HealthCheckRequest, HealthCheckResponse = _messages()


class Health:
    """State and service in one: :meth:`set_ready` is told, probes ask."""

    def __init__(self) -> None:
        self.ready = False
        self._changed = asyncio.Event()

    def set_ready(self, ready: bool) -> None:
        """Ready means: discovery has synced and requests can be decided."""
        self.ready = ready
        self._changed.set()
        self._changed = asyncio.Event()

    def status(self, name: str) -> int:
        """The status of a name, as the protocol's number."""
        if name == ALIVE_NAME:
            return SERVING
        if name not in READY_NAMES:
            return SERVICE_UNKNOWN
        return SERVING if self.ready else NOT_SERVING

    def handler(self) -> grpc.GenericRpcHandler:
        """What to add to a server."""
        coding = {
            "request_deserializer": HealthCheckRequest.FromString,
            "response_serializer": HealthCheckResponse.SerializeToString,
        }
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **coding),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **coding),
        }
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods)

    async def _check(self, request: Any, context: Any) -> Any:
        status = self.status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service named {request.service!r}")
        return HealthCheckResponse(status=status)

    async def _watch(self, request: Any, context: Any) -> None:
        told = 0
        while True:
            changed = self._changed
            status = self.status(request.service)
            if status != told:
                told = status
                await context.write(HealthCheckResponse(status=status))
            await changed.wait()
