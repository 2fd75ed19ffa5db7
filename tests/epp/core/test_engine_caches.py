"""The index follows the engines' own caches by their events: vLLM's BlockPool and SGLang's RadixCache. It holds the
blocks that they hold, in every release from the oldest to the newest with usable events."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from support.engine_caches import KEYS, RELEASES, EngineCache, SglangCache, SglangTree, Traffic, key_of
from support.engine_wheels import needs_engine_wheels
from treeline_epp.index.index import Index
from treeline_epp.index.pods import Pod
from treeline_wire.events import decode_batch
from treeline_wire.namespaces import join_namespace

pytestmark = [needs_engine_wheels, pytest.mark.deep]

CACHES: dict[str, Callable[[], EngineCache]] = {
    **RELEASES,
    "sglang-0.5.23-pairs": lambda: SglangCache("0.5.23", pairs=True),
    "sglang-0.5.23-tree": lambda: SglangTree("0.5.23"),
    "sglang-0.5.23-page-16": lambda: SglangCache("0.5.23", 16),
}


NEW = range(20, 24)
"""Tokens that continue prompts and are in no cache."""


class Follower:
    """A cache and the index's knowledge of it."""

    def __init__(self, cache: EngineCache) -> None:
        self.cache = cache
        self.index = Index()
        self.pod: Pod = self.index.add_pod("pod", "model")

    def follow(self) -> None:
        """Apply the cache's events, as its publisher writes them."""
        batch = decode_batch(msgspec.msgpack.encode(self.cache.batch()))
        assert not batch.rejected
        for event in batch.events:
            self.index.apply(self.pod, event, KEYS)
        self.index.tick(0.0)

    def hit(self, tokens: list[int], salt: str | None = None, lora: str | None = None) -> int:
        key = key_of([*tokens, *NEW])
        return self.index.match("model", join_namespace(lora, salt), key, 0.0).hit(self.pod).tokens


@pytest.mark.parametrize("name", CACHES)
def test_the_index_holds_the_blocks_that_the_engine_holds(name: str) -> None:
    follower, traffic = Follower(CACHES[name]()), Traffic(11)
    cache, most = follower.cache, 0
    for _ in range(150):
        traffic.step(cache)
        follower.follow()
        held = cache.blocks()
        most = max(most, len(held))
        assert follower.index.blocks_of(follower.pod) == held
        assert follower.pod.blocks == len(held)
        prompt = traffic.prompt()
        cached = cache.cached([*prompt, *NEW])
        assert cached - cache.width <= follower.hit(prompt) <= cached  # the last block waits for a few bytes more
    assert most > 20
    assert not follower.pod.skipped
    follower.index.check()


def test_a_release_that_removes_held_blocks_is_credited_less_never_more() -> None:
    follower, traffic = Follower(SglangCache("0.5.6")), Traffic(12)
    cache, believed = follower.cache, 0
    for _ in range(100):
        traffic.step(cache)
        follower.follow()
        prompt = traffic.prompt()
        believed += follower.hit(prompt)
        assert follower.hit(prompt) <= cache.cached(prompt)
        assert follower.index.blocks_of(follower.pod) <= cache.blocks()
    assert believed
    follower.index.check()


@pytest.mark.parametrize("name", ["vllm-0.23.0", "vllm-0.33.0", "sglang-0.5.19", "sglang-0.5.23", "sglang-0.5.23-tree"])
def test_salted_blocks_match_only_their_salt(name: str) -> None:
    follower, tokens = Follower(CACHES[name]()), list(range(20))
    follower.cache.serve(tokens, salt="mine")
    follower.follow()
    assert follower.hit(tokens, salt="mine") >= 16
    assert follower.cache.cached(tokens, salt="mine") == 20
    assert follower.hit(tokens) == 0 == follower.cache.cached(tokens)
    assert follower.hit(tokens, salt="other") == 0
    follower.cache.serve(tokens)
    follower.follow()
    assert follower.hit(tokens) >= 16
    follower.cache.make_room(10_000)
    follower.follow()
    assert follower.hit(tokens) == 0 == follower.hit(tokens, salt="mine")
    assert follower.index.blocks_of(follower.pod) == set()


@pytest.mark.parametrize("name", ["vllm-0.23.0", "vllm-0.33.0", "sglang-0.5.23", "sglang-0.5.23-tree"])
def test_adapter_blocks_match_only_the_adapters_name(name: str) -> None:
    follower, tokens = Follower(CACHES[name]()), list(range(20))
    follower.cache.serve(tokens, lora="adapter")
    follower.follow()
    assert follower.hit(tokens, lora="adapter") >= 16
    assert follower.hit(tokens) == 0 == follower.hit(tokens, lora="other")
    follower.cache.serve(tokens, lora="adapter", salt="mine")
    follower.follow()
    assert follower.hit(tokens, salt="mine", lora="adapter") >= 16
    assert follower.hit(tokens, salt="mine") == 0
    follower.cache.make_room(10_000)
    follower.follow()
    assert follower.index.blocks_of(follower.pod) == set()
