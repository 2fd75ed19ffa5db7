"""A router under flow control over simulated engines, with a clock that the test advances."""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.flow.control import FlowControl
from treeline_epp.flow.settings import FlowSettings
from treeline_epp.flow.ticket import Ticket
from treeline_epp.metrics import Metrics
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.requests.gateway_rules import GatewayRules
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import Routed, Router, cost
from treeline_wire import envoy_pb2 as pb
from treeline_wire import headers as names
from treeline_wire.load import TreelineLoad

MODES = pb.ProcessingMode
STEP_S = 0.01


class Caller:
    """One request of a client, as the proxy sends it."""

    def __init__(self, world: FlowWorld, flow: str, tokens: int, mode: int, headers: dict[str, str]) -> None:
        self.world = world
        self.flow = flow
        self.tokens = tokens
        self.session = ExtProcSession(world.router, world.limits)
        self.replies: list[pb.ProcessingResponse] = []
        self.ticket: Ticket[Routed] | None = None
        self._steps = iter(())
        world.sent += 1
        head = pb.ProcessingRequest()
        head.protocol_config.request_body_mode = mode
        head.protocol_config.response_body_mode = mode
        fields = {":path": "/v1/completions", ":method": "POST", "x-request-id": f"r{world.sent}"}
        for key, value in {**fields, names.FAIRNESS_ID: flow, **headers}.items():
            head.request_headers.headers.headers.add(key=key, raw_value=value.encode())
        prompt = f"{world.sent:08}" + "x" * (4 * tokens - 8)
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1}).encode()
        whole = pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True))
        self.say(head)
        if not self.refused:
            self.say(whole)

    def say(self, message: pb.ProcessingRequest) -> None:
        """Send a message of the proxy, and answer it as far as possible."""
        self._steps = self.session.answers(message.SerializeToString())
        self.go_on()

    def go_on(self) -> None:
        """Answer until there is nothing left, or something to wait for."""
        self.ticket = None
        for step in self._steps:
            if isinstance(step, Ticket):
                self.ticket = step
                return
            if step is not None:
                self.replies.append(pb.ProcessingResponse.FromString(step))

    @property
    def refused(self) -> int:
        """Return the status of an immediate response; 0 without one."""
        last = self.replies[-1] if self.replies else pb.ProcessingResponse()
        return int(last.immediate_response.status.code)

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the immediate response."""
        found = self.replies[-1].immediate_response.headers.set_headers
        return {h.header.key: h.header.raw_value.decode() for h in found}

    @property
    def dropped_reason(self) -> str:
        return self.headers.get("x-llm-d-request-dropped-reason", "")

    @property
    def destination(self) -> str:
        """Return the endpoint that it was sent to; "" without one."""
        for reply in self.replies:
            part = getattr(reply, reply.WhichOneof("response") or "request_headers")
            if isinstance(part, pb.BodyResponse | pb.HeadersResponse):
                for option in part.response.header_mutation.set_headers:
                    if option.header.key == names.DESTINATION:
                        return str(option.header.raw_value.decode().split(",")[0])
        return ""

    def answered(self, body: bytes = b"", *, status: str = "200") -> None:
        """Answer the request: send headers with the token counts, a body if there is one, and the end of the stream."""
        head = pb.ProcessingRequest()
        fields = {":status": status, "content-type": "text/event-stream"}
        told = {names.PROMPT_TOKENS: str(self.tokens), names.CACHED_TOKENS: "0"}
        for key, value in {**fields, **told}.items():
            head.response_headers.headers.headers.add(key=key, raw_value=value.encode())
        self.say(head)
        if body:
            self.say(pb.ProcessingRequest(response_body=pb.HttpBody(body=body, end_of_stream=True)))
        self.session.close()


@dataclass
class Engine:
    """Computes prompts one after another, `rate` tokens a second."""

    name: str
    address: str
    rate: float
    queue: deque[Caller] = field(default_factory=deque)
    done_tokens: float = 0.0

    def step(self) -> list[Caller]:
        self.done_tokens += self.rate * STEP_S
        out = []
        while self.queue and self.done_tokens >= self.queue[0].tokens:
            self.done_tokens -= self.queue[0].tokens
            out.append(self.queue.popleft())
        if not self.queue:
            self.done_tokens = 0.0
        return out

    def load(self) -> TreelineLoad:
        tokens = max(0, int(sum(caller.tokens for caller in self.queue) - self.done_tokens))
        return TreelineLoad(waiting=len(self.queue), waiting_uncached_tokens=tokens, prefill_tokens_per_s=self.rate)


class FlowWorld:
    """A picker, its router, and engines that serve the model `tiny`."""

    def __init__(self, settings: FlowSettings, engines: int = 2, rate: float = 10_000.0) -> None:
        self.now = 100.0
        self.sent = 0
        self.limits = SessionLimits(1 << 20)
        self.registry = ModelRegistry()
        self.picker = Picker(PickerConfig(saturation=settings.saturation))
        self.router = Router(self.picker, self.registry, Metrics(), clock=lambda: self.now)
        self.router.rules = GatewayRules(trust_headers=True)
        self.flow: FlowControl[Routed] = FlowControl(settings, self.picker, lambda: self.now, cost)
        self.router.flow = self.flow
        self.engines: dict[str, Engine] = {}
        self.callers: list[Caller] = []
        self.served: Counter[str] = Counter()
        """Tokens that engines have computed for each flow."""
        for number in range(engines):
            self.add(Engine(f"e{number}", f"10.0.0.{number}:8000", rate))

    def add(self, engine: Engine) -> None:
        """Add an engine that is ready at once."""
        self.engines[engine.address] = engine
        self.picker.add_endpoint(EndpointSpec(engine.name, engine.address, models=("tiny",)))
        self.registry.set_endpoint(engine.name, "default", ("tiny",), None)
        self.picker.on_load(engine.name, engine.load(), self.now)

    def send(self, flow: str = "f", tokens: int = 1000, *, mode: int = MODES.BUFFERED, **headers: str) -> Caller:
        """Send a client's request; it may have to wait."""
        caller = Caller(self, flow, tokens, mode, {k.replace("_", "-"): v for k, v in headers.items()})
        self.callers.append(caller)
        self._deliver(caller)
        return caller

    def _deliver(self, caller: Caller) -> None:
        if caller.destination and caller not in self.engines[caller.destination].queue:
            self.engines[caller.destination].queue.append(caller)
            self.callers.remove(caller)
        elif caller.refused:
            self.callers.remove(caller)

    def step(self, *, report: bool = True) -> None:
        """Advance engines and waiting callers by ten milliseconds."""
        self.now += STEP_S
        for engine in self.engines.values():
            for caller in engine.step():
                caller.answered()
                self.served[caller.flow] += caller.tokens
            if report:
                self.picker.on_load(engine.name, engine.load(), self.now)
        while self.flow.pump():
            pass
        self.picker.on_tick(self.now)
        for caller in [one for one in self.callers if one.ticket is not None and one.ticket.done]:
            caller.go_on()
            self._deliver(caller)

    def reserved(self) -> int:
        return sum(len(endpoint.load.reservations) for endpoint in self.picker.endpoints.values())

    def counted(self, name: str, **labels: str) -> Any:
        return self.router.metrics.registry.get_sample_value(f"treeline_epp_{name}", labels)
