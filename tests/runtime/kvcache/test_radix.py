from __future__ import annotations

import random

import numpy as np
import pytest
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.kvcache import Node, Pages, RadixCache, key_of
from treeline_runtime.kvcache.node import EVICTION_POLICIES, EvictionQueue
from treeline_runtime.kvcache.radix import common_prefix, tokens_of
from treeline_runtime.published import Cleared, Removed, Stored
from treeline_wire.events import block_hash, hash_of, root_digest


def hashes(tokens: list[int], size: int, namespace: str | None = None) -> list[int]:
    """Compute the digest chain naively."""
    digest, found = root_digest(namespace), []
    for i in range(0, len(tokens) // size * size, size):
        digest = block_hash(digest, tokens[i : i + size])
        found.append(hash_of(digest))
    return found


class Tree:
    """A RadixCache of page size 2 with fresh page numbers for every insert."""

    def __init__(self, policy: str = "lru", size: int = 2) -> None:
        self.cache = RadixCache(size, policy)
        self.size = size
        self.next = 0

    def insert(self, tokens: list[int], prompt: int | None = None, namespace: str | None = None) -> tuple[int, Pages]:
        count = len(tokens) // self.size
        pages = np.arange(self.next, self.next + count)
        self.next += count
        existing, _ = self.cache.insert(
            key_of(tokens),
            pages,
            prompt_tokens=len(tokens) if prompt is None else prompt,
            namespace=namespace,
        )
        self.cache.check_integrity()
        return existing, pages

    def match(self, tokens: list[int], namespace: str | None = None) -> list[int]:
        before = self.cache.version
        match = self.cache.match(key_of(tokens), namespace)
        pages: list[int] = self.cache.pages_of(match).tolist()
        assert len(pages) == match.num_pages
        assert self.cache.version == before, "match changed the tree"
        return pages

    def lock(self, tokens: list[int]) -> Node | None:
        handle = self.cache.lock(self.cache.match(key_of(tokens)))
        self.cache.check_integrity()
        return handle

    def unlock(self, handle: Node | None) -> None:
        self.cache.unlock(handle)
        self.cache.check_integrity()

    def evict(self, pages: int) -> list[int]:
        evicted: list[int] = self.cache.evict(pages).tolist()
        self.cache.check_integrity()
        return evicted


def test_keys_are_tokens() -> None:
    assert tokens_of(key_of([1, 2**31, 3])) == [1, 2**31, 3]


@pytest.mark.parametrize("seed", range(20))
def test_common_prefix_finds_the_first_difference(seed: int) -> None:
    rng = random.Random(seed)
    a = rng.randbytes(rng.randint(0, 3000))
    cut = rng.randint(0, len(a))
    b = a[:cut] + bytes([a[cut] ^ 1]) + rng.randbytes(rng.randint(0, 2000)) if cut < len(a) else a + rng.randbytes(9)
    assert common_prefix(a, b) == common_prefix(b, a) == cut


def test_namespaces_share_nothing() -> None:
    tree = Tree()
    _, plain = tree.insert([1, 2, 3, 4])
    existing, salted = tree.insert([1, 2, 3, 4], namespace="tenant")
    assert existing == 0
    assert tree.match([1, 2, 3, 4]) == plain.tolist()
    assert tree.match([1, 2, 3, 4], "tenant") == salted.tolist()
    assert tree.match([1, 2, 3, 4], "other") == []
    assert sorted(tree.evict(4)) == [0, 1, 2, 3]
    assert not tree.cache._roots, "an empty namespace was kept"


def test_the_root_needs_no_lock() -> None:
    tree = Tree()
    assert tree.lock([1, 2]) is None
    tree.unlock(None)
    tree.insert([1, 2])
    handle = tree.lock([1, 2])
    tree.cache.unlock(handle)
    with pytest.raises(AssertionError, match="unlock without lock"):
        tree.cache.unlock(handle)


def test_pages_that_a_lock_would_pin_are_counted_before() -> None:
    tree = Tree()
    tree.insert([1, 2, 3, 4, 5, 6])
    whole = tree.cache.match(key_of([1, 2, 3, 4, 5, 6]))
    assert tree.cache.unlocked_pages(whole) == 3
    tree.lock([1, 2])
    assert tree.cache.unlocked_pages(tree.cache.match(key_of([1, 2, 3, 4, 5, 6]))) == 2
    assert tree.cache.unlocked_pages(tree.cache.match(key_of([1, 2]))) == 0
    assert tree.cache.unlocked_pages(tree.cache.match(key_of([9, 9]))) == 0


def test_eviction_takes_the_ends_of_leaves_first() -> None:
    tree = Tree()
    _, a = tree.insert([1, 2, 3, 4, 5, 6])
    assert tree.evict(1) == [a[2]]
    assert tree.match([1, 2, 3, 4, 5, 6]) == a[:2].tolist()
    _, b = tree.insert([1, 2, 7, 8])
    assert tree.evict(1) == [a[1]], "the older leaf"
    assert tree.evict(1) == [b[1]]
    assert tree.evict(5) == [a[0]], "a parent without children is a leaf"


def test_outputs_go_before_the_prompt_that_led_to_them() -> None:
    tree = Tree()
    _, pages = tree.insert([1, 2, 3, 4, 5, 6, 7, 8], prompt=5)
    assert len(tree.cache._roots[None].children) == 1
    prompt_node = next(iter(tree.cache._roots[None].children.values()))
    assert prompt_node.pages.tolist() == pages[:2].tolist(), "split at the last whole page of the prompt"
    tree.insert([1, 2, 3, 4, 9, 9])
    assert tree.evict(2) == pages[2:].tolist()


def test_reset_forgets_everything_and_hands_all_pages_back() -> None:
    tree = Tree()
    tree.insert([1, 2, 3, 4])
    tree.insert([5, 6], namespace="x")
    handle = tree.lock([1, 2])
    with pytest.raises(AssertionError, match="1 locked pages"):
        tree.cache.reset()
    tree.unlock(handle)
    tree.cache.take_events()
    assert sorted(tree.cache.reset()) == [0, 1, 2]
    assert tree.cache.num_pages == 0
    assert tree.match([1, 2, 3, 4]) == []
    assert tree.cache.take_events() == [Cleared()]
    tree.insert([1, 2])
    assert len(tree.cache.reset()) == 1
    assert len(tree.cache.reset()) == 0


ORDERS = {
    # leaf a: oldest, hit once, used last; b: hit twice; c: newest, never hit
    "lru": "bca",
    "lfu": "cab",
    "priority": "bca",  # as lru, where all are alike
}


@pytest.mark.parametrize("policy", ORDERS)
def test_eviction_order(policy: str) -> None:
    tree = Tree(policy)
    leaves = {"a": [1, 1], "b": [2, 2], "c": [3, 3]}
    for name, tokens in leaves.items():
        tree.cache.insert(key_of(tokens), np.array([ord(name)]), prompt_tokens=2)
    tree.unlock(tree.lock(leaves["b"]))
    tree.unlock(tree.lock(leaves["b"]))
    tree.cache.insert(key_of(leaves["c"]), np.array([0]), prompt_tokens=2)
    tree.unlock(tree.lock(leaves["a"]))
    order = "".join(chr(page) for page in tree.evict(3))
    assert order == ORDERS[policy]


def test_pages_are_as_urgent_as_the_most_urgent_request_that_used_them() -> None:
    cache = RadixCache(1, "priority")
    cache.insert(key_of([1, 2, 3, 4]), np.array([1, 2, 3, 4]), prompt_tokens=4, priority=-5)
    cache.insert(key_of([8]), np.array([8]), prompt_tokens=1, priority=2)
    cache.insert(key_of([9]), np.array([9]), prompt_tokens=1)
    cache.unlock(cache.lock(cache.match(key_of([1, 2])), priority=3))
    cache.unlock(cache.lock(cache.match(key_of([1])), priority=-9))
    cache.insert(key_of([9]), np.array([0]), prompt_tokens=1, priority=1)
    assert cache.evict(9).tolist() == [3, 4, 9, 8, 2, 1], "3 and 4 were never used by a request of priority 3"
    cache.insert(key_of([1, 2]), np.array([1, 2]), prompt_tokens=2, priority=-1)
    cache.insert(key_of([5]), np.array([5]), prompt_tokens=1)
    assert cache.evict(1).tolist() == [2], "what was evicted is forgotten"


def test_every_policy_is_covered_and_unknown_ones_are_refused() -> None:
    assert EVICTION_POLICIES.keys() == ORDERS.keys()
    with pytest.raises(ConfigError, match="eviction_policy must be lru, lfu or priority, got 'best'"):
        SchedulerConfig(model="m", eviction_policy="best")  # type: ignore[arg-type]


def test_the_eviction_queue_forgets_stale_entries() -> None:
    tree = Tree()
    tree.insert([1, 2])
    tree.insert([3, 4])
    queue: EvictionQueue = tree.cache._queue
    for _ in range(500):
        tree.cache.unlock(tree.cache.lock(tree.cache.match(key_of([1, 2]))))
    assert len(queue._heap) < 100
    assert len(queue) == 2
    assert tree.evict(2) == [1, 0]
    assert queue.pop() is None


# ---- events --------------------------------------------------------------------------------------------


def test_stored_runs_name_their_pages_by_the_digest_chain() -> None:
    tree = Tree()
    tree.insert([1, 2, 3, 4, 5], prompt=3)
    expected = hashes([1, 2, 3, 4], 2)
    assert tree.cache.take_events() == [Stored(expected, None, [1, 2, 3, 4], None, 3)]
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8], prompt=8)
    chain = hashes([1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert tree.cache.take_events() == [Stored(chain[2:], chain[1], [5, 6, 7, 8], None, 4)]
    tree.insert([1, 2, 3, 4, 5, 6])
    assert tree.cache.take_events() == []


def test_events_of_a_step_are_merged_in_order() -> None:
    tree = Tree()
    tree.insert([1, 2, 3, 4])
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8], prompt=6)  # continues the run; prompt meets output at a page boundary
    chain = hashes([1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert tree.cache.take_events() == [Stored(chain, None, [1, 2, 3, 4, 5, 6, 7, 8], None, 6)]
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], prompt=10)
    tree.insert([7, 7], prompt=0)
    tree.insert([7, 7, 8, 8], prompt=4)
    events = tree.cache.take_events()
    assert [type(e) for e in events] == [Stored, Stored, Stored], "prompt after output cannot be one run"
    tree.evict(1)
    tree.evict(2)
    removed = tree.cache.take_events()
    assert len(removed) == 1
    assert isinstance(removed[0], Removed)
    assert len(removed[0].block_hashes) == 3


def test_the_block_list_has_every_page_with_parents_first() -> None:
    tree = Tree()
    tree.insert([1, 2, 3, 4], prompt=2)
    tree.insert([1, 2, 5, 6], namespace="x")
    tree.insert([1, 2, 7, 8])
    known: set[int | None] = {None}
    found = {}
    for digest, parent, tokens, namespace in tree.cache.blocks():
        assert parent in known
        known.add(digest)
        found[digest] = (tokens, namespace)
    assert found[hashes([1, 2, 7, 8], 2)[1]] == ([7, 8], None)
    assert found[hashes([1, 2, 5, 6], 2, "x")[1]] == ([5, 6], "x")
    assert len(found) == tree.cache.num_pages == 5
