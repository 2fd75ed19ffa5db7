"""The endpoints that Envoy may use: the state of the EDS server (sans-IO) and its gRPC driver.

The picker and its Envoys must agree on the endpoints: for a destination that Envoy does not know, its fallback policy
picks another. So an endpoint becomes *selectable* only when every connected Envoy has acknowledged it, or a second
after it was announced. No answer is given before discovery has synced: an Envoy that outlived the last picker then
keeps the endpoints it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from treeline_wire import envoy_pb2 as pb

from treeline_epp.endpoints.spec import split_address
from treeline_epp.protowire import field, field_numbers

log = logging.getLogger(__name__)

CLUSTER = "pods"
TYPE_URL = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
ACK_PATIENCE_S = 1.0
"""Seconds after its announcement that an endpoint is selectable, even if an Envoy has not acknowledged it."""
_SLICE = 128
"""Endpoints that are serialized for Envoy before other tasks get a turn: a millisecond."""
_GROUPS, _ENTRIES = field_numbers(pb.ClusterLoadAssignment.DESCRIPTOR, "endpoints", "lb_endpoints")


@dataclass(slots=True)
class _Announced:
    draining: bool
    version: int  # of its last change
    at: float
    confirmed: bool = False  # whether it was ever selectable; an Envoy that comes later does not change that
    entry: bytes = b""  # serialized for Envoy


@dataclass(slots=True)
class _Envoy:
    node: str = ""
    subscribed: bool = False
    sent: int = 0
    acked: int = 0


class EdsState:
    """The announced endpoints, and the version that each Envoy has acknowledged. `now` is a monotonic clock's."""

    def __init__(self) -> None:
        self.version = 0
        self.synced = False
        self.acks = 0
        self.rejections = 0
        self._listed: Mapping[str, bool] = {}
        self._endpoints: dict[str, _Announced] = {}
        self._envoys: dict[int, _Envoy] = {}
        self._ids = itertools.count(1)

    def announce(self, endpoints: Mapping[str, bool], now: float) -> bool:
        """Set the whole list: address → draining. Return whether that changed it."""
        if endpoints == self._listed:
            return False
        self.version += 1
        for address in self._listed.keys() - endpoints.keys():
            del self._endpoints[address]
        for address, draining in endpoints.items():
            if self._listed.get(address) is not draining:
                self._endpoints[address] = _Announced(draining, self.version, now)
        self._listed = dict(endpoints)
        return True

    def selectable(self, address: str, now: float) -> bool:
        """Return whether decisions may name this endpoint: announced, not draining, known to every Envoy by now."""
        known = self._endpoints.get(address)
        if known is None or known.draining:
            return False
        if not known.confirmed:
            waiting = any(envoy.subscribed and envoy.acked < known.version for envoy in self._envoys.values())
            known.confirmed = not waiting or now >= known.at + ACK_PATIENCE_S
        return known.confirmed

    def pending(self) -> int:
        """Return how many connected Envoys have not acknowledged the newest list."""
        return sum(envoy.subscribed and envoy.acked < self.version for envoy in self._envoys.values())

    def connected(self) -> int:
        """Return how many Envoys are subscribed."""
        return sum(envoy.subscribed for envoy in self._envoys.values())

    # --- one Envoy ----------------------------------------------------------------------------------------------------

    def connect(self) -> int:
        """Add a new stream; return its id."""
        stream = next(self._ids)
        self._envoys[stream] = _Envoy()
        return stream

    def disconnect(self, stream: int) -> None:
        """Drop an ended stream: endpoints no longer wait for its acknowledgement."""
        self._envoys.pop(stream, None)

    def on_request(self, stream: int, request: pb.DiscoveryRequest) -> None:
        """Take a subscription, an acknowledgement or a rejection."""
        envoy = self._envoys[stream]
        if request.HasField("node"):
            envoy.node = request.node.id
        envoy.subscribed = CLUSTER in request.resource_names
        if not request.response_nonce:
            return  # a new subscription; a version that it names is of an earlier picker
        if request.HasField("error_detail"):
            self.rejections += 1
            log.error("envoy %s rejects the endpoints: %s", envoy.node, request.error_detail.message)
        elif request.response_nonce == str(envoy.sent):
            self.acks += 1
            envoy.acked = envoy.sent

    def write(self) -> Iterator[None]:
        """Serialize new endpoints, so that `due` takes no time; others should have a turn whenever this yields."""
        new = [(address, known) for address, known in self._endpoints.items() if not known.entry]
        for at, (address, known) in enumerate(new, 1):
            known.entry = _entry(address, draining=known.draining)
            if at % _SLICE == 0:
                yield

    def due(self, stream: int) -> pb.DiscoveryResponse | None:
        """Return the answer that this Envoy should get now, if any; it then counts as sent."""
        envoy = self._envoys[stream]
        # Version 0 is the empty list before the first announcement; an Envoy waits for it at start, so it gets it.
        if not (self.synced and envoy.subscribed) or (envoy.sent == self.version and self.version):
            return None
        if self.version == 0:
            self.version = 1
        envoy.sent = self.version
        for _ in self.write():
            pass
        entries = b"".join(self._endpoints[address].entry for address in sorted(self._endpoints))
        named = pb.ClusterLoadAssignment(cluster_name=CLUSTER).SerializeToString()
        response = pb.DiscoveryResponse(version_info=str(self.version), nonce=str(self.version), type_url=TYPE_URL)
        response.resources.add(type_url=TYPE_URL, value=named + field(_GROUPS, entries))
        return response


def _entry(address: str, *, draining: bool) -> bytes:
    """Serialize an endpoint as an entry of the list."""
    host, port = split_address(address)
    health = pb.DRAINING if draining else pb.HEALTHY
    entry = pb.LbEndpoint(health_status=health)
    entry.endpoint.address.socket_address.address = host
    entry.endpoint.address.socket_address.port_value = int(port)
    return field(_ENTRIES, entry.SerializeToString())


class Eds:
    """The EDS service: `EdsState` plus streams. `on_ack` is called after an Envoy's message or departure."""

    def __init__(self) -> None:
        self.state = EdsState()
        self.on_ack: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()

    def announce(self, endpoints: Mapping[str, bool]) -> None:
        """Set the whole list, address → draining, and send it to all Envoys."""
        if self.state.announce(endpoints, time.monotonic()):
            self._wake()

    def set_synced(self) -> None:
        """Answer Envoys from now on: discovery is complete."""
        self.state.synced = True
        self._wake()

    def selectable(self, address: str) -> bool:
        """See `EdsState.selectable`."""
        return self.state.selectable(address, time.monotonic())

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to add to a server."""
        stream = grpc.stream_stream_rpc_method_handler(
            self._stream,
            request_deserializer=pb.DiscoveryRequest.FromString,
            response_serializer=pb.DiscoveryResponse.SerializeToString,
        )
        service = "envoy.service.endpoint.v3.EndpointDiscoveryService"
        return grpc.method_handlers_generic_handler(service, {"StreamEndpoints": stream})

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _stream(self, _requests: Any, context: Any) -> None:
        stream = self.state.connect()
        writer = asyncio.create_task(self._write(stream, context))
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                self.state.on_request(stream, request)
                self._wake()
                self.on_ack()
        finally:
            self.state.disconnect(stream)
            self.on_ack()
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer

    async def _write(self, stream: int, context: Any) -> None:
        while True:
            changed = self._changed
            for _ in self.state.write():
                await asyncio.sleep(0)
            if (response := self.state.due(stream)) is not None:
                await context.write(response)
            await changed.wait()
