"""Flow control through the real picker: a proxy's streams in front, simulated engines behind."""

from __future__ import annotations

import json

import pytest
from support.flow_world import MODES, Engine, FlowWorld
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.extproc.session import ExtProcSession
from treeline_epp.flow.settings import FlowSettings
from treeline_epp.flow.ticket import Ticket
from treeline_epp.picking.decision import Lease
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import RouteRequest
from treeline_epp.requests.exchange import Exchange, Observer, Observers
from treeline_epp.requests.isolation import Isolation
from treeline_wire import envoy_pb2 as pb
from treeline_wire import headers as names
from treeline_wire.gateway_rules import Objective
from treeline_wire.models import ModelRule, PoolClaim

ON = FlowSettings(mode="wait", wait_seconds=0.5)


def share_of_b(world: FlowWorld, seconds: float, a: tuple[float, int], b: tuple[float, int]) -> float:
    """Return b's share of the tokens computed in the later three quarters. `a` and `b`: requests a second, tokens of
    each."""
    due = {"a": 0.0, "b": 0.0}
    before = world.served.copy()
    for step in range(int(seconds * 100)):
        if step == int(seconds * 25):
            before = world.served.copy()
        for flow, (rate, tokens) in (("a", a), ("b", b)):
            due[flow] += rate / 100
            while due[flow] >= 1:
                due[flow] -= 1
                world.send(flow, tokens)
        world.step(report=step % 5 == 0)
    served = world.served - before
    return served["b"] / served.total()


@pytest.mark.parametrize(("a", "b"), [((120.0, 1000), (12.0, 1000)), ((100.0, 1200), (40.0, 300))])
def test_two_flows_at_ten_to_one_get_half_each(a: tuple[float, int], b: tuple[float, int]) -> None:
    world = FlowWorld(ON)
    share = share_of_b(world, 6.0, a, b)
    assert 0.45 <= share <= 0.55
    assert world.served.total() > 0.9 * 6.0 * 20_000, "the engines were kept busy"


def test_a_full_queue_is_shared_as_evenly() -> None:
    world = FlowWorld(FlowSettings(mode="wait", wait_seconds=0.5, max_requests=20))
    assert 0.45 <= share_of_b(world, 5.0, (120.0, 1000), (12.0, 1000)) <= 0.55
    assert world.flow.outcomes["displaced"] > 0


def test_without_flow_control_the_louder_flow_gets_everything() -> None:
    world = FlowWorld(FlowSettings(mode="off"))
    assert share_of_b(world, 3.0, (120.0, 1000), (12.0, 1000)) < 0.15


def test_engines_stay_within_their_bound() -> None:
    world = FlowWorld(ON, engines=1)
    for _ in range(40):
        world.send(tokens=1000)
    (engine,) = world.engines.values()
    assert len(engine.queue) == 5, "half a second of work, and a little more"
    assert world.flow.held()["default"].requests == 35
    for _ in range(50):
        world.step()
        assert sum(caller.tokens for caller in engine.queue) <= 0.5 * engine.rate + 1000
    for _ in range(400):
        world.step()
    assert world.served["f"] == 40_000
    assert (world.callers, world.reserved(), world.flow.waiting) == ([], 0, False)


def test_a_bound_by_requests_limits_each_engine() -> None:
    world = FlowWorld(FlowSettings(mode="requests", endpoint_requests=3), engines=2)
    for _ in range(10):
        world.send(tokens=100)
    assert sorted(len(engine.queue) for engine in world.engines.values()) == [3, 3]
    for _ in range(100):
        world.step()
        assert all(len(engine.queue) <= 3 for engine in world.engines.values())
    assert world.served["f"] == 1000


def test_an_urgent_request_goes_before_those_that_wait() -> None:
    world = FlowWorld(ON, engines=1)
    world.router.rules.set([Objective("urgent", "default", 5)], [])
    waiting = [world.send() for _ in range(12)][-1]
    urgent = world.send(**{names.OBJECTIVE: "urgent"})
    while not urgent.destination:
        world.step()
    assert not waiting.destination


def test_a_sheddable_request_is_refused_and_not_kept_waiting() -> None:
    world = FlowWorld(ON, engines=1)
    world.router.rules.set([Objective("batch", "default", -1)], [])
    for _ in range(8):
        world.send()
    shed = world.send(**{names.OBJECTIVE: "batch"})
    assert (shed.refused, shed.dropped_reason) == (429, "rejected-saturated")


def test_a_client_that_leaves_while_waiting_leaves_nothing() -> None:
    world = FlowWorld(ON, engines=1)
    waiting = [world.send() for _ in range(8)][-1]
    assert waiting.ticket is not None
    before = world.flow.held()["default"].requests
    waiting.session.close()
    assert world.flow.held()["default"].requests == before - 1
    waiting.session.close()
    assert world.flow.outcomes["cancelled"] == 1


def test_a_client_that_leaves_at_its_turn_returns_its_place() -> None:
    world = FlowWorld(ON, engines=1)
    waiting = [world.send() for _ in range(6)][-1]
    for engine in world.engines.values():
        for caller in list(engine.queue):
            caller.answered()
        engine.queue.clear()
        world.picker.on_load(engine.name, engine.load(), world.now)
    world.flow.pump()
    assert waiting.ticket is not None
    assert waiting.ticket.done
    assert world.reserved() == 1
    waiting.session.close()
    assert world.reserved() == 0


def test_shutting_down_answers_all_waiting_requests() -> None:
    world = FlowWorld(ON, engines=1)
    callers = [world.send() for _ in range(10)]
    waiting = [caller for caller in callers if caller.ticket is not None]
    world.flow.close()
    world.step()
    assert {(caller.refused, caller.dropped_reason) for caller in waiting} == {(503, "rejected-shutting-down")}
    assert world.counted("refusals_total", code="shutting_down") == len(waiting)


@pytest.mark.parametrize("mode", [MODES.BUFFERED, MODES.FULL_DUPLEX_STREAMED])
def test_a_request_waits_for_the_first_endpoint_of_its_pool(mode: int) -> None:
    world = FlowWorld(FlowSettings(hold_empty_pool_seconds=120.0), engines=0)
    caller = world.send(mode=mode)
    assert caller.ticket is not None
    told = [reply for reply in caller.replies if reply.HasField("override_message_timeout")]
    if mode == MODES.BUFFERED:
        (timeout,) = told
        assert timeout.override_message_timeout.seconds == 721  # its prompt may be computed elsewhere then
        assert timeout.WhichOneof("response") is None
    else:
        assert told == [], "there is no timer in full duplex"
    for _ in range(100):
        world.step()
    assert caller.ticket is not None
    world.add(Engine("e", "10.0.0.9:8000", 10_000.0))
    world.step()
    assert caller.destination == "10.0.0.9:8000"
    for _ in range(20):
        world.step()
    assert world.served["f"] == 1000


def test_requests_that_waited_for_the_first_endpoint_are_parsed_again() -> None:
    world = FlowWorld(FlowSettings(hold_empty_pool_seconds=120.0), engines=0)
    world.router.isolation = Isolation(trust_edge=True, key=b"k")
    seen = Seen()
    world.router.observers = Observers([seen])
    clients = {names.CLIENT: "a", names.ISOLATION: names.PER_KEY}
    callers = [world.send(**clients) for _ in range(3)]
    world.add(Engine("e", "10.0.0.9:8000", 10_000.0))
    world.step()
    for caller in callers:
        lease = caller.session._held
        assert isinstance(lease, Lease)
        assert lease.decision.request.key is not None
        assert lease.decision.request.pool == "default"
        assert "cache_salt" in (lease.decision.request.members or {}), "the engine keeps none apart by itself"
        caller.answered()
    assert [(one.model, one.target) for one in seen.exchanges] == [("tiny", "tiny")] * 3


class Seen(Observer):
    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    def ended(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)


def test_a_model_that_the_pool_turns_out_not_to_serve_is_unknown_then() -> None:
    world = FlowWorld(FlowSettings(hold_empty_pool_seconds=120.0), engines=0)
    caller = world.send()
    world.picker.add_endpoint(EndpointSpec("e", "10.0.0.9:8000", models=("other",)))
    world.registry.set_endpoint("e", "default", ("other",), None)
    world.step()
    assert caller.refused == 404


def asked_of_a_pool(model: str) -> RouteRequest:
    body = json.dumps({"model": model, "prompt": "hello"}).encode()
    return RouteRequest({":path": "/v1/completions", ":method": "POST"}, body, None, pool="default")


@pytest.mark.parametrize(("model", "found"), [("alias", 0), ("typo", 404)])
def test_a_named_pools_models_come_from_its_first_endpoint(model: str, found: int) -> None:
    world = FlowWorld(FlowSettings(hold_empty_pool_seconds=120.0), engines=0)
    ticket = world.router.route(asked_of_a_pool(model))
    assert isinstance(ticket, Ticket)
    world.add(Engine("e", "10.0.0.9:8000", 10_000.0))
    world.registry.set_pools(
        {"default": PoolClaim("here")}, [ModelRule("alias", "alias", "default", targets=(("tiny", 1),))]
    )
    world.step()
    assert ticket.done
    result = world.router.resume(ticket)
    assert getattr(result, "status", 0) == found


def test_a_fallback_pool_takes_requests_that_wait_for_an_empty_pool() -> None:
    world = FlowWorld(FlowSettings(hold_empty_pool_seconds=120.0), engines=0)
    rule = ModelRule("r", "alias", "empty", targets=(("tiny", 1),), fallback_pools=("default",))
    world.registry.set_pools({"empty": PoolClaim("here", ("tiny",)), "default": PoolClaim("here")}, [rule])
    path = {":path": "/v1/completions", ":method": "POST"}
    asked = [
        RouteRequest(path, json.dumps({"model": name, "prompt": "x"}).encode(), None) for name in ("tiny", "alias")
    ]
    alone, *others = [world.router.route(one) for one in (*asked, asked[1])]
    world.add(Engine("e", "10.0.0.9:8000", 10_000.0))
    world.step()
    world.step()
    assert isinstance(alone, Ticket)
    assert not alone.done, "no fallback may take its place"
    for ticket in others:
        assert isinstance(ticket, Ticket)
        assert ticket.done
        routed = world.router.resume(ticket)
        assert isinstance(routed, Lease)
        assert routed.destination == "10.0.0.9:8000"


@pytest.mark.parametrize("engines", [0, 1])
def test_invented_model_names_are_checked_together(engines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = FlowWorld(FlowSettings(mode="requests", endpoint_requests=1, hold_empty_pool_seconds=9.0), 0)
    if engines:  # of the kind that takes any name, and full
        world.picker.add_endpoint(EndpointSpec("e", "10.0.0.9:8000"))
        world.registry.set_endpoint("e", "default", (), None)
        assert isinstance(world.router.route(asked_of_a_pool("first")), Lease)
    tickets = [world.router.route(asked_of_a_pool(f"name {number}")) for number in range(50)]
    assert all(isinstance(ticket, Ticket) for ticket in tickets)
    looks: list[str | None] = []
    look = world.picker.check_room

    def looking(request: Request, now: float) -> None:
        looks.append(request.model)
        look(request, now)

    monkeypatch.setattr(world.picker, "check_room", looking)
    world.flow.pump()
    assert len(looks) == 1


def test_a_request_without_an_endpoint_is_refused_when_its_time_is_over() -> None:
    world = FlowWorld(FlowSettings(hold_empty_pool_seconds=0.5), engines=0)
    caller = world.send()
    for _ in range(51):
        world.step()
    assert (caller.refused, caller.dropped_reason) == (503, "rejected-ttl-expired")
    assert FlowWorld(FlowSettings(), engines=0).send().dropped_reason == "rejected-no-endpoints"


def test_a_proxy_that_only_shows_its_requests_leaves_none_waiting() -> None:
    world = FlowWorld(ON, engines=1)
    for _ in range(8):
        world.send()
    before = world.flow.held()["default"].requests
    session = ExtProcSession(world.router, world.limits)
    head = pb.ProcessingRequest(observability_mode=True)
    head.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/completions")
    whole = pb.ProcessingRequest(observability_mode=True)
    whole.request_body.CopyFrom(pb.HttpBody(body=b'{"model": "tiny", "prompt": "x"}', end_of_stream=True))
    assert [*session.answers(head.SerializeToString()), *session.answers(whole.SerializeToString())] == []
    assert world.flow.held()["default"].requests == before
    assert session.ended
    session.close()
