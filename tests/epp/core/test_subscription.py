"""Subscriptions to KV events against a simulated engine behind a bad link."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.epp_core import KEYS, Lab, Prompt
from treeline_epp.index.index import Index
from treeline_epp.kvevents.states import Peer
from treeline_epp.kvevents.states import SubscriptionEvent as Event_
from treeline_epp.kvevents.states import SubscriptionState as State
from treeline_epp.kvevents.subscription import TABLE, KvSubscription
from treeline_wire.events import BlockRemoved, Event, EventBatch, encode_batch
from treeline_wire.frames import (
    Hello,
    HelloRequest,
    ReplayEnd,
    ReplayItem,
    ReplayRequest,
    SnapshotChunk,
    SnapshotEnd,
    SnapshotHeader,
    SnapshotRequest,
)


def batch(ts: float, *events: Event) -> EventBatch:
    return EventBatch(ts, list(events))


def item(seq: int, of: EventBatch) -> ReplayItem:
    return ReplayItem(b"", seq, encode_batch(of.ts, of.events))


class Bench:
    """One publisher without an engine: the test says what it answers."""

    def __init__(self) -> None:
        self.index = Index()
        self.pod = self.index.add_pod("pod", "model")
        self.subscription = KvSubscription(self.index, self.pod, KEYS)
        self.prompts = [Prompt.random(seed, 3) for seed in range(20)]

    def batch(self, number: int) -> EventBatch:
        """The batch that stores prompt `number`."""
        return batch(100.0 + number, self.prompts[number].stored())

    def holds(self, *numbers: int) -> bool:
        wanted = {block for number in numbers for block in self.prompts[number].hashes}
        return self.index.blocks_of(self.pod) == wanted

    def ours(self, now: float = 0.0, newest: int | None = None) -> None:
        """Connected, LIVE at epoch 1 with batches up to `newest`."""
        assert self.subscription.on_connected(now) == [HelloRequest()]
        if newest is None:
            assert self.subscription.on_reply(Hello(1), now) == []
        else:
            assert self.subscription.on_reply(Hello(1, 0, newest), now) == [SnapshotRequest()]
            self.snapshot(1, newest, range(newest + 1), now)
        assert self.subscription.state is State.LIVE

    def snapshot(self, epoch: int, seq: int, numbers: Sequence[int], now: float) -> None:
        subscription = self.subscription
        assert subscription.on_reply(SnapshotHeader(epoch, seq, 3 * len(numbers)), now) == []
        for number in numbers:
            assert subscription.on_reply(SnapshotChunk([self.prompts[number].stored()]), now) == []
        assert subscription.on_reply(SnapshotEnd(), now) == []

    def foreign(self, now: float = 0.0, replayed: int = 0) -> None:
        """Connected, no answer to hello, `replayed` batches replayed."""
        assert self.subscription.on_connected(now) == [HelloRequest()]
        assert self.subscription.on_tick(now + 0.9) == []
        assert self.subscription.on_tick(now + 1.0) == [ReplayRequest(0)]
        for number in range(replayed):
            self.subscription.on_reply(item(number, self.batch(number)), now + 1.1)
        assert self.subscription.on_reply(ReplayEnd(), now + 1.1) == []
        assert self.subscription.state is State.LIVE
        assert self.subscription.peer is Peer.FOREIGN


# Our publishers


def test_a_fresh_publisher_is_live_after_its_hello() -> None:
    bench = Bench()
    assert bench.subscription.state is State.DISCONNECTED
    assert bench.subscription.on_connected(0.0) == [HelloRequest()]
    assert bench.subscription.state is State.HELLO
    assert bench.subscription.on_reply(Hello(1), 0.0) == []
    assert bench.subscription.state is State.LIVE
    assert bench.subscription.on_live(0, bench.batch(0), 0.0) == []
    assert bench.holds(0)


def test_a_late_join_takes_a_snapshot_and_then_what_came_meanwhile() -> None:
    bench = Bench()
    bench.subscription.on_connected(0.0)
    bench.subscription.on_live(4, bench.batch(4), 0.0)
    assert bench.subscription.on_reply(Hello(1, 2, 4), 0.0) == [SnapshotRequest()]
    bench.subscription.on_live(5, bench.batch(5), 0.0)
    bench.subscription.on_live(6, bench.batch(6), 0.0)
    bench.snapshot(1, 5, [1, 5], 0.0)
    assert bench.subscription.state is State.LIVE
    assert bench.holds(1, 5, 6)
    assert bench.subscription.next_seq == 7


def test_a_gap_is_replayed_and_order_is_kept() -> None:
    bench = Bench()
    bench.ours(newest=0)
    gone = batch(105.0, BlockRemoved(bench.prompts[1].hashes))
    assert bench.subscription.on_live(3, bench.batch(1), 0.0) == [ReplayRequest(1)]
    assert bench.subscription.state is State.REPLAY
    assert bench.subscription.on_live(4, bench.batch(4), 0.0) == []
    bench.subscription.on_reply(item(1, bench.batch(1)), 0.0)
    bench.subscription.on_reply(item(2, gone), 0.0)
    bench.subscription.on_reply(item(3, bench.batch(1)), 0.0)
    assert bench.subscription.on_reply(ReplayEnd(), 0.0) == []
    assert bench.subscription.state is State.LIVE
    assert bench.holds(0, 1, 4)
    assert bench.subscription.next_seq == 5


def test_a_gap_that_the_replay_does_not_cover_takes_a_snapshot() -> None:
    bench = Bench()
    bench.ours(newest=0)
    assert bench.subscription.on_live(9, bench.batch(9), 0.0) == [ReplayRequest(1)]
    bench.subscription.on_reply(item(5, bench.batch(5)), 0.0)
    assert bench.subscription.on_reply(ReplayEnd(), 0.0) == [SnapshotRequest()]
    assert bench.holds(0), "the old state answers until the snapshot is complete"
    bench.snapshot(1, 9, [7, 9], 0.0)
    assert bench.holds(7, 9)
    assert not bench.subscription.partial


def test_every_reconnect_is_suspect_and_asks_what_was_missed() -> None:
    bench = Bench()
    bench.ours(newest=0)
    bench.subscription.on_disconnected(1.0)
    assert bench.subscription.state is State.DISCONNECTED
    assert bench.holds(0)
    assert bench.subscription.on_tick(5.0) == []
    assert bench.subscription.on_connected(6.0) == [HelloRequest()]
    assert bench.subscription.on_reply(Hello(1, 0, 1), 6.0) == [ReplayRequest(1)]
    bench.subscription.on_reply(item(1, bench.batch(1)), 6.0)
    bench.subscription.on_reply(ReplayEnd(), 6.0)
    assert bench.holds(0, 1)


def test_another_epoch_forgets_everything_at_once() -> None:
    bench = Bench()
    bench.ours(newest=0)
    bench.subscription.on_disconnected(1.0)
    bench.subscription.on_connected(2.0)
    assert bench.subscription.on_reply(Hello(2, 0, 0), 2.0) == [SnapshotRequest()]
    assert bench.holds()
    bench.snapshot(2, 0, [3], 2.0)
    assert bench.holds(3)
    assert bench.subscription.epoch == 2


def test_a_heartbeat_of_another_epoch_does_so_too() -> None:
    bench = Bench()
    bench.ours(newest=0)
    assert bench.subscription.on_heartbeat(1, None, 1.0) == []
    assert bench.subscription.on_heartbeat(2, None, 1.0) == [HelloRequest()]
    assert bench.holds()


def test_a_lost_last_batch_is_found_by_the_next_check() -> None:
    bench = Bench()
    bench.ours(newest=0)
    assert bench.subscription.on_tick(0.9) == []
    assert bench.subscription.on_tick(1.0) == [HelloRequest()]
    assert bench.subscription.state is State.CHECKING
    assert bench.subscription.live, "a check does not hold anything up"
    assert bench.subscription.on_reply(Hello(1, 0, 1), 1.0) == []
    assert bench.subscription.on_tick(1.1) == [], "it may still be on its way"
    assert bench.subscription.on_tick(1.2) == [HelloRequest()]
    assert bench.subscription.on_reply(Hello(1, 0, 1), 1.2) == [ReplayRequest(1)]


def test_a_lost_last_batch_is_found_by_a_heartbeat_that_names_it() -> None:
    bench = Bench()
    bench.ours(newest=0)
    bench.subscription.on_heartbeat(1, 1, 0.1)
    assert bench.subscription.on_tick(0.3) == [HelloRequest()]
    bench = Bench()
    bench.ours(newest=0)
    bench.subscription.on_heartbeat(1, 1, 0.1)
    bench.subscription.on_live(1, bench.batch(1), 0.2)
    assert bench.subscription.on_tick(0.3) == [], "it was late, not lost"


def test_a_missed_check_is_forgiven_and_three_in_a_row_are_not() -> None:
    bench = Bench()
    bench.ours()
    asked = []
    states = []
    for at in range(10, 50):
        if bench.subscription.on_tick(at / 10):
            asked.append(at / 10)
            states.append(bench.subscription.state)
    assert states[:4] == [State.CHECKING, State.CHECKING, State.CHECKING, State.HELLO]
    assert all(0.9 < b - a < 1.2 for a, b in pairwise(asked[:4]))


def test_one_of_ours_that_does_not_answer_is_asked_again_with_growing_pauses() -> None:
    bench = Bench()
    bench.ours(newest=0)
    bench.subscription.on_disconnected(0.0)
    assert bench.subscription.on_connected(0.0) == [HelloRequest()]
    asked = [at for at in range(1, 400) if bench.subscription.on_tick(at / 10)]
    pauses = [b - a for a, b in pairwise(asked)]
    assert len(asked) >= 4
    assert pauses == sorted(pauses)
    assert bench.subscription.peer is Peer.OURS
    assert bench.holds(0)


def test_a_snapshot_that_stops_half_way_is_dropped_and_asked_for_again() -> None:
    bench = Bench()
    bench.ours(newest=0)
    bench.index.request_rebuild(bench.pod)
    assert bench.subscription.on_tick(0.1) == [HelloRequest()]
    assert bench.subscription.on_reply(Hello(1, 0, 0), 0.1) == [SnapshotRequest()]
    bench.subscription.on_reply(SnapshotHeader(1, 0, 6), 0.1)
    bench.subscription.on_reply(SnapshotChunk([bench.prompts[5].stored()]), 0.1)
    assert bench.subscription.on_tick(1.2) == []
    assert bench.holds(0)
    assert bench.subscription.on_tick(2.0) == [HelloRequest()]
    assert bench.subscription.on_reply(Hello(1, 0, 0), 2.0) == [SnapshotRequest()]
    bench.snapshot(1, 0, [5, 6], 2.0)
    assert bench.holds(5, 6)
    bench.index.check()


def test_trap_7_a_seq_that_goes_back_is_another_process() -> None:
    bench = Bench()
    bench.ours(newest=5)
    assert bench.subscription.on_live(0, bench.batch(7), 0.0) == [HelloRequest()]
    assert bench.holds()
    assert bench.subscription.on_reply(Hello(2, 0, 0), 0.0) == [SnapshotRequest()]
    bench.snapshot(2, 0, [7], 0.0)
    assert bench.holds(7)
    assert bench.subscription.next_seq == 1


def test_a_restart_in_the_middle_of_what_was_buffered() -> None:
    bench = Bench()
    bench.ours(newest=0)
    assert bench.subscription.on_live(2, bench.batch(2), 0.0) == [ReplayRequest(1)]
    bench.subscription.on_live(0, bench.batch(8), 0.0)
    bench.subscription.on_reply(item(1, bench.batch(1)), 0.0)
    assert bench.subscription.on_reply(ReplayEnd(), 0.0) == [HelloRequest()]
    assert bench.subscription.on_reply(Hello(2, 0, 0), 0.0) == [SnapshotRequest()]
    bench.snapshot(2, 0, [8], 0.0)
    assert bench.holds(8)
    assert bench.subscription.next_seq == 1


def test_a_batch_that_comes_twice_is_applied_once() -> None:
    bench = Bench()
    bench.ours()
    for _ in range(2):
        assert bench.subscription.on_live(0, bench.batch(0), 0.0) == []
        assert bench.subscription.on_live(1, bench.batch(1), 0.0) == []
    assert bench.holds(0, 1)
    assert not bench.pod.copies
    assert bench.subscription.counts["duplicates"] == 2


def test_answers_that_nobody_asked_for_are_ignored() -> None:
    bench = Bench()
    bench.ours(newest=0)
    for reply in (
        item(1, bench.batch(1)),
        ReplayEnd(),
        SnapshotHeader(1, 9, 3),
        SnapshotChunk([bench.prompts[3].stored()]),
        SnapshotEnd(),
        Hello(5),
    ):
        assert bench.subscription.on_reply(reply, 0.0) == []
    assert bench.subscription.state is State.LIVE
    assert bench.holds(0)
    assert bench.subscription.counts["unasked"] == 6


def test_payloads_and_events_that_cannot_be_decoded_leave_a_mark() -> None:
    bench = Bench()
    bench.ours()
    bench.subscription.on_live(0, None, 0.0)
    assert bench.subscription.partial
    assert bench.subscription.next_seq == 1
    bench = Bench()
    bench.ours()
    bench.subscription.on_live(0, EventBatch(1.0, [bench.prompts[0].stored()], None, {"bad_event": 2}), 0.0)
    assert bench.subscription.partial
    assert bench.holds(0)
    assert bench.subscription.counts["rejected"] == 2


def test_a_buffer_that_overflows_is_a_gap_and_nothing_worse() -> None:
    lab = Lab(1)
    for _ in range(5):
        lab.publish()
    lab.connect()
    for _ in range(40):
        lab.publish()
    lab.advance(3.0)
    assert lab.subscription.counts["overflows"] > 0
    lab.assert_converged()


# Foreign publishers


def test_a_foreign_publisher_is_replayed_from_its_beginning() -> None:
    bench = Bench()
    bench.foreign(replayed=3)
    assert bench.holds(0, 1, 2)
    assert not bench.subscription.partial
    bench.subscription.on_live(3, bench.batch(3), 2.0)
    assert bench.holds(0, 1, 2, 3)
    assert bench.subscription.on_tick(5.0) == [], "no checks: it does not know hello"


def test_a_replay_that_begins_late_is_kept_and_known_to_be_partial() -> None:
    bench = Bench()
    bench.subscription.on_connected(0.0)
    assert bench.subscription.on_tick(1.0) == [ReplayRequest(0)]
    bench.subscription.on_reply(item(5, bench.batch(5)), 1.0)
    bench.subscription.on_reply(item(6, bench.batch(6)), 1.0)
    bench.subscription.on_reply(ReplayEnd(), 1.0)
    assert bench.holds(5, 6)
    assert bench.subscription.partial
    assert bench.subscription.next_seq == 7


def test_a_foreign_publisher_without_replay_begins_where_it_is() -> None:
    bench = Bench()
    bench.subscription.on_connected(0.0)
    bench.subscription.on_tick(1.0)
    bench.subscription.on_live(7, bench.batch(7), 1.5)
    assert bench.subscription.on_tick(2.0) == []
    assert bench.subscription.state is State.LIVE
    assert bench.subscription.partial
    assert bench.holds(7)
    assert bench.subscription.on_live(9, bench.batch(9), 3.0) == []
    assert bench.holds(7, 9), "old blocks age, they are not dropped"
    bench.index.tick(1000.0)
    assert bench.holds(9)


def test_a_foreign_gap_that_cannot_be_covered_ages_what_is_known() -> None:
    bench = Bench()
    bench.foreign(replayed=1)
    assert bench.subscription.on_live(9, bench.batch(9), 2.0) == [ReplayRequest(1)]
    bench.subscription.on_reply(item(8, bench.batch(8)), 2.0)
    bench.subscription.on_reply(item(9, bench.batch(9)), 2.0)
    assert bench.subscription.on_reply(ReplayEnd(), 2.0) == []
    assert bench.subscription.partial
    assert bench.holds(0, 8, 9)
    bench.index.tick(1000.0)
    assert bench.holds(8, 9)


def test_after_a_reconnect_a_foreign_publisher_must_still_know_its_last_batch() -> None:
    bench = Bench()
    bench.foreign(replayed=3)
    bench.subscription.on_disconnected(2.0)
    assert bench.subscription.on_connected(3.0) == [ReplayRequest(2)]
    bench.subscription.on_reply(item(2, bench.batch(2)), 3.0)
    bench.subscription.on_reply(item(3, bench.batch(3)), 3.0)
    bench.subscription.on_reply(ReplayEnd(), 3.0)
    assert bench.holds(0, 1, 2, 3)


@pytest.mark.parametrize("other", [[], [(2, 9), (3, 10)]], ids=["it has nothing", "it has another one"])
def test_a_foreign_publisher_that_restarted_while_away_begins_anew(other: list[tuple[int, int]]) -> None:
    bench = Bench()
    bench.foreign(replayed=3)
    bench.subscription.on_disconnected(2.0)
    assert bench.subscription.on_connected(3.0) == [ReplayRequest(2)]
    for seq, number in other:
        bench.subscription.on_reply(item(seq, bench.batch(number)), 3.0)
    assert bench.subscription.on_reply(ReplayEnd(), 3.0) == [ReplayRequest(0)]
    assert bench.holds()
    for seq, number in [(0, 7), (1, 8), *other]:
        bench.subscription.on_reply(item(seq, bench.batch(number)), 3.0)
    bench.subscription.on_reply(ReplayEnd(), 3.0)
    assert bench.holds(7, 8, *(number for _, number in other))
    assert bench.subscription.next_seq == 2 + len(other)


def test_silence_while_requests_run_is_suspicious() -> None:
    bench = Bench()
    bench.foreign(replayed=2)
    assert bench.subscription.on_tick(100.0, in_flight=0) == []
    assert bench.subscription.on_tick(101.0, in_flight=1) == [ReplayRequest(1)]
    assert bench.subscription.state is State.REPLAY
    bench.subscription.on_reply(item(1, bench.batch(1)), 101.0)
    bench.subscription.on_reply(ReplayEnd(), 101.0)
    assert bench.subscription.on_tick(102.0, in_flight=1) == []


def test_one_of_ours_that_was_slow_to_answer_is_recognised_later() -> None:
    bench = Bench()
    bench.foreign(replayed=1)
    assert bench.subscription.on_heartbeat(1, None, 2.0) == [HelloRequest()]
    assert bench.subscription.on_reply(Hello(1, 0, 0), 2.0) == [SnapshotRequest()], "its epoch was not known"
    assert bench.subscription.peer is Peer.OURS
    bench = Bench()
    bench.foreign(replayed=1)
    assert bench.subscription.on_reply(Hello(1, 0, 0), 2.0) == [HelloRequest()]


def test_a_rebuild_of_a_foreign_publisher_begins_anew() -> None:
    bench = Bench()
    bench.foreign(replayed=2)
    bench.index.request_rebuild(bench.pod)
    assert bench.subscription.on_tick(2.0) == [ReplayRequest(0)]
    assert bench.holds()


@pytest.mark.parametrize("seed", range(20))
def test_foreign_engines_converge_where_their_replay_reaches(seed: int) -> None:
    lab = Lab(seed, loss=0.1, ours=False)
    lab.engine.ring_size = 1000
    lab.engine.restart()
    lab.connect()
    for _ in range(60):
        roll = lab.rng.random()
        if roll < 0.8:
            lab.publish()
        elif roll < 0.84 and lab.connected:
            lab.disconnect()
            if lab.rng.random() < 0.4:
                lab.engine.restart()
        elif not lab.connected:
            lab.connect()
        lab.advance(lab.rng.random() * 0.3)
    if not lab.connected:
        lab.connect()
    lab.advance(2.5)
    lab.loss = 0.0
    lab.publish()  # without hello a lost last batch is only found by the next one
    lab.advance(2.5)
    lab.assert_converged()


# Every state, every event


def in_state(state: State) -> Bench:
    """A subscription that has come to this state."""
    bench = Bench()
    if state is State.DISCONNECTED:
        return bench
    if state is State.HELLO:
        bench.subscription.on_connected(0.0)
        return bench
    bench.ours(newest=0)
    match state:
        case State.CHECKING:
            assert bench.subscription.on_tick(1.0) == [HelloRequest()]
        case State.REPLAY:
            bench.subscription.on_live(3, bench.batch(3), 0.0)
        case State.SNAPSHOT | State.CHUNKS:
            bench.subscription.on_connected(0.0)
            assert bench.subscription.on_reply(Hello(2, 0, 5), 0.0) == [SnapshotRequest()]
            if state is State.CHUNKS:
                bench.subscription.on_reply(SnapshotHeader(2, 5, 3), 0.0)
        case State.BACKOFF:
            bench.subscription.on_connected(0.0)
            assert bench.subscription.on_tick(1.0) == []
    return bench


def events(bench: Bench, epoch: int, seq: int, now: float) -> dict[Event_, Callable[[], object]]:
    """Each event, as the driver tells it."""
    subscription, chunk = bench.subscription, [bench.prompts[seq].stored()]
    return {
        Event_.CONNECTED: lambda: subscription.on_connected(now),
        Event_.DISCONNECTED: lambda: subscription.on_disconnected(now),
        Event_.BATCH: lambda: subscription.on_live(seq, bench.batch(seq), now),
        Event_.HEARTBEAT: lambda: subscription.on_heartbeat(epoch, seq, now),
        Event_.TICK: lambda: subscription.on_tick(now),
        Event_.TIMEOUT: lambda: subscription.on_tick(now + 100.0),
        Event_.HELLO: lambda: subscription.on_reply(Hello(epoch, 0, seq), now),
        Event_.REPLAY_ITEM: lambda: subscription.on_reply(item(seq, bench.batch(seq)), now),
        Event_.REPLAY_END: lambda: subscription.on_reply(ReplayEnd(), now),
        Event_.SNAPSHOT_HEADER: lambda: subscription.on_reply(SnapshotHeader(epoch, seq, 3), now),
        Event_.SNAPSHOT_CHUNK: lambda: subscription.on_reply(SnapshotChunk(chunk), now),
        Event_.SNAPSHOT_END: lambda: subscription.on_reply(SnapshotEnd(), now),
    }


def test_the_table_has_every_state_and_every_event() -> None:
    assert set(TABLE) == set(State)
    for row in TABLE.values():
        assert set(row) == set(Event_)
        assert all(cell.leads_to for cell in row.values())


@pytest.mark.parametrize("event", Event_)
@pytest.mark.parametrize("state", State)
def test_every_event_in_every_state_leads_where_the_table_says(state: State, event: Event_) -> None:
    for epoch, seq in ((1, 0), (1, 1), (1, 4), (2, 0)):
        bench = in_state(state)
        subscription = bench.subscription
        assert subscription.state is state
        now = 1.1 if state in (State.CHECKING, State.BACKOFF) else 0.5  # before its time is up
        events(bench, epoch, seq, now)[event]()
        lasts = event is Event_.TIMEOUT and state in (State.DISCONNECTED, State.LIVE)
        assert subscription.state in TABLE[state][Event_.TICK if lasts else event].leads_to
        bench.index.check()
        bench.subscription.on_disconnected(2.0)
        assert not bench.pod.staging, "no snapshot is left open"


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(Event_), st.integers(1, 2), st.integers(0, 6), st.sampled_from([0.0, 0.2, 1.1])),
        max_size=40,
    )
)
def test_any_order_of_events_keeps_to_the_table(steps: list[tuple[Event_, int, int, float]]) -> None:
    bench, now = Bench(), 0.0
    for event, epoch, seq, wait_s in steps:
        now += wait_s
        events(bench, epoch, seq, now)[event]()  # a state that the table does not name is an AssertionError
        bench.index.check()


# Everything at once


@pytest.mark.parametrize("seed", range(100))
def test_whatever_is_lost_the_index_equals_the_cache_within_two_seconds_of_the_last_event(seed: int) -> None:
    lab = Lab(seed, loss=0.02 if seed % 2 else 0.2, slow=0.05 if seed % 3 == 0 else 0.0)
    rng = lab.rng
    if rng.random() < 0.7:
        for _ in range(rng.randrange(30)):
            lab.publish()  # a late join
    lab.connect()
    for _ in range(60):
        roll = rng.random()
        if roll < 0.7:
            lab.publish()
        elif roll < 0.8:
            lab.heartbeat()
        elif roll < 0.83 and lab.connected:
            lab.disconnect()
        elif roll < 0.85:
            if lab.connected:
                lab.disconnect()
            lab.engine.restart()
        elif not lab.connected:
            lab.connect()
        lab.advance(rng.random() * 0.3)
    if not lab.connected:
        lab.connect()
    lab.publish()
    lab.slow = 0.0
    lab.advance(2.0 if seed % 3 else 8.0)  # an answer that never comes costs a timeout and a pause
    lab.assert_converged()
    assert lab.subscription.live


class SubscriptionMachine(RuleBasedStateMachine):
    """Any order of everything that can happen; when it is left alone the index comes to equal the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.lab = Lab(0, loss=0.1)

    @rule(count=st.integers(1, 12))
    def publish(self, count: int) -> None:
        for _ in range(count):
            self.lab.publish()

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.5, 6.0]))
    def wait(self, seconds: float) -> None:
        self.lab.advance(seconds)

    @precondition(lambda self: not self.lab.connected)
    @rule()
    def connect(self) -> None:
        self.lab.connect()

    @precondition(lambda self: self.lab.connected)
    @rule()
    def disconnect(self) -> None:
        self.lab.disconnect()

    @rule()
    def restart(self) -> None:
        if self.lab.connected:
            self.lab.disconnect()
        self.lab.engine.restart()

    @rule(slow=st.sampled_from([0.0, 0.3]), loss=st.sampled_from([0.0, 0.02, 0.5]))
    def slow(self, slow: float, loss: float) -> None:
        self.lab.slow, self.lab.loss = slow, loss

    @rule()
    def rebuild(self) -> None:
        self.lab.index.request_rebuild(self.lab.pod)

    @precondition(lambda self: self.lab.connected and self.lab.engine.ring)
    @rule()
    def twice(self) -> None:
        self.lab.again()

    @invariant()
    def consistent(self) -> None:
        self.lab.index.check()

    @rule()
    def assert_converged(self) -> None:
        lab = self.lab
        lab.slow = 0.0
        if not lab.connected:
            lab.connect()
        lab.advance(25.0)
        lab.assert_converged()
        assert lab.subscription.live


TestSubscriptionMachine = SubscriptionMachine.TestCase
TestSubscriptionMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
