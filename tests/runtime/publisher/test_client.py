"""The scheduler never waits for the publisher, and an overflow heals."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.publisher import Cache, Consumer, TrustingReencoder
from treeline_runtime.published import CacheUpdate, Cleared, LoadUpdate, Stored
from treeline_runtime.publisher.announced_index import AnnouncedIndex
from treeline_runtime.publisher.client import Block, PublisherClient, stored_runs


class Pipe:
    """Takes a limited number of messages."""

    def __init__(self) -> None:
        self.open = True
        self.sent: list[msgspec.Struct] = []

    def send(self, message: msgspec.Struct) -> bool:
        if self.open:
            self.sent.append(message)
        return self.open


def test_neighbouring_pages_share_an_event() -> None:
    blocks: list[Block] = [
        (1, None, [1, 2], None),
        (2, 1, [3, 4], None),
        (3, 1, [5, 6], None),
        (4, None, [7, 8], "s"),
    ]
    assert list(stored_runs(blocks)) == [
        Stored([1, 2], None, [1, 2, 3, 4], None, 0),
        Stored([3], 1, [5, 6], None, 0),
        Stored([4], None, [7, 8], "s", 0),
    ]


def test_after_an_overflow_the_whole_tree_is_sent_once_there_is_room() -> None:
    pipe, tree = Pipe(), list[Block]()
    client = PublisherClient(pipe.send, lambda: tree)
    client.publish(CacheUpdate([Stored([1], None, [1, 2], None, 2)]))
    pipe.open = False
    client.publish(LoadUpdate(running=1))
    client.publish(CacheUpdate([Stored([2], 1, [3, 4], None, 2)]))
    assert not client.catch_up()
    tree[:] = [(1, None, [1, 2], None), (2, 1, [3, 4], None)]
    pipe.open = True
    assert client.catch_up()
    assert pipe.sent[1:] == [CacheUpdate([Cleared(), Stored([1, 2], None, [1, 2, 3, 4], None, 0)])]
    assert client.updates == 2
    client.publish(LoadUpdate(running=2))
    assert pipe.sent[2:] == [LoadUpdate(running=2)]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**9))
def test_the_mirror_converges_after_any_drops(seed: int) -> None:
    rng = random.Random(seed)
    cache, pipe, tokens = Cache(rng), Pipe(), dict[int, list[int]]()
    client = PublisherClient(pipe.send, lambda: [(b, p, tokens[b], None) for b, p in cache.pages.items()])
    for _ in range(30):
        pipe.open = rng.random() < 0.7
        events = cache.step()
        for event in events:
            if isinstance(event, Stored):
                size = len(event.token_ids) // len(event.block_hashes)
                tokens |= {b: event.token_ids[i * size : (i + 1) * size] for i, b in enumerate(event.block_hashes)}
        client.publish(CacheUpdate(events))
    pipe.open = True
    assert client.catch_up()
    index, consumer = AnnouncedIndex(TrustingReencoder()), Consumer()
    for update in pipe.sent:
        assert isinstance(update, CacheUpdate)
        consumer.apply(index.apply(update.events))
    assert set(consumer.pages) == set(index.pages()["GPU"]) == set(cache.pages)
