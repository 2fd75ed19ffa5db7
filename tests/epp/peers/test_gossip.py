"""Pickers exchange their requests in flight: they agree in the end under any faults, and no record is left over."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.peers import KEY, TICK_S, Clock, Network, Node, picker_of
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.peers.gossip import BEAT_S, DEAD_S, MOST_PEERS, Gossip
from treeline_epp.peers.ledger import MOST_OPEN, MOST_TOKENS
from treeline_epp.peers.seal import Seal, peer_key
from treeline_epp.picking.decision import Lease, Outcome
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request
from treeline_wire.peers import Ask, Closed, Delta, How, Leave, Opened, Snapshot, decode, encode, endpoint_ref

LONG = 40_000
"""Tokens of a request that takes longer than these tests."""


class World:
    """Pickers that come and go, at a network whose quality a test sets."""

    def __init__(self, pickers: int = 3, endpoints: int = 4, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.network = Network(self.clock, self._fate)
        self.bad = False
        self.endpoints = endpoints
        self.leases: dict[Node, list[Lease]] = {}
        self._started = 0
        self.nodes = [self.start(number) for number in range(pickers)]

    def _fate(self) -> Sequence[float]:
        """Draw a datagram's delays: a bad network loses a fifth, doubles a tenth, and reorders them."""
        if not self.bad:
            return (0.001,)
        copies = self.rng.choices((0, 1, 2), (2, 7, 1))[0]
        return [self.rng.random() * self.rng.choice((0.002, 0.1)) for _ in range(copies)]

    def start(self, place: int) -> Node:
        self._started += 1
        sender = self._started.to_bytes(6, "big")
        node = Node(self.network, (f"10.1.0.{place}", 9005), picker_of(self.endpoints), sender)
        self.leases[node] = []
        self.clock.every(TICK_S, node.tick, phase=self.rng.random() * TICK_S)
        return node

    def run(self, seconds: float) -> None:
        self.clock.run(self.clock.now + seconds)

    def send(self, node: Node, tokens: int = LONG, key: bytes | None = None) -> Lease:
        decision = node.picker.pick(Request("r", "m", key=key, prompt_tokens_estimate=tokens), self.clock.now)
        lease = node.picker.reserve(decision, self.clock.now)
        self.leases[node].append(lease)
        return lease

    def end(self, node: Node, lease: Lease, outcome: Outcome = Outcome.HEADERS) -> None:
        self.leases[node].remove(lease)
        node.picker.close(lease, self.clock.now, outcome, ttft_s=0.1)

    def die(self, place: int) -> None:
        """Kill a picker without a goodbye, and its requests with it."""
        node = self.nodes[place]
        del self.network.nodes[node.address]
        self.leases[node] = []

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    def step(self) -> None:
        rng, place = self.rng, self.rng.randrange(len(self.nodes))
        node, action = self.nodes[place], rng.random()
        if not node.alive:
            if action < 0.3:
                self.nodes[place] = self.start(place)
        elif action < 0.5:
            self.send(node, key=rng.randbytes(rng.choice((100, 3000))))
        elif action < 0.94 and self.leases[node]:
            self.end(node, rng.choice(self.leases[node]), rng.choice(list(Outcome)))
        elif action > 0.99:
            self.die(place)
        elif action > 0.98:
            node.leave()
            self.leases[node] = []
        self.run(rng.random() * 0.02)
        for one in self.alive:
            one.gossip.check()

    def tokens(self, node: Node) -> dict[str, int]:
        return {name: endpoint.load.reservations.tokens for name, endpoint in node.picker.endpoints.items()}

    def assert_agreed(self) -> None:
        """Check that each picker counts the requests that all have in flight, at each endpoint."""
        truth = dict.fromkeys((f"pod-{number}" for number in range(self.endpoints)), 0)
        for node in self.alive:
            for lease in self.leases[node]:
                truth[lease.endpoint.spec.name] += lease.answer.reservation.tokens
        for node in self.alive:
            assert node.gossip.in_step == len(self.alive) - 1
            assert self.tokens(node) == truth


@settings(max_examples=20)
@given(st.integers(0, 1 << 32), st.integers(2, 4))
def test_pickers_agree_and_leak_nothing_under_any_faults(seed: int, pickers: int) -> None:
    world = World(pickers, seed=seed)
    world.bad = True
    for _ in range(100):
        world.step()
    world.bad = False
    world.run(DEAD_S + 2 * BEAT_S)
    world.assert_agreed()
    for node in world.alive:
        for lease in list(world.leases[node]):
            world.end(node, lease)
    world.run(2 * BEAT_S)
    world.assert_agreed()
    assert all(not any(world.tokens(node).values()) for node in world.alive)
    assert all(node.gossip.elsewhere == len(node.gossip.own) == 0 for node in world.alive)
    world.run(60)
    assert all(len(node.gossip.landmarks) == 0 for node in world.alive)


def test_a_request_is_known_to_the_others_at_once_and_its_end_soon() -> None:
    world = World(2)
    world.run(1)
    lease = world.send(world.nodes[0])
    world.run(0.002)
    world.assert_agreed()
    assert sum(world.tokens(world.nodes[1]).values()) == LONG
    world.end(world.nodes[0], lease)
    world.run(0.02)
    world.assert_agreed()


def test_dead_pickers_are_forgotten_with_their_requests() -> None:
    world = World(3)
    world.run(1)
    world.send(world.nodes[0])
    world.run(0.1)
    world.die(0)
    world.run(DEAD_S - 1)
    assert sum(world.tokens(world.nodes[1]).values()) == LONG, "it may only be slow"
    world.run(1.5)
    world.assert_agreed()


@pytest.mark.parametrize(("leaves", "seconds"), [(True, 0.01), (False, 0.2)], ids=["it leaves", "one is in its place"])
def test_a_picker_that_says_goodbye_is_forgotten_at_once(leaves: bool, seconds: float) -> None:
    world = World(2)
    world.run(1)
    world.send(world.nodes[0])
    world.run(0.1)
    if leaves:
        world.nodes[0].leave()
    else:
        world.die(0)
        world.nodes[0] = world.start(0)
    world.run(seconds)
    world.assert_agreed()


def test_a_prompt_follows_another_pickers_choice() -> None:
    world = World(2, endpoints=8)
    world.run(1)
    key = world.rng.randbytes(8000)
    first = world.send(world.nodes[0], 2000, key)
    world.run(0.002)
    again = world.send(world.nodes[1], 2000, key)
    assert again.endpoint.spec.name == first.endpoint.spec.name
    assert again.decision.best.candidate.cached_tokens > 1900
    world.end(world.nodes[0], first, Outcome.ERROR)
    world.end(world.nodes[1], again, Outcome.ERROR)
    world.run(0.02)
    request = Request("r", "m", key=key, prompt_tokens_estimate=2000)
    for node in world.nodes:
        assert node.picker.pick(request, world.clock.now).best.candidate.cached_tokens == 0, "it came to nothing"


def test_an_endpoint_that_refused_is_full_for_all_pickers() -> None:
    world = World(2, endpoints=1)
    world.run(1)
    world.end(world.nodes[0], world.send(world.nodes[0]), Outcome.OVERLOADED)
    world.run(0.02)
    request = Request("r", "m", prompt_tokens_estimate=10)
    assert world.nodes[1].picker.pick(request, world.clock.now).best.full_s > 0.9


def test_each_picker_judges_errors_itself() -> None:
    world = World(2, endpoints=1)
    world.run(1)
    for _ in range(20):
        world.end(world.nodes[0], world.send(world.nodes[0]), Outcome.ERROR)
    world.run(0.02)
    tripped = [node.picker.endpoints["pod-0"].breaker.tripped for node in world.nodes]
    assert tripped == [True, False]


# --- one that lies, or that is a stranger -----------------------------------------------------------------------------

HOME = ("10.1.0.9", 9005)


class Liar:
    """A peer that holds the key and sends any message."""

    def __init__(self, gossip: Gossip, key: bytes = KEY) -> None:
        self.gossip, self.seal = gossip, Seal(key)
        self.seq = 0
        self.said: list[bytes] = []

    def say(self, message: Delta | Ask | Snapshot | Leave, now: float, address: tuple[str, int] = HOME) -> list[object]:
        """Send a message and return the answers."""
        reader = Seal(KEY)
        self.said.append(self.seal.close(encode(message)))
        out = self.gossip.on_datagram(self.said[-1], address, now)
        opened = [reader.open(datagram) for datagram, _ in out]
        return [decode(one[1]) for one in opened if one is not None]

    def join(self, now: float, records: tuple[Opened, ...] = ()) -> None:
        asked = self.say(Delta(1), now)
        assert isinstance(asked[0], Ask)
        self.seq = 1
        self.say(Snapshot(asked[0].nonce, 1, 0, 1, records), now)
        assert self.gossip.in_step

    def tell(self, now: float, *records: Opened | Closed) -> None:
        self.seq += 1
        self.say(Delta(self.seq, records), now)


def gossip_of(endpoints: int = 2) -> tuple[Picker, Gossip]:
    picker = picker_of(endpoints)
    gossip = Gossip(picker, KEY)
    picker.elsewhere = gossip.own
    return picker, gossip


REF = endpoint_ref("pod-0", "10.0.0.0:8000")


def test_a_stranger_changes_nothing_and_gets_no_answer() -> None:
    _, gossip = gossip_of()
    stranger = Liar(gossip, peer_key(b"another secret"))
    rng = random.Random(1)
    for _ in range(100):
        assert stranger.say(Delta(1, (Opened(1, REF, 1000, 1000),)), 0.0) == []
        assert gossip.on_datagram(rng.randbytes(rng.randrange(1300)), HOME, 0.0) == ()
    assert gossip.counts["refused"] == 200
    assert not gossip.in_step
    assert gossip.elsewhere == 0


def test_a_recorded_datagram_is_not_accepted_again() -> None:
    """The datagram is of a picker that is gone, or an old one of a picker that is there: neither is accepted."""
    picker, gossip = gossip_of()
    liar = Liar(gossip)
    recorded = liar.said
    liar.join(0.0)
    liar.tell(0.0, Opened(1, REF, 500, 100))
    liar.tell(0.0, Closed(1, How.PREFILLED))
    for datagram in list(recorded):
        gossip.on_datagram(datagram, HOME, 0.1)
    assert picker.endpoints["pod-0"].load.reservations.tokens == 0
    gossip.tick(DEAD_S)
    assert not gossip.in_step
    for now in (4.0, 5.0, 6.0):
        for datagram in recorded:
            gossip.on_datagram(datagram, HOME, now)
        assert not gossip.in_step, "it has not answered what it was asked now"
        assert picker.endpoints["pod-0"].load.reservations.tokens == 0


def test_a_datagram_from_a_false_address_blocks_no_picker() -> None:
    _, gossip = gossip_of()
    liar = Liar(gossip)
    assert len(liar.say(Delta(1), 0.0, ("10.9.9.9", 1))) == 1, "the question goes there first"
    (asked,) = liar.say(Delta(2), 0.3)
    assert isinstance(asked, Ask)
    liar.say(Snapshot(asked.nonce, 2, 0, 1), 0.3)
    assert set(gossip.addresses) == {HOME}


def test_an_old_answer_from_a_false_address_removes_no_picker() -> None:
    _, gossip = gossip_of()
    one, other = Liar(gossip), Liar(gossip)
    one.join(0.0)
    there = ("10.1.0.8", 9005)
    (asked,) = other.say(Delta(1), 0.0, there)
    assert isinstance(asked, Ask)
    other.say(Snapshot(asked.nonce, 1, 0, 1), 0.0, there)
    assert set(gossip.addresses) == {HOME, there}
    for datagram in one.said:
        gossip.on_datagram(datagram, there, 0.1)
    assert set(gossip.addresses) == {HOME, there}


def test_absurd_claims_are_bounded_and_expire() -> None:
    picker, gossip = gossip_of()
    liar = Liar(gossip)
    liar.join(0.0)
    most = (1 << 56) - 1
    liar.tell(0.0, Opened(1, REF, most, most, age_ms=0, rank=most), Opened(2, REF, 5, most, age_ms=most))
    held = picker.endpoints["pod-0"].load.reservations
    assert held.tokens == MOST_TOKENS
    picker.on_tick(1801.0)
    assert held.tokens == 0
    liar.tell(1802.0, Opened(1, REF, 7, 0), Closed(9, How.FAILED), Closed(1, How.OVERLOADED), Closed(1, How.FAILED))
    assert held.tokens == 0
    gossip.check()


def test_many_requests_and_many_pickers_are_bounded() -> None:
    _, gossip = gossip_of()
    liar = Liar(gossip)
    liar.join(0.0)
    for start in range(0, MOST_OPEN + 900, 40):
        liar.tell(0.0, *(Opened(start + number, REF, 1, 600_000) for number in range(40)))
    assert gossip.elsewhere == MOST_OPEN
    for number in range(3 * MOST_PEERS):
        other = Liar(gossip)
        if number % 3:
            other.say(Delta(1), 0.0, (f"10.2.0.{number}", 1))
        elif number < 30:
            asked = other.say(Delta(1), 0.0, (f"10.2.0.{number}", 1))
            assert isinstance(asked[0], Ask)
            other.say(Snapshot(asked[0].nonce, 1, 0, 1), 0.0, (f"10.2.0.{number}", 1))
    gossip.check()
    assert gossip.in_step == 11, "those that have answered are kept"


def test_requests_of_an_unknown_endpoint_are_counted_and_ignored() -> None:
    picker, gossip = gossip_of(1)
    liar = Liar(gossip)
    liar.join(0.0)
    liar.tell(0.0, Opened(1, endpoint_ref("later", "10.0.0.7:8000"), 5, 600_000))
    assert (gossip.unplaced, gossip.elsewhere) == (1, 0)
    picker.add_endpoint(EndpointSpec("later", "10.0.0.7:8000", models=("m",)))
    liar.tell(1.0, Closed(1, How.PREFILLED), Opened(2, endpoint_ref("later", "10.0.0.7:8000"), 5, 600_000))
    assert picker.endpoints["later"].load.reservations.tokens == 5
    picker.remove_endpoint("later")
    liar.tell(1.1, Closed(2, How.OVERLOADED))
    assert gossip.elsewhere == 0
    picker.on_tick(1.2)


def test_two_endpoints_with_one_reference_match_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeline_epp.peers.ledger.endpoint_ref", lambda _name, _address: REF)
    picker, gossip = gossip_of(2)
    liar = Liar(gossip)
    liar.join(0.0)
    liar.tell(0.0, Opened(1, REF, 5, 600_000))
    assert gossip.unplaced == 1
    picker.remove_endpoint("pod-1")
    liar.tell(1.0, Opened(2, REF, 5, 600_000))
    assert gossip.elsewhere == 1


def test_a_picker_that_asks_too_often_is_answered_once() -> None:
    _, gossip = gossip_of()
    own = gossip.tick(0.0)[0][0]
    opened = Seal(KEY).open(own)
    assert opened is not None
    liar = Liar(gossip)
    answers = [liar.say(Ask(opened[0], number.to_bytes(8)), 1.0 + 0.001 * number) for number in range(30)]
    assert [len(one) for one in answers] == [1, *[0] * 29]
    assert gossip.on_datagram(liar.said[0], ("10.66.0.1", 53), 5.0) == (), "nor is one that was recorded"
    assert liar.say(Ask(bytes(6), bytes(8)), 9.0) == [], "another is meant"


def test_a_picker_ignores_its_own_datagrams() -> None:
    _, gossip = gossip_of()
    (datagram, _), *_ = gossip.tick(0.0)
    assert gossip.on_datagram(datagram, HOME, 0.0) == ()
    assert not gossip.addresses
    assert gossip.counts["refused"] == 0
