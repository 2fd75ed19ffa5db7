"""Everything that an engine sends enters the index in bounded slices; the tests count the blocks of each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.epp_core import KEYS, WIDTH, Bench, Prompt, batch, item
from treeline_epp.index.index import Index
from treeline_epp.index.limits import SLICE, weight
from treeline_epp.index.radix_tree import RadixTree
from treeline_epp.kvevents.intake import SLICE_S, Turns
from treeline_epp.kvevents.reading import answer_of, read_live
from treeline_epp.kvevents.subscription import KvSubscription
from treeline_wire import frames
from treeline_wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, encode_batch
from treeline_wire.frames import Hello, ReplayEnd, ReplayRequest, SnapshotChunk, SnapshotEnd, SnapshotHeader

MOST = 3 * SLICE
"""A slice and one event, and as much again for orphans whose parents have come."""


class Slices:
    """Counts the trees' work in slices: one call of a subscription, or one tick of an index."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done = 0
        self.largest = 0
        self.count = 0
        store, remove = RadixTree.store, RadixTree.remove

        def counted_store(tree: RadixTree, root: Any, parent: Any, hashes: Any, *more: Any) -> Any:
            self.done += weight(BlockStored(list(hashes)))
            return store(tree, root, parent, hashes, *more)

        def counted_remove(tree: RadixTree, hashes: Any, bits: int) -> int:
            self.done += weight(BlockRemoved(list(hashes)))
            return remove(tree, hashes, bits)

        patch.setattr(RadixTree, "store", counted_store)
        patch.setattr(RadixTree, "remove", counted_remove)

    def slice(self, call: Callable[[], Any]) -> Any:
        before = self.done
        result = call()
        self.largest = max(self.largest, self.done - before)
        self.count += 1
        return result


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slices]:
    made = Slices(monkeypatch)
    yield made
    assert made.done > 10 * MOST, "there was much to do"
    assert made.largest <= MOST
    assert made.count >= made.done / MOST


def settle(subscription: KvSubscription, slices: Slices) -> None:
    while subscription.busy:
        assert slices.slice(lambda: subscription.on_turn(1.0)) == []


def live(*events: Event, seq: int = 0) -> Any:
    """Encode events and read them back, as if from the wire."""
    return read_live(frames.live(b"", seq, encode_batch(1.0, events)))


def test_batches_buffered_during_a_replay_are_applied_in_slices(slices: Slices) -> None:
    bench = Bench()
    bench.ours()
    subscription = bench.subscription
    assert subscription.on_live(1, batch(1.0), 0.0) == [ReplayRequest(0)]
    prompts = [Prompt.random(seed, 4) for seed in range(2, 1000)]
    for seq, prompt in enumerate(prompts, 2):
        slices.slice(lambda seq=seq, prompt=prompt: subscription.on_live(seq, batch(1.0 * seq, prompt.stored()), 0.0))
    assert slices.done == 0, "they wait"
    subscription.on_reply(item(0, batch(0.0)), 0.0)
    slices.slice(lambda: subscription.on_reply(ReplayEnd(), 0.0))
    assert subscription.busy
    settle(subscription, slices)
    assert subscription.live
    assert subscription.next_seq == 1000
    assert bench.index.blocks_of(bench.pod) == {block for prompt in prompts for block in prompt.hashes}


def test_a_gap_among_buffered_batches_is_requested_when_it_is_reached() -> None:
    bench = Bench()
    bench.ours()
    subscription = bench.subscription
    subscription.on_live(1, batch(1.0), 0.0)
    for seq in (*range(2, 500), *range(501, 1000)):
        subscription.on_live(seq, batch(1.0 * seq), 0.0)
    subscription.on_reply(item(0, batch(0.0)), 0.0)
    asked = subscription.on_reply(ReplayEnd(), 0.0)
    while subscription.busy:
        asked += subscription.on_turn(0.0)
    assert asked == [ReplayRequest(500)]
    subscription.on_reply(item(500, batch(500.0)), 0.0)
    subscription.on_reply(ReplayEnd(), 0.0)
    while subscription.busy:
        assert subscription.on_turn(0.0) == []
    assert (subscription.live, subscription.next_seq) == (True, 1000)


def test_a_large_replayed_batch_and_a_large_snapshot_are_applied_in_slices(slices: Slices) -> None:
    bench = Bench()
    prompt = Prompt.random(1, 8_000)
    subscription = bench.subscription
    subscription.on_connected(0.0)
    subscription.on_reply(Hello(1, None, 0), 0.0)
    subscription.on_reply(SnapshotHeader(1, 0, 8_000), 0.0)
    chunk = answer_of(SnapshotChunk([prompt.stored()]))
    slices.slice(lambda: subscription.on_reply(chunk, 0.0))
    settle(subscription, slices)
    assert bench.pod.blocks == 0, "it is no part of what the pod holds until it is complete"
    slices.slice(lambda: subscription.on_reply(SnapshotEnd(), 0.0))
    assert bench.index.blocks_of(bench.pod) == set(prompt.hashes)
    assert bench.pod.blocks == 8_000
    assert subscription.on_live(2, batch(2.0), 0.0) == [ReplayRequest(1)]
    removed = frames.ReplayItem(b"", 1, encode_batch(1.0, [BlockRemoved(prompt.hashes)]))
    slices.slice(lambda: subscription.on_reply(answer_of(removed), 0.0))
    settle(subscription, slices)
    assert bench.pod.blocks == 0
    subscription.on_reply(ReplayEnd(), 0.0)
    assert subscription.live


@pytest.mark.parametrize("shape", ["one event", "an event each", "removed in no order"])
def test_a_large_batch_is_applied_in_slices(shape: str, slices: Slices) -> None:
    bench = Bench()
    bench.ours()
    prompt, subscription = Prompt.random(1, 8_000), bench.subscription
    events: list[Event] = [prompt.stored()]
    if shape == "an event each":
        events = [prompt.stored(at, at + 1) for at in range(2000)]
    elif shape == "removed in no order":
        events.append(BlockRemoved(random.Random(0).sample(prompt.hashes, 6_000)))
    came = live(*events)
    assert came.events == len(events)
    slices.slice(lambda: subscription.on_live(came.seq, came.batch, 0.0))
    settle(subscription, slices)
    assert bench.pod.blocks == len(bench.index.blocks_of(bench.pod)) == (8_000 if shape == "one event" else 2000)
    bench.index.check()


def test_orphans_are_attached_in_slices_when_their_parent_comes(slices: Slices) -> None:
    bench = Bench()
    bench.ours()
    subscription, first = bench.subscription, Prompt.random(1, 1)
    many = [first.extended(seed, 2) for seed in range(1000)]
    parent, rest = first.stored(), [prompt.stored(1) for prompt in many]
    gone = [BlockRemoved([prompt.hashes[1]]) for prompt in many[::2]]
    for seq, events in enumerate((rest, gone, [parent])):
        came = live(*events, seq=seq)
        slices.slice(lambda came=came: subscription.on_live(came.seq, came.batch, 0.0))
        settle(subscription, slices)
    wanted = {first.hashes[0], *(block for prompt in many[1::2] for block in prompt.hashes)}
    assert bench.index.blocks_of(bench.pod) == wanted | {prompt.hashes[2] for prompt in many[::2]}
    assert bench.pod.blocks == len(bench.index.blocks_of(bench.pod))
    assert bench.index.totals()["orphan_blocks"] == 0
    bench.index.check()


def test_an_orphan_whose_parent_comes_and_goes_waits_for_it_again() -> None:
    bench, (first, *_) = Bench(), [Prompt.random(1, 1)]
    index, pod = bench.index, bench.pod
    many = [first.extended(seed, 2) for seed in range(100)]
    for prompt in many:
        index.apply(pod, prompt.stored(1), KEYS)
    index.apply(pod, first.stored(), KEYS)
    assert index.grafts(pod), "these are more than one store takes along"
    index.apply(pod, BlockRemoved(first.hashes), KEYS)
    while index.grafts(pod):
        index.graft(pod.scope, SLICE)
    waiting = index.totals()["orphan_blocks"]
    assert 0 < waiting < 200
    index.apply(pod, first.stored(), KEYS)
    for _ in range(20):
        index.tick(0.0)  # goes on by itself
    assert index.totals()["orphan_blocks"] == 0
    assert index.blocks_of(pod) == {block for prompt in many for block in prompt.hashes}
    index.check()


@pytest.mark.parametrize("how", ["cleared", "removed"])
def test_blocks_of_a_removed_endpoint_leave_in_slices(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index()
    pod, other = index.add_pod("p", "m"), index.add_pod("q", "m")
    prompts = [Prompt.random(seed, 60) for seed in range(200)]
    for prompt in prompts:
        index.apply(pod, prompt.stored(), KEYS)
        index.apply(pod, BlockStored([prompt.hashes[0] ^ 1], 12345, prompt.tokens[:WIDTH], WIDTH), KEYS)
        index.apply(other, prompt.stored(0, 1), KEYS)
    assert index.totals()["orphan_blocks"] == 200
    before = index.totals()
    if how == "cleared":
        index.apply(pod, AllBlocksCleared(), KEYS)
    else:
        index.remove_pod(pod)
    assert index.totals() == before, "nothing is taken out at once"
    left, steps = 12_200, 0
    while left > 200:
        index.tick(0.0, budget=20)
        totals = index.totals()
        now_left = totals["blocks"] + totals["orphan_blocks"]
        assert left - now_left <= 20 * 4 + 120, "a budget's worth and the run that was begun"
        left, steps = now_left, steps + 1
        assert steps < 2000
    assert index.blocks_of(other) == {prompt.hashes[0] for prompt in prompts}
    index.check()


class Clock:
    """A clock that advances with the work."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_all_publishers_together_have_one_slice_in_each_round_of_the_loop() -> None:
    clock = Clock()
    turns, piece, order = Turns(clock), SLICE_S / 4, list[int]()

    async def publisher(number: int) -> None:
        for _ in range(10):
            async with turns:
                order.append(number)
                clock.now += piece

    work = asyncio.gather(*(publisher(number) for number in range(100)))
    rounds, longest, before = 0, 0.0, 0.0
    while not work.done():
        await asyncio.sleep(0)
        longest, before = max(longest, clock.now - before), clock.now
        rounds += 1
        assert rounds < 10_000
    assert len(order) == 1000
    assert longest <= SLICE_S + piece
    assert rounds >= 1000 / 5, "and everything else ran as often"
    assert set(order[:150]) == set(range(100)), "none waits until another has nothing left"


async def test_a_cancelled_wait_delays_no_other() -> None:
    clock = Clock()
    turns = Turns(clock)

    async def publisher() -> None:
        async with turns:
            clock.now += SLICE_S

    # In one round the first works, the second has the turn and waits for the next round, the third for the turn.
    first, second, third = (asyncio.create_task(publisher()) for _ in range(3))
    await asyncio.sleep(0)
    assert (first.done(), clock.now) == (True, SLICE_S)
    second.cancel()
    third.cancel()
    done = await asyncio.gather(second, third, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in done)
    await asyncio.wait_for(publisher(), 30)
    assert clock.now == 2 * SLICE_S
