"""Requests and responses as a proxy sends them to a picker in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.metrics import Metrics
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.exchange import Observer, Observers
from treeline_epp.requests.gateway_rules import GatewayRules
from treeline_epp.requests.isolation import Isolation
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import Router
from treeline_wire import envoy_pb2 as pb
from treeline_wire import headers as names
from treeline_wire.tokenizer import TokenizerBundle

_MODE = pb.ProcessingMode
NONE, DUPLEX = _MODE.NONE, _MODE.FULL_DUPLEX_STREAMED


def new_router(endpoints: int = 2) -> Router:
    """Return a router over this many endpoints of the tiny model."""
    registry, picker = ModelRegistry(), Picker()
    fingerprint = registry.add_keyer(TokenizerBundle.from_dir(Path("models/tiny"))).fingerprint
    for index in range(endpoints):
        registry.set_endpoint(f"e{index}", "default", ("tiny",), fingerprint)
        picker.add_endpoint(EndpointSpec(f"e{index}", f"10.0.0.{index + 1}:8000", models=("tiny",)))
    return Router(picker, registry, Metrics())


def head(fields: Mapping[str, str], mode: int = _MODE.BUFFERED, *, end: bool = False) -> pb.ProcessingRequest:
    """Return a request's headers, and how its body will be sent."""
    message = pb.ProcessingRequest()
    message.protocol_config.request_body_mode = mode
    for key, value in fields.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    message.request_headers.end_of_stream = end
    return message


def whole(body: bytes) -> pb.ProcessingRequest:
    """Return a request's body, and its end."""
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True))


def begun(status: str = "200", *, end: bool = False, **fields: str) -> pb.ProcessingRequest:
    """Return a response's headers; underscores in names stand for dashes."""
    message = pb.ProcessingRequest()
    for key, value in {":status": status, **fields}.items():
        message.response_headers.headers.headers.add(key=key.replace("_", "-"), raw_value=value.encode())
    message.response_headers.end_of_stream = end
    return message


def replies(stream: ExtProcSession, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
    """Return the stream's immediate replies to a message."""
    said = stream.answers(message.SerializeToString())
    return [pb.ProcessingResponse.FromString(data) for data in said if isinstance(data, bytes)]


@dataclass
class Proxy:
    """A proxy and its picker; `now` is the picker's clock."""

    observers: Iterable[Observer]
    now: float = 100.0
    count: int = 0
    last: ExtProcSession | None = field(default=None)

    def __post_init__(self) -> None:
        self.router = new_router()
        self.router.observers = Observers(tuple(self.observers))
        self.router.clock = lambda: self.now
        self.router.rules = GatewayRules(trust_headers=True)
        self.router.isolation = Isolation.of(True, None)
        self.picker = self.router.picker

    def open(
        self,
        *,
        model: str = "tiny",
        headers: Mapping[str, str] = {},
        metadata: Mapping[str, str] = {},
        response: int = DUPLEX,
        observed: bool = False,
        path: str = "/v1/chat/completions",
    ) -> list[pb.ProcessingResponse]:
        """Send a request up to its decision; the stream stays open, as `last`. `metadata`: of the call."""
        self.count += 1
        self.last = ExtProcSession(self.router, SessionLimits(1 << 20), metadata)
        asks = head({":method": "POST", ":path": path, names.REQUEST_ID: f"r{self.count}", **headers})
        asks.observability_mode = observed
        asks.protocol_config.response_body_mode = response
        body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France? " * 20}]}
        return [*self._send(asks), *self._send(whole(json.dumps(body).encode()))]

    def answer(self, status: int = 200, *, ends: bool = False, **headers: str) -> None:
        """Send the response's headers; underscores in names stand for dashes."""
        self._send(begun(str(status), end=ends, **{"content-type": "application/json", **headers}))

    def chunk(self, data: bytes, *, ends: bool = False) -> None:
        """Send a piece of its body."""
        self._send(pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=ends)))

    def close(self) -> None:
        """End the stream."""
        assert self.last is not None
        self.last.close()

    def stream(self, output: int = 11, *, after_s: float = 0.5, for_s: float = 1.0, **opened: Any) -> None:
        """Run a whole exchange: a stream of events with its usage at the end."""
        self.open(**opened)
        self.answer(**{"content-type": "text/event-stream"})
        self.now += after_s
        self.chunk(b'data: {"choices":[{"delta":{"content":"Pa"}}]}\n\n')
        self.now += for_s
        usage = {"prompt_tokens": 200, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": 64}}
        self.chunk(
            b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n", ends=True
        )
        self.close()

    def _send(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        assert self.last is not None
        return replies(self.last, message)
