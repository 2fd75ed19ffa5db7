"""The tree against a model that is a set of prefixes: any order of inserts, locks, evictions and resets."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from treeline_runtime.kvcache import Node, PagePool, RadixCache, key_of
from treeline_runtime.kvcache.node import EVICTION_POLICIES
from treeline_runtime.published import Cleared, Removed, Stored
from treeline_wire.events import block_hash, hash_of, root_digest

NUM_PAGES = 40
Prefix = tuple[str | None, tuple[int, ...]]
"""Namespace, tokens of whole pages."""


class TreeMachine(RuleBasedStateMachine):
    """`model`: cached prefix → page. Locked prefixes are those below a handle. A mirror sees the events alone."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.size = 1
        self.pool = PagePool(NUM_PAGES)
        self.policy = "lru"
        self.tree = RadixCache(1)
        self.priority: dict[Prefix, int] = {}
        self.model: dict[Prefix, int] = {}
        self.locks: list[Prefix] = []
        self.mirror: dict[int, int | None] = {}

    @rule(size=st.sampled_from([1, 2, 3]), policy=st.sampled_from([*EVICTION_POLICIES, *3 * ["priority"]]))
    @precondition(lambda self: not self.model)
    def configure(self, size: int, policy: str) -> None:
        self.size = size
        self.policy = policy
        self.tree = RadixCache(size, policy)
        self.mirror.clear()

    tokens = st.lists(st.integers(0, 1), max_size=16)
    namespaces = st.sampled_from([None, None, "salt"])
    priorities = st.integers(-2, 2)

    def whole(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """Return every prefix of whole pages."""
        return [tuple(tokens[:i]) for i in range(self.size, len(tokens) + 1, self.size)]

    def cached(self, tokens: list[int], namespace: str | None) -> list[int]:
        pages = []
        for prefix in self.whole(tokens):
            if (namespace, prefix) not in self.model:
                break
            pages.append(self.model[namespace, prefix])
        return pages

    def use(self, tokens: list[int], namespace: str | None, priority: int) -> None:
        for prefix in self.whole(tokens):
            if (namespace, prefix) in self.model:
                self.priority[namespace, prefix] = max(self.priority.get((namespace, prefix), priority), priority)

    @rule(tokens=tokens, namespace=namespaces, prompt=st.integers(0, 16), priority=priorities)
    def insert(self, tokens: list[int], namespace: str | None, prompt: int, priority: int) -> None:
        count = len(tokens) // self.size
        if count > self.pool.num_free:
            return
        pages = self.pool.alloc(count)
        expected = len(self.cached(tokens, namespace))
        existing, node = self.tree.insert(
            key_of(tokens), pages, prompt_tokens=prompt, namespace=namespace, priority=priority
        )
        assert existing == expected
        assert (node is None) == (count == 0)
        self.pool.free(pages[:existing])
        for prefix, page in zip(self.whole(tokens)[existing:], pages[existing:].tolist(), strict=True):
            self.model[namespace, prefix] = page
        self.use(tokens, namespace, priority)

    @rule(tokens=tokens, namespace=namespaces)
    def match(self, tokens: list[int], namespace: str | None) -> None:
        match = self.tree.match(key_of(tokens), namespace)
        assert self.tree.pages_of(match).tolist() == self.cached(tokens, namespace)

    @rule(target=handles, tokens=tokens, namespace=namespaces, priority=priorities)
    def lock(self, tokens: list[int], namespace: str | None, priority: int) -> tuple[Node | None, Prefix]:
        match = self.tree.match(key_of(tokens), namespace)
        prefix = (namespace, tuple(tokens[: match.num_pages * self.size]))
        handle = self.tree.lock(match, priority)
        self.use(list(prefix[1]), namespace, priority)
        if handle is not None:
            assert self.tree.pages_of(self.tree.whole(handle)).tolist() == self.cached(tokens, namespace)
        self.locks.append(prefix)
        return handle, prefix

    @rule(held=consumes(handles))
    def unlock(self, held: tuple[Node | None, Prefix]) -> None:
        handle, prefix = held
        self.tree.unlock(handle)
        self.locks.remove(prefix)

    @rule(count=st.integers(0, 8))
    def evict(self, count: int) -> None:
        free = self.unlocked()
        pages = self.tree.evict(count).tolist()
        assert len(pages) == min(count, len(free))
        gone = {prefix for prefix, page in self.model.items() if page in set(pages)}
        assert gone <= free, "a locked page was evicted"
        if self.policy == "priority" and gone:
            # no page behind a prefix is more urgent than it, so the least urgent page is at an end
            most = max(self.priority[prefix] for prefix in gone)
            assert all(self.priority[prefix] >= most for prefix in free - gone)
        for prefix in gone:
            del self.model[prefix]
            del self.priority[prefix]
        for namespace, tokens in self.model:
            assert all((namespace, p) in self.model for p in self.whole(list(tokens))), "a hole in a sequence"
        self.pool.free(np.array(pages, dtype=np.int64))

    @rule()
    @precondition(lambda self: not any(tokens for _, tokens in self.locks))
    def reset(self) -> None:
        self.pool.free(self.tree.reset())
        self.model.clear()
        self.priority.clear()

    def unlocked(self) -> set[Prefix]:
        locked = {(n, p) for n, tokens in self.locks for p in self.whole(list(tokens))}
        return set(self.model) - locked

    @invariant()
    def books_balance(self) -> None:
        self.tree.check_integrity()
        self.pool.check_integrity()
        assert self.tree.num_pages == len(self.model)
        assert self.tree.evictable_pages == len(self.unlocked())
        assert self.pool.num_free + self.tree.num_pages == NUM_PAGES

    @invariant()
    def events_tell_the_whole_story(self) -> None:
        for event in self.tree.take_events():
            if isinstance(event, Stored):
                parent = event.parent_hash
                assert len(event.token_ids) == len(event.block_hashes) * self.size
                assert 0 <= event.output_from <= len(event.token_ids)
                for digest in event.block_hashes:
                    assert parent is None or parent in self.mirror, "a page was announced before its parent"
                    assert digest not in self.mirror, "a page was announced twice"
                    self.mirror[digest], parent = parent, digest
            elif isinstance(event, Removed):
                for digest in event.block_hashes:
                    del self.mirror[digest]
                    assert digest not in self.mirror.values(), "a page was removed before its children"
            else:
                assert isinstance(event, Cleared)
                self.mirror.clear()
        assert set(self.mirror) == {self.digest(*prefix) for prefix in self.model}
        assert set(self.mirror) == {digest for digest, *_ in self.tree.blocks()}

    def digest(self, namespace: str | None, tokens: tuple[int, ...]) -> int:
        chain = root_digest(namespace)
        for i in range(0, len(tokens), self.size):
            chain = block_hash(chain, tokens[i : i + self.size])
        return hash_of(chain)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
