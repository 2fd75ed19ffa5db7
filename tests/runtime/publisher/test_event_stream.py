"""The stream numbers batches, replays them, and gives snapshots that replay continues exactly."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.publisher import Cache, Consumer, Cutting, TrustingReencoder
from treeline_runtime.published import CacheUpdate, Copied, Removed, Stored
from treeline_runtime.publisher.announced_index import AnnouncedIndex
from treeline_runtime.publisher.streams import EventStream
from treeline_wire import frames
from treeline_wire.events import decode_batch


def stream(ring: int = 100) -> EventStream:
    return EventStream(7, AnnouncedIndex(TrustingReencoder()), ring_batches=ring)


def store(stream: EventStream, block: int) -> list[bytes]:
    live = stream.on_update(CacheUpdate([Stored([block], None, [block, block], None, 2)]), ts=1.5)
    assert live is not None
    return live


def ask(stream: EventStream, request: list[bytes]) -> list[frames.Reply]:
    answer = stream.on_request(request)
    assert answer is not None
    return [frames.parse_reply(message) for message in answer]


def test_a_step_without_changes_uses_no_number() -> None:
    made = stream()
    assert made.on_update(CacheUpdate([Removed([5])]), ts=0.0) is None
    assert made.newest is None
    store(made, 1)
    assert made.newest == 0


def test_hello_has_the_epoch_and_the_replayable_range() -> None:
    made = stream(ring=2)
    assert ask(made, frames.hello_request()) == [frames.Hello(7, None, None)]
    for block in (1, 2, 3):
        store(made, block)
    assert ask(made, frames.hello_request()) == [frames.Hello(7, 1, 2)]


def test_replay_gives_the_requested_numbers_that_are_kept() -> None:
    made = stream(ring=3)
    live = [store(made, block) for block in range(1, 6)]
    *items, end = ask(made, frames.replay_request(1))
    assert end == frames.ReplayEnd()
    assert [item.seq for item in items if isinstance(item, frames.ReplayItem)] == [2, 3, 4]
    assert [item.payload for item in items if isinstance(item, frames.ReplayItem)] == [f[2] for f in live[2:]]
    assert ask(made, frames.replay_request(99)) == [frames.ReplayEnd()]


def test_replay_has_the_peers_frames() -> None:
    made = stream()
    topic, seq, payload = store(made, 1)
    answer = made.on_request([b"", (0).to_bytes(8, "big")])
    assert answer is not None
    assert list(answer) == [[b"", topic, seq, payload], [b"", b"", b"\xff" * 8, b""]]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**9), before=st.integers(0, 30), after=st.integers(0, 30))
def test_a_snapshot_and_the_replay_after_it_rebuild_the_cache(seed: int, before: int, after: int) -> None:
    cache = Cache(random.Random(seed))
    made = EventStream(7, AnnouncedIndex(Cutting(at=6)))
    for _ in range(before):
        made.on_update(CacheUpdate(cache.step()), ts=0.0)
    snapshot = made.on_request(frames.snapshot_request())
    assert snapshot is not None
    header = frames.parse_reply(next(snapshot))
    assert isinstance(header, frames.SnapshotHeader)
    for _ in range(after):
        made.on_update(CacheUpdate(cache.step()), ts=0.0)

    consumer = Consumer()
    for message in snapshot:
        reply = frames.parse_reply(message)
        if isinstance(reply, frames.SnapshotChunk):
            consumer.apply(reply.events)
    assert len(consumer.pages) == header.blocks
    for reply in ask(made, frames.replay_request(header.seq + 1)):
        if isinstance(reply, frames.ReplayItem):
            consumer.apply(decode_batch(reply.payload).events)
    assert set(consumer.pages) == set(made.index.announced())


def test_a_snapshot_has_every_tier() -> None:
    made = stream()
    store(made, 1)
    store(made, 2)
    made.on_update(CacheUpdate([Copied([1, 2], "CPU"), Copied([1], "DISK"), Removed([2])]), ts=0.0)
    header, *chunks, end = ask(made, frames.snapshot_request())
    assert header == frames.SnapshotHeader(7, 2, 4)
    assert end == frames.SnapshotEnd()
    events = [event for chunk in chunks if isinstance(chunk, frames.SnapshotChunk) for event in chunk.events]
    assert [(event.medium, event.block_hashes) for event in events] == [
        ("GPU", [1]),
        ("CPU", [1]),
        ("CPU", [2]),
        ("DISK", [1]),
    ]
