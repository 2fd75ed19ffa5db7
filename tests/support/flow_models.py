"""Models with room for some requests, and flow control in front of them, without an event loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from treeline_epp.flow.control import FlowControl
from treeline_epp.flow.settings import FlowSettings
from treeline_epp.flow.ticket import Ticket
from treeline_epp.picking.decision import NoEndpoints, Saturated
from treeline_epp.picking.request import Request

from support.flow_checks import check_control

ON = FlowSettings(mode="wait", ttl_seconds=60.0)


@dataclass
class World:
    """A world of models with room for a number of requests; a model that is not in `room` has no endpoint."""

    settings: FlowSettings = ON
    room: dict[str, int] = field(default_factory=lambda: {"m": 0})
    now: float = 100.0
    decided: list[str] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock, cost = lambda: self.now, lambda _: 10.0
        self.control: FlowControl[str] = FlowControl(self.settings, self, clock, cost, self.waited.append)

    def check_room(self, request: Request, now: float) -> None:
        room = self.room.get(request.model or "")
        if room is None:
            raise NoEndpoints("none is ready")
        if not room:
            raise Saturated("full", 1.0)

    def uncached_tokens(self, request: Request, now: float) -> int:
        return request.prompt_tokens_estimate

    def decide(self, asked: Request) -> Callable[[], str]:
        def decided() -> str:
            self.check_room(asked, self.now)
            self.room[asked.model or ""] -= 1
            self.decided.append(asked.request_id)
            return asked.request_id

        return decided

    def send(self, id: str, flow: str = "f", *, size: int = 1, model: str = "m", **fields: Any) -> str | Ticket[str]:
        asked = Request(id, model=model, prompt_tokens_estimate=7, **{"pool": "p", **fields})
        return self.control.admit(asked, flow, size, self.decide(asked))

    def held(self, id: str, flow: str = "f", **fields: Any) -> Ticket[str]:
        ticket = self.send(id, flow, **fields)
        assert isinstance(ticket, Ticket)
        return ticket

    def pump(self, later_s: float = 0.0) -> None:
        self.now += later_s
        while self.control.pump():
            check_control(self.control)
        check_control(self.control)
