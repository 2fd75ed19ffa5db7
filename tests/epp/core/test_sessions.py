"""Sessions: a request goes to the endpoint of its session's last one, as long as that costs little more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.epp_core import KEYS, WIDTH, Prompt
from support.peers import Clock, Network, Node, picker_of
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.decision import Lease, Outcome
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.request import Request
from treeline_epp.picking.sessions import LIFE_S, Sessions, stays
from treeline_wire.load import TreelineLoad

RATE = 10_000.0
LONG = Prompt([1] * 64 * WIDTH)


class World:
    """Four equal endpoints; requests without keys, unless one is given."""

    def __init__(self, size: int = 4, policy: str = "predicted_ttft") -> None:
        self.picker = Picker(PickerConfig(policy, fallbacks=1, seed=3))
        self.now = 0.0
        for number in range(size):
            self.picker.add_endpoint(EndpointSpec(f"e{number}", f"10.0.0.{number}:80", pool="p", models=("m",)))
            self.report(f"e{number}")

    def report(self, name: str, **fields: object) -> None:
        load = TreelineLoad(prefill_tokens_per_s=RATE, **fields)  # type: ignore[arg-type]
        self.picker.on_load(name, load, self.now)

    def ask(self, session: int = 0, tokens: int = 1000, **fields: object) -> Request:
        return Request("id", "m", prompt_tokens_estimate=tokens, pool="p", session=session, **fields)  # type: ignore[arg-type]

    def take(self, session: int = 0, tokens: int = 1000, **fields: object) -> Lease:
        return self.picker.reserve(self.picker.pick(self.ask(session, tokens, **fields), self.now), self.now)

    def serve(self, session: int = 0, outcome: Outcome = Outcome.HEADERS, **served: str) -> str:
        """Serve a request and return its endpoint."""
        lease = self.take(session)
        self.picker.close(lease, self.now, outcome, **served)  # type: ignore[arg-type]
        return lease.endpoint.spec.name


@pytest.mark.parametrize("size", [4, 40])  # few endpoints are ranked one by one, many in arrays
def test_requests_of_a_session_go_to_its_last_endpoint(size: int) -> None:
    world = World(size)
    homes = {session: world.serve(session) for session in range(1, 20)}
    assert len(set(homes.values())) > 1
    for session, home in homes.items():
        assert [world.serve(session) for _ in range(5)] == [home] * 5
    assert len({world.serve() for _ in range(40)}) > 1, "those of no session are spread"


@pytest.mark.parametrize("size", [2, 40])
def test_a_session_leaves_an_endpoint_that_costs_more_than_twice_as_much(size: int) -> None:
    world = World(size)
    home = world.serve(1)
    cost_s = 2 * 1000 / RATE  # its prefill, and that it delays another one
    world.report(home, waiting=1, waiting_uncached_tokens=int(0.9 * cost_s * RATE))
    decision = world.picker.pick(world.ask(1), world.now)
    assert decision.endpoint.name == home
    assert len(set(decision.destinations)) == 2, "and has another one to fall back on"
    world.report(home, waiting=1, waiting_uncached_tokens=int(1.2 * cost_s * RATE))
    away = world.serve(1)
    assert away != home
    world.report(home)
    assert world.serve(1) == away, "where its last request went"


def test_a_known_prefix_outweighs_a_session() -> None:
    world = World()
    home = world.serve(1)
    other = next(name for name in world.picker.endpoints if name != home)
    world.picker.index.apply(world.picker.endpoints[other].pod, LONG.stored(), KEYS)
    lease = world.take(1, len(LONG.tokens), key=LONG.key)
    assert lease.endpoint.spec.name == other


def test_a_session_without_a_usable_endpoint_is_picked_again() -> None:
    world = World()
    home = world.serve(1)
    world.picker.set_ready(home, False)
    second = world.serve(1)
    assert second != home
    world.picker.remove_endpoint(second)
    assert world.serve(1) not in (home, second)
    others = frozenset(f"10.0.0.{number}" for number in range(4)) - {f"10.0.0.{second[1:]}"}
    for allowed in others:
        subset = frozenset({allowed})
        if allowed != f"10.0.0.{home[1:]}":
            assert world.picker.pick(world.ask(1, subset=subset), world.now).endpoint.address == f"{allowed}:80"


def test_a_session_continues_on_the_endpoint_that_answered() -> None:
    world = World()
    home = world.serve(1)
    other = next(name for name in world.picker.endpoints if name != home)
    assert world.serve(1, served=f"10.0.0.{other[1:]}:80") == home
    assert world.picker.sessions.endpoint(1, world.now) == other
    assert world.serve(1, Outcome.ERROR) == other
    assert world.picker.sessions.endpoint(1, world.now) is None
    for outcome in (Outcome.CANCELLED, Outcome.OVERLOADED):
        home = world.serve(1, outcome)
        assert world.picker.sessions.endpoint(1, world.now) == home, "it may come back"


def test_policies_without_costs_ignore_sessions() -> None:
    world = World(policy="round_robin")
    assert len({world.serve(1) for _ in range(8)}) == 4


def test_an_idle_session_expires() -> None:
    world = World()
    world.serve(1)
    world.now = LIFE_S / 2
    world.serve(2)
    world.now = LIFE_S
    world.picker.on_tick(world.now)
    assert (world.picker.sessions.endpoint(1, world.now), len(world.picker.sessions)) == (None, 1)


def test_immediate_children_go_to_their_parents_prefix() -> None:
    """No event has come, no load was reported, and the endpoint is busy: the prediction of the prompt suffices."""
    world = World(8)
    parent = world.take(0, len(LONG.tokens), key=LONG.key, max_output_tokens=0, fork=6)
    world.picker.close(parent, world.now, Outcome.HEADERS)
    home = parent.endpoint.spec.name
    world.report(home, running=2, max_running=16, waiting=1, waiting_uncached_tokens=200)
    children = [Prompt([*LONG.tokens, *[number] * 2 * WIDTH]) for number in range(2, 8)]
    leases = [world.take(0, len(child.tokens), key=child.key, max_output_tokens=32) for child in children]
    assert {lease.endpoint.spec.name for lease in leases} == {home}


@pytest.mark.parametrize("size", [2, 40])
def test_a_prefix_is_placed_on_an_endpoint_with_room_for_its_children(size: int) -> None:
    world = World(size)
    for name in world.picker.endpoints:
        world.report(name, running=12, max_running=26 if name == "e1" else 16, decode_step_ms=20.0)
    choices = {
        fork: {world.picker.pick(world.ask(fork=fork), 0.0).endpoint.name for _ in range(30)} for fork in (0, 3, 8)
    }
    assert len(choices[0]) > 1
    assert len(choices[3]) > 1, "they fit everywhere"
    assert choices[8] == {"e1"}


def test_other_pickers_learn_a_sessions_endpoint() -> None:
    clock = Clock()
    network = Network(clock)
    nodes = [Node(network, (f"n{at}", 1), picker_of(8), bytes([at] * 6)) for at in range(2)]
    for node in nodes:
        clock.every(0.05, node.tick)
    clock.run(clock.now + 2)
    for session in range(1, 9):
        asked = Request("id", "m", prompt_tokens_estimate=100, session=session)
        picker = nodes[session % 2].picker
        home = picker.reserve(picker.pick(asked, clock.now), clock.now).endpoint.spec.name
        clock.run(clock.now + 0.1)
        assert [node.picker.sessions.endpoint(session, clock.now) for node in nodes] == [home, home]


CLIENT = 1 << 32
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["remember", "remember", "older", "forget", "wait", "tick"]),
        st.sampled_from([client * CLIENT + one for client in (1, 2) for one in range(1, 6)]),
        st.sampled_from("abc"),
    ),
    max_size=60,
)


@given(STEPS)
def test_a_session_has_its_last_endpoint_and_clients_with_few_lose_none(steps: list[tuple[str, int, str]]) -> None:
    """With room for four sessions and two clients, two sessions of each client are safe from the other."""
    sessions, now = Sessions(most=4), 0.0
    latest: dict[int, tuple[str, float]] = {}
    for what, session, name in steps:
        if what == "remember":
            sessions.remember(session, name, now)
            latest[session] = name, now
        elif what == "older" and sessions.endpoint(session, now) is not None:
            sessions.remember(session, name, latest[session][1] - 1.0)
        elif what == "forget":
            sessions.forget(session, name)
            if latest.get(session, ("", 0.0))[0] == name:
                del latest[session]
        elif what == "wait":
            now += LIFE_S / 3
        elif what == "tick":
            sessions.expire(now)
        latest = {one: known for one, known in latest.items() if now - known[1] < LIFE_S}
        assert len(sessions) <= 4
        for client in (1, 2):
            own = {one: name for one, (name, _) in latest.items() if one // CLIENT == client}
            found = {one: there for one in own if (there := sessions.endpoint(one, now)) is not None}
            assert found.items() <= own.items()
            assert found == own or ever_more_than_two(steps, client)


def ever_more_than_two(steps: list[tuple[str, int, str]], client: int) -> bool:
    return len({session for what, session, _ in steps if what == "remember" and session // CLIENT == client}) > 2


def test_a_session_stays_up_to_a_little_over_twice_the_cost() -> None:
    assert stays(0.020, 0.0)
    assert stays(0.219, 0.1)
    assert not stays(0.221, 0.1)
