"""Subscriptions to KV events: in every state every event has the effect that the table lists."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.epp_core import Bench, item
from treeline_epp.kvevents.states import SubscriptionEvent as Event_
from treeline_epp.kvevents.states import SubscriptionState as State
from treeline_epp.kvevents.subscription import TABLE
from treeline_wire.frames import (
    Hello,
    HelloRequest,
    ReplayEnd,
    SnapshotChunk,
    SnapshotEnd,
    SnapshotHeader,
    SnapshotRequest,
)


def in_state(state: State) -> Bench:
    """Return a subscription in this state."""
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
    """Return each event, as the driver reports it."""
    subscription, chunk = bench.subscription, [bench.prompts[seq].stored()]
    return {
        Event_.CONNECTED: lambda: subscription.on_connected(now),
        Event_.DISCONNECTED: lambda: subscription.on_disconnected(now),
        Event_.BATCH: lambda: subscription.on_live(seq, bench.batch(seq), now),
        Event_.HEARTBEAT: lambda: subscription.on_heartbeat(epoch, seq, now),
        Event_.TICK: lambda: subscription.on_tick(now),
        Event_.TIMEOUT: lambda: subscription.on_tick(now + 100.0),
        Event_.HELLO: lambda: subscription.on_reply(Hello(epoch, 0, seq), now),
        Event_.TURN: lambda: subscription.on_turn(now),
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
def test_every_event_in_every_state_follows_the_table(state: State, event: Event_) -> None:
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
