"""Subscriptions to KV events: the requests to a publisher, step by step."""

from itertools import pairwise

from msgspec.msgpack import encode
from support.epp_core import Bench, Lab, item
from treeline_epp.kvevents.batches import WaitingBatches
from treeline_epp.kvevents.states import Peer
from treeline_epp.kvevents.states import SubscriptionState as State
from treeline_wire.events import BlockRemoved, BlockStored, EventBatch
from treeline_wire.frames import (
    Hello,
    HelloRequest,
    ReplayEnd,
    ReplayRequest,
    SnapshotChunk,
    SnapshotEnd,
    SnapshotHeader,
    SnapshotRequest,
)

# Our publishers


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


def test_a_heartbeat_of_another_epoch_forgets_everything() -> None:
    bench = Bench()
    bench.ours(newest=0)
    assert bench.subscription.on_heartbeat(1, None, 1.0) == []
    assert bench.subscription.on_heartbeat(2, None, 1.0) == [HelloRequest()]
    assert bench.holds()


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


def test_our_own_silent_publisher_is_asked_again_with_growing_pauses() -> None:
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


def test_trap_7_a_decreasing_seq_means_another_process() -> None:
    bench = Bench()
    bench.ours(newest=5)
    assert bench.subscription.on_live(0, bench.batch(7), 0.0) == [HelloRequest()]
    assert bench.holds()
    assert bench.subscription.on_reply(Hello(2, 0, 0), 0.0) == [SnapshotRequest()]
    bench.snapshot(2, 0, [7], 0.0)
    assert bench.holds(7)
    assert bench.subscription.next_seq == 1


def test_a_restart_amid_buffered_batches_is_detected() -> None:
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


def test_unrequested_answers_are_ignored() -> None:
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
    assert bench.subscription.applied.partial
    assert bench.subscription.next_seq == 1
    bench = Bench()
    bench.ours()
    bench.subscription.on_live(0, EventBatch(1.0, [bench.prompts[0].stored()], None, {"bad_event": 2}), 0.0)
    assert bench.subscription.applied.partial
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


def test_buffered_batches_are_bounded_by_their_contents_and_number() -> None:
    large = EventBatch(1.0, [BlockStored(list(range(10)), None, list(range(160)), 16)])
    size = len(encode(large.events))
    waiting = WaitingBatches(most=100, most_bytes=5 * size)
    assert sum(waiting.append((seq, large)) for seq in range(50)) == 50 - len(waiting)
    assert len(waiting) == 5
    assert waiting.first == 45, "the oldest go"
    for seq, huge in enumerate((BlockRemoved(list(range(5 * size))), BlockStored([1], lora_name=5 * size * "x")), 50):
        waiting.append((seq, EventBatch(1.0, [huge])))
        assert len(waiting) == 0, "one that is too large is a gap, too"
    assert waiting.append((52, large)) == 0


# Foreign publishers


def test_a_replay_that_begins_late_is_kept_and_known_to_be_partial() -> None:
    bench = Bench()
    bench.subscription.on_connected(0.0)
    assert bench.subscription.on_tick(1.0) == [ReplayRequest(0)]
    bench.subscription.on_reply(item(5, bench.batch(5)), 1.0)
    bench.subscription.on_reply(item(6, bench.batch(6)), 1.0)
    bench.subscription.on_reply(ReplayEnd(), 1.0)
    assert bench.holds(5, 6)
    assert bench.subscription.applied.partial
    assert bench.subscription.next_seq == 7


def test_a_foreign_publisher_without_replay_is_followed_from_now_on() -> None:
    bench = Bench()
    bench.subscription.on_connected(0.0)
    bench.subscription.on_tick(1.0)
    bench.subscription.on_live(7, bench.batch(7), 1.5)
    assert bench.subscription.on_tick(2.0) == []
    assert bench.subscription.state is State.LIVE
    assert bench.subscription.applied.partial
    assert bench.holds(7)
    assert bench.subscription.on_live(9, bench.batch(9), 3.0) == []
    assert bench.holds(7, 9), "old blocks age, they are not dropped"
    bench.index.tick(1000.0)
    assert bench.holds(9)


def test_an_uncovered_gap_of_a_foreign_publisher_ages_its_blocks() -> None:
    bench = Bench()
    bench.foreign(replayed=1)
    assert bench.subscription.on_live(9, bench.batch(9), 2.0) == [ReplayRequest(1)]
    bench.subscription.on_reply(item(8, bench.batch(8)), 2.0)
    bench.subscription.on_reply(item(9, bench.batch(9)), 2.0)
    assert bench.subscription.on_reply(ReplayEnd(), 2.0) == []
    assert bench.subscription.applied.partial
    assert bench.holds(0, 8, 9)
    bench.index.tick(1000.0)
    assert bench.holds(8, 9)


def test_silence_while_requests_run_is_suspicious() -> None:
    bench = Bench()
    bench.foreign(replayed=2)
    assert bench.subscription.on_tick(100.0, in_flight=0) == []
    assert bench.subscription.on_tick(101.0, in_flight=1) == [ReplayRequest(1)]
    assert bench.subscription.state is State.REPLAY
    bench.subscription.on_reply(item(1, bench.batch(1)), 101.0)
    bench.subscription.on_reply(ReplayEnd(), 101.0)
    assert bench.subscription.on_tick(102.0, in_flight=1) == []


def test_our_own_slow_publisher_is_recognised_later() -> None:
    bench = Bench()
    bench.foreign(replayed=1)
    assert bench.subscription.on_heartbeat(1, None, 2.0) == [HelloRequest()]
    assert bench.subscription.on_reply(Hello(1, 0, 0), 2.0) == [SnapshotRequest()], "its epoch was not known"
    assert bench.subscription.peer is Peer.OURS
    bench = Bench()
    bench.foreign(replayed=1)
    assert bench.subscription.on_reply(Hello(1, 0, 0), 2.0) == [HelloRequest()]


def test_a_rebuild_of_a_foreign_publisher_starts_empty() -> None:
    bench = Bench()
    bench.foreign(replayed=2)
    bench.index.request_rebuild(bench.pod)
    assert bench.subscription.on_tick(2.0) == [ReplayRequest(0)]
    assert bench.holds()
