"""Flow control without an event loop: which requests wait and for how long; each gets one answer."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flow_checks import check_control
from support.flow_models import World
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.transfer import Protocol, Role, Transfer
from treeline_epp.flow.control import (
    MOST_AT_ONCE,
    MOST_ENDED,
    MOST_LOOKS,
    OUTCOMES,
    FlowControl,
    Held,
    queue_full,
    waited_too_long,
)
from treeline_epp.flow.settings import FlowSettings
from treeline_epp.flow.ticket import Ticket
from treeline_epp.picking.decision import Decision, FlowRefused, NoEndpoints, PickError, Saturated
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request


def refusal(ticket: Ticket[str]) -> tuple[int, str]:
    with pytest.raises(PickError) as caught:
        ticket.result()
    return caught.value.status, caught.value.reason


def test_with_room_nothing_waits() -> None:
    world = World(room={"m": 2})
    assert [world.send("1"), world.send("2")] == ["1", "2"]
    assert not world.control.waiting
    assert sum(world.control.outcomes.values()) == 0


def test_a_request_that_no_pair_can_split_does_not_hold_up_the_others() -> None:
    picker, meets = Picker(), Transfer(Protocol.SGLANG)
    for role in (Role.PREFILL, Role.DECODE):
        picker.add_endpoint(EndpointSpec(role, f"10.0.0.{len(role)}:8000", role=role, transfer=meets))
    holding = FlowSettings(mode="wait", ttl_seconds=60.0, hold_empty_pool_seconds=60.0)
    flow: FlowControl[Decision] = FlowControl(holding, picker, lambda: 0.0, lambda _: 1.0)
    split, whole = Request("s", pool="default", apart=True), Request("w", pool="default")
    waits = flow.admit(whole, "f", 1, lambda: picker.pick(whole, 0.0))
    assert isinstance(waits, Ticket)
    ticket = flow.admit(split, "f", 1, lambda: picker.pick(split, 0.0))
    assert isinstance(ticket, Ticket)
    assert (ticket.done, waits.done) == (True, False)


def test_without_room_requests_wait_and_continue_in_order() -> None:
    world = World()
    first, second = world.held("1"), world.held("2")
    told: list[str] = []
    first.when_done(lambda: told.append("1"))
    world.pump()
    assert not first.done
    assert world.control.held() == {"p": Held(2, 2, 14, 0.0)}
    world.room["m"] = 1
    third = world.held("3")
    world.pump(0.5)
    assert (first.done, second.done, third.done) == (True, False, False), "a late request is behind the waiting ones"
    assert told == ["1"]
    world.room["m"] = 5
    world.pump(0.5)
    assert [ticket.result() for ticket in (first, second, third)] == world.decided == ["1", "2", "3"]
    assert not world.control.waiting
    assert world.waited == pytest.approx([0.0, 1.0, 1.0])
    assert world.control.held() == {"p": Held(0, 0, 0, 0.0)}


def test_a_more_urgent_request_passes_those_that_wait() -> None:
    world = World()
    low = world.held("low")
    world.room["m"] = 1
    assert world.send("high", priority=1) == "high"
    world.pump()
    assert not low.done


def test_requests_waiting_for_other_endpoints_cost_no_time() -> None:
    world = World(room={"m": 0, "n": 1})
    waiting = world.held("1")
    ticket = world.held("2", model="n")
    assert (waiting.done, ticket.done) == (False, True)
    assert ticket.result() == "2"
    world.room["m"] = 1
    late = world.held("3")
    assert (waiting.done, late.done) == (True, False), "a waiting request precedes a new one"
    check_control(world.control)


def test_sheddable_requests_do_not_wait_for_room() -> None:
    world = World()
    with pytest.raises(Saturated):
        world.send("1", priority=-1, sheddable=True)
    world.held("2")
    world.room["m"] = 1
    with pytest.raises(Saturated):
        world.send("3", priority=-1, sheddable=True)
    assert world.control.held()["p"].requests == 1


def test_a_request_that_waits_too_long_is_told_why() -> None:
    world = World(settings=FlowSettings(mode="wait", ttl_seconds=60.0, hold_empty_pool_seconds=200.0))
    busy, none = world.held("1"), world.held("2", model="gone")
    world.pump(59.9)
    assert not busy.done
    world.pump(0.2)
    assert refusal(busy) == (429, "rejected-ttl-expired")
    world.pump(139.0)
    assert not none.done
    world.pump(1.0)
    assert refusal(none) == (503, "rejected-ttl-expired")
    assert world.control.outcomes == Counter(expired=2)


def test_requests_wait_for_a_pool_without_endpoints_only_if_configured() -> None:
    with pytest.raises(NoEndpoints):
        World(room={}).send("1")
    world = World(FlowSettings(hold_empty_pool_seconds=300.0), room={})
    with pytest.raises(NoEndpoints):
        world.send("1", subset=frozenset({"10.0.0.1"}))
    held = world.held("2")
    shed = world.held("3", priority=-1, sheddable=True)
    world.pump(10.0)
    assert not held.done
    world.room["m"] = 10
    world.pump(10.0)
    assert (held.result(), shed.result()) == ("2", "3")


def test_a_sheddable_request_that_waited_for_an_endpoint_is_shed_if_it_is_full_at_once() -> None:
    world = World(FlowSettings(mode="wait", hold_empty_pool_seconds=300.0), room={})
    shed, held = world.held("1", priority=-1, sheddable=True), world.held("2")
    world.room["m"] = 1
    world.pump()
    assert held.result() == "2"
    assert refusal(shed) == (429, "rejected-saturated")


def test_a_request_that_arrives_as_the_pool_comes_up_is_not_refused() -> None:
    world = World(FlowSettings(hold_empty_pool_seconds=300.0), room={})
    first = world.held("1")
    world.room["m"] = 10
    late = world.held("2")
    assert world.send("3", priority=-1, sheddable=True) == "3"
    assert (first.result(), late.result()) == ("1", "2")


def test_requests_that_wait_for_room_keep_their_place_when_the_endpoints_go() -> None:
    world = World()
    first, second = world.held("1"), world.held("2")
    del world.room["m"]
    world.pump()
    with pytest.raises(NoEndpoints):
        world.send("3")
    world.room["m"] = 1
    world.pump(30.0)
    assert first.result() == "1"
    del world.room["m"]
    world.pump(31.0)
    assert refusal(second) == (503, "rejected-ttl-expired")


def test_queues_are_bounded_by_count_and_bytes_for_each_pool_and_priority() -> None:
    world = World(FlowSettings(mode="wait", max_requests=2, max_bytes=100))
    world.held("1", size=50)
    with pytest.raises(FlowRefused, match="Too many requests") as caught:
        world.send("2", size=51)
    assert (caught.value.status, caught.value.reason) == (429, "rejected-saturated")
    world.held("3", size=50)
    with pytest.raises(FlowRefused, match="Too many requests"):
        world.send("4", size=0)
    world.held("5", size=100, priority=1)
    world.held("6", size=100, pool="other")
    check_control(world.control)
    assert world.control.outcomes["queue_full"] == 2


def test_a_full_queue_evicts_from_the_largest_flow() -> None:
    world = World(FlowSettings(mode="wait", max_requests=4, max_bytes=100))
    loud = [world.held(f"a{number}", "a", size=20) for number in range(4)]
    first, second = world.held("b0", "b"), world.held("b1", "b")
    assert [ticket.done for ticket in loud] == [False, False, True, True], "the last of those who have most"
    assert refusal(loud[3]) == (429, "rejected-saturated")
    with pytest.raises(FlowRefused, match="Too many requests"):
        world.send("b2", "b")
    with pytest.raises(FlowRefused, match="Too many requests"):
        world.send("a4", "a")
    world.held("c0", "c")
    assert sum(ticket.done for ticket in (*loud, first, second)) == 3
    with pytest.raises(FlowRefused, match="Too many requests"):
        world.send("d0", "d", size=101)
    check_control(world.control)
    assert world.control.outcomes["displaced"] == 3


def test_the_byte_bound_evicts_from_the_flow_with_most_bytes() -> None:
    world = World(FlowSettings(mode="wait", max_requests=90, max_bytes=100))
    large = [world.held(f"a{number}", "a", size=45) for number in range(2)]
    small = [world.held(f"b{number}", "b", size=1) for number in range(10)]
    world.held("c", "c", size=40)
    assert [ticket.done for ticket in large] == [False, True]
    assert not any(ticket.done for ticket in small)
    with pytest.raises(FlowRefused, match="Too many requests"):
        world.send("d", "d", size=46)
    check_control(world.control)


def test_a_full_queue_for_a_pool_without_an_endpoint_is_503() -> None:
    world = World(FlowSettings(max_requests=1, hold_empty_pool_seconds=9.0), room={})
    world.held("1")
    with pytest.raises(FlowRefused, match="Too many requests") as caught:
        world.send("2")
    assert (caught.value.status, caught.value.reason) == (503, "rejected-no-endpoints")


def test_a_client_that_goes_leaves_nothing() -> None:
    world = World()
    ticket = world.held("1")
    world.control.cancel(ticket)
    world.control.cancel(ticket)
    assert not world.control.waiting
    world.room["m"] = 1
    world.pump()
    assert world.decided == []
    assert ticket.result() is None
    check_control(world.control)


def test_shutting_down_refuses_waiting_and_new_requests() -> None:
    world = World()
    tickets = [world.held(str(number), priority=number % 2) for number in range(4)]
    world.control.close()
    assert {refusal(ticket) for ticket in tickets} == {(503, "rejected-shutting-down")}
    with pytest.raises(FlowRefused, match="shutting down"):
        world.send("late")
    world.room["m"] = 1
    assert world.send("room") == "room"
    check_control(world.control)


@pytest.mark.parametrize("closes", [False, True])
def test_many_expired_requests_are_answered_a_few_at_a_time(closes: bool) -> None:
    world = World(room={f"m{n}": 0 for n in range(5 * MOST_ENDED)})
    tickets = [world.held(str(n), model=f"m{n}") for n in range(5 * MOST_ENDED)]
    world.now += 1e6
    if closes:
        world.control.close()
    steps, before = [], 0
    while world.control.waiting:
        more = world.control.pump()
        ended = sum(ticket.done for ticket in tickets)
        steps.append(ended - before)
        assert more == world.control.waiting, "they need no timer"
        before = ended
        check_control(world.control)
    assert max(steps[closes:]) == MOST_ENDED
    assert world.control.outcomes == {"shutting_down" if closes else "expired": len(tickets)}


def test_many_released_requests_continue_in_parts_shared_by_pools() -> None:
    world = World(room={"m": 0, "n": 0})
    many = [world.held(str(number)) for number in range(3 * MOST_AT_ONCE)]
    other = world.held("other", model="n", pool="q")
    world.room.update(m=1000, n=1000)
    assert world.control.pump()
    assert sum(ticket.done for ticket in many) == MOST_AT_ONCE
    assert world.control.pump()
    assert other.done
    assert world.control.pump()
    assert not world.control.pump()
    assert all(ticket.done for ticket in many)
    assert world.decided[:2] == ["0", "1"]


def test_an_error_in_one_decision_does_not_block_the_others() -> None:
    world = World()

    def broken() -> str:
        raise ZeroDivisionError

    bad = world.held("bad")
    bad.decide = broken
    good = world.held("good")
    world.room["m"] = 1
    world.pump()
    with pytest.raises(ZeroDivisionError):
        bad.result()
    assert good.result() == "good"


def test_a_request_that_meets_a_failing_queue_gets_the_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(room={"m": 0, "n": 1})
    waiting = world.held("1")
    with monkeypatch.context() as broken:
        broken.setattr(world.control, "pump", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            world.send("2", model="n")
    world.pump()
    assert world.decided == []
    assert [(held.requests, world.room["n"]) for held in world.control.held().values()] == [(1, 1)]
    world.room["m"] = 1
    world.pump()
    assert waiting.result() == "1"


def test_a_queue_error_after_a_requests_turn_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(room={"m": 0, "n": 1})
    world.held("1")
    pump = world.control.pump
    with monkeypatch.context() as broken:
        broken.setattr(world.control, "pump", lambda: pump() or 1 // 0)
        world.send("2", model="n")
    assert world.decided == ["2"]
    assert "ZeroDivisionError" in caplog.text


def test_refusals_have_words_for_the_client() -> None:
    errors = [waited_too_long(60.0, empty=True), queue_full("so", empty=False)]
    assert str(errors[0]) == "The request waited 60 s, and no endpoint of its pool was ready."
    assert str(errors[1]) == "Too many requests: so."


@pytest.mark.parametrize(("told", "least", "most"), [(True, 0.45, 0.55), (False, 0.0, 0.2)])
def test_shares_are_computed_from_actual_tokens(told: bool, least: float, most: float) -> None:
    """Two flows at 10:1, both believed to take 100 tokens a request; those of the first take 900."""
    world = World(FlowSettings(mode="wait", max_requests=100_000, ttl_seconds=1e9))
    took = {"a": 900, "b": 100}
    running: list[tuple[float, Ticket[str]]] = []
    begun: list[Ticket[str]] = []
    used: Counter[str] = Counter()
    world.control = FlowControl(world.settings, world, lambda: world.now, lambda _: 100.0)
    slots = 8
    for step in range(1500):
        world.now += 0.01
        if step % 4 == 0:
            for number in range(22):
                ticket = world.held(f"{step}.{number}", "b" if number % 11 == 0 else "a")
                ticket.when_done(partial(begun.append, ticket))
        for end, ticket in [one for one in running if one[0] <= world.now]:
            running.remove((end, ticket))
            used[ticket.flow] += took[ticket.flow]
            assert ticket.served is not None
            if told:
                ticket.served(took[ticket.flow])
        world.room["m"] = slots - len(running)
        while world.control.pump():
            pass
        world.room["m"] = 0
        running += [(world.now + took[ticket.flow] / 1000, ticket) for ticket in begun]
        begun.clear()
    assert least <= used["b"] / used.total() <= most


sizes = st.integers(0, 9)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from("abc"), st.integers(-1, 1), st.sampled_from("mnz"), sizes),
        st.tuples(st.just("room"), st.sampled_from("mnz"), st.integers(0, 3)),
        st.tuples(st.just("gone"), st.sampled_from("mnz")),
        st.tuples(st.just("pump"), st.floats(0.0, 8.0)),
        st.tuples(st.just("cancel"), st.integers(0, 99)),
    ),
    max_size=80,
)


@given(steps, st.booleans(), st.sampled_from([0.0, 5.0]))
@settings(max_examples=120, deadline=None, derandomize=True)
def test_no_request_is_lost_or_answered_twice_and_no_bound_is_exceeded(
    steps: list[Any], on: bool, hold_s: float
) -> None:
    limits = FlowSettings("wait" if on else "off", 1.0, 1, 4, 20, 10.0, hold_s)
    world = World(limits, room={"m": 1})
    tickets: list[Ticket[str]] = []
    told: Counter[str] = Counter()
    sent = refused = 0
    for step in steps:
        match step:
            case ("send", flow, priority, model, size):
                sent += 1
                shed = priority < 0
                try:
                    found = world.send(str(sent), flow, size=size, model=model, priority=priority, sheddable=shed)
                except PickError:
                    refused += 1
                    continue
                if isinstance(found, Ticket):
                    tickets.append(found)
                    found.when_done(lambda id=str(sent): told.update([id]))  # type: ignore[misc]
                else:
                    told[found] += 1
            case ("room", model, room):
                world.room[model] = room
            case ("gone", model):
                world.room.pop(model, None)
            case ("pump", later_s):
                world.pump(later_s)
                assert all(world.now - t.since < t.limit_s for t in tickets if not t.done)
                assert not any(world.room.get(t.asked.model or "") for t in tickets if not t.done), "no room is left"
            case ("cancel", at) if tickets:
                world.control.cancel(tickets[at % len(tickets)])
        check_control(world.control)
    world.control.close()
    world.pump()
    assert len(told) + refused == sent
    assert set(told.values()) <= {1}
    assert all(ticket.done for ticket in tickets)
    assert len(world.decided) == len(set(world.decided))
    outcomes = world.control.outcomes
    assert set(outcomes) <= set(OUTCOMES)
    assert sum(outcomes.values()) - outcomes["queue_full"] == len(tickets)


def test_many_models_without_room_are_checked_a_few_at_a_time_in_turn() -> None:
    count = 5 * MOST_LOOKS
    world = World(room={f"m{n}": 0 for n in range(count)})
    tickets = [world.held(f"r{n}", f"f{n}", model=f"m{n}") for n in range(count)]
    looks: list[str] = []
    check_room = world.check_room

    def counted(request: Request, now: float) -> None:
        looks.append(request.model or "")
        check_room(request, now)

    world.check_room = counted  # type: ignore[method-assign]
    while len(looks) < count:
        before = len(looks)
        assert not world.control.pump(), "others have their turn before it goes on"
        assert 0 < len(looks) - before <= MOST_LOOKS
        check_control(world.control)
    assert len(set(looks)) == count, "none is examined twice before all were"
    world.room[f"m{count - 1}"] = 1
    for _ in range(8):
        world.control.pump()
        check_control(world.control)
    assert tickets[-1].done
    assert tickets[-1].result() == f"r{count - 1}"
    assert not any(ticket.done for ticket in tickets[:-1])
