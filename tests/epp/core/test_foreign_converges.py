"""Publishers by vLLM's rules: no epoch, copies of a block, replays that break off, or none. The index converges to the
cache where a replay reaches, and elsewhere drops the blocks that it cannot know."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from support.epp_core import KEYS, WIDTH, Bench, Lab, SimBlock, SimEngine, batch, item
from treeline_epp.index.limits import IndexLimits
from treeline_epp.kvevents.batches import AGE_EVERY_S
from treeline_epp.kvevents.states import Peer
from treeline_epp.kvevents.states import SubscriptionState as State
from treeline_epp.kvevents.subscription import KvSubscription
from treeline_wire.events import BlockRemoved, BlockStored, Event, block_hash, hash_of, root_digest
from treeline_wire.frames import Hello, HelloRequest, ReplayEnd, ReplayRequest, Reply, Request

LIFE_S = IndexLimits().aged_life_s


class Vllm(SimEngine):
    """An engine like vLLM. A prompt's blocks may be computed twice at once: then the cache has two copies, stored and
    removed one by one. A parent may go before its children. `most`: the queue of its socket takes this many messages of
    a replay, the end included, and drops the rest."""

    def __init__(self, rng: random.Random, *, ring: int, most: int, replays: bool) -> None:
        self.copies: Counter[int] = Counter()
        self.most = most
        super().__init__(rng, ours=False, replays=replays, ring=ring)

    def restart(self) -> None:
        super().restart()
        self.copies.clear()

    def _store(self) -> list[Event]:
        rng = self.rng
        above = rng.choice([None, *self.blocks])
        parent, digest = above, root_digest(None) if above is None else self.blocks[above].digest
        hashes, tokens = [], []
        for _ in range(rng.randrange(1, 4)):
            ids = [rng.randrange(3) for _ in range(WIDTH)]
            digest = block_hash(digest, ids)
            value = hash_of(digest)
            self.blocks.setdefault(value, SimBlock(above, ids, digest))
            self.copies[value] += 1
            hashes.append(value)
            tokens += ids
            above = value
        if self.rng.random() < 0.3:  # another request computed the same at the same time
            self.copies.update(hashes)
            return [BlockStored(hashes, parent, tokens, WIDTH)] * 2
        return [BlockStored(hashes, parent, tokens, WIDTH)]

    def _evict(self) -> list[Event]:
        gone = self.rng.sample(list(self.blocks), min(len(self.blocks), self.rng.randrange(1, 4)))
        for value in gone:
            self.copies[value] -= 1
            if not self.copies[value]:
                del self.blocks[value], self.copies[value]
        return [BlockRemoved([value], "GPU") for value in gone]

    def _clear(self) -> list[Event]:
        self.copies.clear()
        return super()._clear()

    def answer(self, send: Request) -> list[Reply]:
        assert not isinstance(send, HelloRequest), "theirs call it an invalid request"
        return super().answer(send)[: self.most]


def trouble(lab: Lab, steps: int) -> None:
    """Send batches, losses, breaks and restarts in any order, then stop."""
    rng = lab.rng
    for _ in range(steps):
        roll = rng.random()
        if roll < 0.75:
            lab.publish()
        elif roll < 0.8 and lab.connected:
            lab.disconnect()
            if rng.random() < 0.5:
                lab.engine.restart()
            for _ in range(rng.randrange(3)):
                lab.publish()
        elif not lab.connected:
            lab.connect()
        lab.advance(rng.random() * 0.4)
    if not lab.connected:
        lab.connect()
    lab.loss = lab.slow = 0.0
    lab.advance(8.0)  # answers that never come
    lab.publish()  # a lost last batch is found by the next one
    lab.advance(6.0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), most=st.sampled_from([3, 7, 1000]), loss=st.sampled_from([0.0, 0.1, 0.4]))
def test_the_index_equals_the_cache_as_far_as_the_replay_reaches(seed: int, most: int, loss: float) -> None:
    rng = random.Random(seed)
    lab = Lab(seed, loss=loss, engine=Vllm(rng, ring=1000, most=most, replays=True), told=True)
    trouble(lab, 40)
    lab.assert_converged()
    assert lab.subscription.live
    assert lab.pod.copies == Counter({block: count - 1 for block, count in lab.engine.copies.items() if count > 1})


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_index_equals_the_cache_of_a_publisher_without_hello(seed: int) -> None:
    lab = Lab(seed, loss=0.1, engine=SimEngine(random.Random(seed), ours=False, ring=1000))
    trouble(lab, 60)
    lab.assert_converged()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), ring=st.sampled_from([0, 3]), loss=st.sampled_from([0.0, 0.1, 0.4]))
def test_beyond_the_replay_no_missing_block_stays_known(seed: int, ring: int, loss: float) -> None:
    rng = random.Random(seed)
    lab = Lab(seed, loss=loss, engine=Vllm(rng, ring=ring, most=1000, replays=ring > 0), told=True)
    trouble(lab, 40)
    assert lab.subscription.live
    for pause in (AGE_EVERY_S, LIFE_S):
        lab.now += pause
        lab.advance(0.5)
    assert lab.known() <= set(lab.engine.blocks), "what was in doubt has grown old"
    lab.index.check()


class Told(Bench):
    """A publisher that is known not to be ours."""

    def __init__(self, *, replays: bool = True) -> None:
        super().__init__()
        self.subscription = KvSubscription(self.index, self.pod, KEYS, ours=False, replays=replays)


def test_another_engines_publisher_is_never_greeted() -> None:
    bench = Told()
    assert bench.subscription.peer is Peer.FOREIGN
    assert bench.subscription.on_connected(0.0) == [ReplayRequest(0)]
    bench.subscription.on_reply(item(0, bench.batch(0)), 0.1)
    assert bench.subscription.on_reply(ReplayEnd(), 0.1) == []
    assert bench.subscription.on_heartbeat(7, 5, 0.2) == [], "whatever it claims to be"
    assert bench.subscription.on_reply(Hello(7, 0, 5), 0.2) == []
    assert bench.subscription.on_tick(5.0, in_flight=1) == []
    assert bench.subscription.peer is Peer.FOREIGN
    assert bench.holds(0)


def test_without_a_replay_socket_no_replay_is_requested() -> None:
    bench = Told(replays=False)
    assert bench.subscription.on_connected(0.0) == []
    assert bench.subscription.state is State.LIVE
    assert bench.subscription.on_live(41, bench.batch(0), 0.1) == []
    assert bench.subscription.on_live(44, bench.batch(1), 0.2) == [], "a gap is noted, not asked for"
    assert bench.holds(0, 1)
    assert bench.subscription.applied.partial
    bench.index.tick(0.2 + LIFE_S)
    assert bench.holds(1), "what was known before the gap may be gone by now"


def test_a_replay_that_never_answers_is_asked_for_again_after_a_while() -> None:
    bench = Told()
    bench.subscription.on_connected(0.0)
    assert bench.subscription.on_tick(1.0) == []
    assert bench.subscription.state is State.LIVE
    bench.subscription.on_live(5, bench.batch(0), 1.1)
    assert bench.subscription.on_live(7, bench.batch(1), 1.2) == []
    assert bench.subscription.on_live(9, bench.batch(2), 40.0) == [ReplayRequest(8)]
    assert bench.subscription.on_tick(41.0) == []
    assert bench.subscription.on_live(11, bench.batch(3), 41.1) == []


def test_an_unverified_reconnect_ages_the_known_blocks() -> None:
    bench = Told(replays=False)
    bench.subscription.on_connected(0.0)
    bench.subscription.on_live(4, bench.batch(0), 0.1)
    bench.subscription.on_disconnected(1.0)
    bench.subscription.on_connected(2.0)
    # It may have been restarted and have reached the same number: that cannot be seen.
    bench.subscription.on_live(5, bench.batch(1), 2.1)
    assert bench.holds(0, 1)
    bench.index.tick(2.0 + LIFE_S)
    assert bench.holds(1)


def test_a_starting_engine_that_answers_slowly_is_asked_again_and_seen_as_new() -> None:
    bench = Told()
    subscription = bench.subscription
    assert subscription.on_connected(0.0) == [ReplayRequest(0)]
    subscription.on_reply(item(0, bench.batch(0)), 0.1)
    subscription.on_reply(ReplayEnd(), 0.1)
    assert bench.holds(0)
    subscription.on_disconnected(1.0)
    assert subscription.on_connected(2.0) == [ReplayRequest(0)]
    asked = [(at, request) for at in range(3, 9) for request in subscription.on_tick(float(at))]
    assert asked == [(8, ReplayRequest(0))], "once a while, and it is LIVE in between"
    assert bench.holds(0)
    subscription.on_reply(ReplayEnd(), 8.1)
    assert not bench.holds(0), "it does not know its own first batch"
    subscription.on_reply(ReplayEnd(), 8.2)
    assert [request for at in range(9, 60) for request in subscription.on_tick(float(at))] == []


def test_an_engine_that_never_answers_is_not_asked_forever() -> None:
    bench = Told()
    bench.subscription.on_connected(0.0)
    asked = [at for at in range(1, 1000) if bench.subscription.on_tick(float(at))]
    assert len(asked) == 12
    assert asked[-1] < 120


def test_gaps_without_end_take_few_places_in_the_index() -> None:
    bench = Told(replays=False)
    bench.subscription.on_connected(0.0)
    for number in range(2000):
        now = number / 20
        bench.subscription.on_live(2 * number, bench.batch(number % 20), now)
        bench.subscription.on_tick(now)
        bench.index.tick(now)
        assert len(bench.pod.aged) <= LIFE_S / AGE_EVERY_S + 1
    bench.subscription.on_tick(200.0)
    bench.index.tick(200.0 + LIFE_S)
    assert bench.holds()


def test_a_restart_is_detected_by_its_numbers_and_clears_the_blocks() -> None:
    bench = Told()
    bench.subscription.on_connected(0.0)
    for number in range(3):
        bench.subscription.on_reply(item(number, bench.batch(number)), 0.1)
    bench.subscription.on_reply(ReplayEnd(), 0.1)
    assert bench.subscription.on_live(0, batch(900.0, bench.prompts[7].stored()), 5.0) == [ReplayRequest(0)]
    assert bench.holds()
    bench.subscription.on_reply(item(0, batch(900.0, bench.prompts[7].stored())), 5.1)
    bench.subscription.on_reply(ReplayEnd(), 5.1)
    assert bench.holds(7)


def test_without_a_replay_a_repeated_number_reveals_a_restart() -> None:
    bench = Told(replays=False)
    bench.subscription.on_connected(0.0)
    bench.subscription.on_live(4, bench.batch(0), 0.1)
    bench.subscription.on_disconnected(1.0)
    bench.subscription.on_connected(2.0)
    bench.subscription.on_live(0, bench.batch(1), 2.1)
    assert bench.holds(1)
    bench.subscription.on_tick(2.1 + AGE_EVERY_S)
    bench.index.tick(2.1 + AGE_EVERY_S + LIFE_S)
    assert bench.holds(1), "of the new process nothing is in doubt"
