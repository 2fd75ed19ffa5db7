"""Pages on their way: requests wait for fillers, and no page is lost or freed too early, whatever fillers do."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.kvcache import NO_PAGES, Node, Pages, Place, RadixCache, key_of
from treeline_runtime.messages import GenerateReq, SamplingParams
from treeline_runtime.scheduler.cache import MIN_SHARED_TOKENS, CacheManager
from treeline_runtime.scheduler.table import TableManager

LONG = list(range(60))


def a_tree() -> RadixCache:
    return RadixCache(1)


def coming(tree: RadixCache, tokens: list[int], namespace: str | None = None) -> int:
    tree.check_integrity()
    return tree.match(key_of(tokens), namespace).coming


def insert(tree: RadixCache, tokens: list[int]) -> None:
    tree.insert(key_of(tokens), np.arange(len(tokens)), prompt_tokens=len(tokens))


def test_pages_on_their_way_are_expected_until_their_filler_ends() -> None:
    tree = a_tree()
    first = tree.begin_filling(None, key_of([*LONG, 1]))
    second = tree.begin_filling(None, key_of([*LONG, 2]), "salt")
    wanted = [*LONG, 3]
    assert (coming(tree, wanted), coming(tree, wanted, "salt"), coming(tree, wanted, "other")) == (60, 60, 0)
    assert coming(tree, [9, *LONG]) == 0
    assert tree.num_pages == 0
    assert not tree.take_events()
    tree.unlock(first)
    assert (coming(tree, wanted), coming(tree, wanted, "salt")) == (0, 60)
    assert tree.end_filling(second) is None
    assert not list(tree._walk())


def test_several_fillers_share_a_node_which_ends_with_the_last() -> None:
    tree = a_tree()
    fillers = [tree.begin_filling(None, key_of([*LONG[:40], i, i])) for i in range(3)]
    for i, filler in enumerate(fillers):
        assert coming(tree, LONG) == 40
        assert coming(tree, [*LONG[:40], i, i, i]) == 42
        tree.unlock(filler)
    assert coming(tree, LONG) == 0


def test_pages_filled_by_one_of_two_are_kept_for_the_other() -> None:
    tree = a_tree()
    ours, theirs = (tree.begin_filling(None, key_of([*LONG, i])) for i in range(2))
    insert(tree, LONG[:20])
    match = tree.match(key_of([*LONG, 1]))
    assert (match.num_pages, match.coming) == (20, 41)
    tree.unlock(ours)
    assert len(tree.evict(20)) == 0
    assert coming(tree, [*LONG, 0]) == 40
    theirs = tree.end_filling(theirs)
    assert theirs is not None
    assert coming(tree, LONG) == 0
    tree.unlock(theirs)
    assert len(tree.evict(30)) == 20


def test_a_request_that_ignores_cached_pages_fills_nothing() -> None:
    """The pages that it computes again are cached, and may be evicted meanwhile."""
    tree = a_tree()
    insert(tree, LONG)
    assert tree.begin_filling(None, key_of([*LONG, 1])) is None
    assert coming(tree, [*LONG, 1]) == 0
    assert len(tree.evict(60)) == 60


def test_a_tree_with_pages_on_their_way_is_not_reset() -> None:
    tree = a_tree()
    tree.begin_filling(None, key_of(LONG))
    with pytest.raises(AssertionError, match="reset"):
        tree.reset()


NUM_PAGES = 60
PAGE_SIZE = 4


class Outside:
    """A filler of pages that is no request."""

    def __init__(self, tokens: list[int], pages: Pages, handle: Node | None) -> None:
        self.tokens = tokens
        self.pages = pages
        self.handle = handle


class Machine(RuleBasedStateMachine):
    """Requests are admitted, computed in chunks, with some launches in flight, and end; others fill pages beside
    them."""

    def __init__(self) -> None:
        super().__init__()
        config = SchedulerConfig(model="none", page_size=PAGE_SIZE)
        self.table = TableManager(8, 128, PAGE_SIZE)
        self.cache = CacheManager(config, NUM_PAGES, self.table)
        self.waiting: list[Req] = []
        self.admitted: list[Req] = []
        self.ended: set[Req] = set()
        self.trusted: dict[Req, bool] = {}
        self.launched: deque[tuple[Req, int, Pages]] = deque()
        self.outside: list[Outside] = []
        self.fills: dict[Req | Outside, bool] = {}
        """Whether the tokens that were missing at the beginning are on their way; False if more was cached than
        used."""
        self.count = 0

    prompts = st.tuples(st.integers(0, 1), st.integers(1, 90), st.integers(0, 2)).map(
        lambda drawn: [drawn[0], *range(drawn[1]), 200 + drawn[2]]
    )
    """Prompts of two families that share their beginnings."""

    @rule(tokens=prompts, priority=st.integers(0, 1))
    def arrive(self, tokens: list[int], priority: int) -> None:
        self.count += 1
        message = GenerateReq(str(self.count), tokens, SamplingParams())
        req = Req.of(message, seed=0, eos_ids=(), max_new_tokens=1, arrival=self.count, priority=priority)
        req.key = key_of(tokens)
        self.waiting.append(req)

    def fillers(self) -> list[list[int]]:
        """Return the tokens that each filler is known to fill, in whole pages."""
        alive = [filler for filler in (*self.computing(), *self.outside) if self.fills[filler]]
        return [filler.tokens[: len(filler.tokens) // PAGE_SIZE * PAGE_SIZE] for filler in alive]

    def computing(self) -> list[Req]:
        return [req for req in self.admitted if req not in self.ended and req.kv_len < len(req.tokens)]

    def waits(self, req: Req) -> bool:
        wanted = self.cache.match(req).num_pages * PAGE_SIZE + MIN_SHARED_TOKENS
        alike = any(tokens[:wanted] == req.tokens[:wanted] for tokens in self.fillers())
        return len(req.tokens) > wanted and alike

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 30))
    def look_at_a_waiting_one(self, which: int) -> None:
        req = self.waiting[which % len(self.waiting)]
        match = self.cache.match(req)
        assert self.cache.waits(match) == self.waits(req)
        if not self.waits(req) and self.table.num_free:
            self.waiting.remove(req)
            has = self.cache.tree.match(req.key)
            self.cache.admit(req, match)
            self.fills[req] = has.num_pages == match.num_pages
            self.admitted.append(req)

    @precondition(lambda self: self.admitted)
    @rule(which=st.integers(0, 30), tokens=st.integers(1, 60))
    def launch(self, which: int, tokens: int) -> None:
        req = self.admitted[which % len(self.admitted)]
        end = min(req.device_len + tokens, len(req.tokens))
        if req in self.ended or end == req.device_len:
            return
        if self.cache.missing_pages(req, end) > self.cache.available_pages:
            return
        self.cache.extend(req, end)
        read_or_filled = self.table.pages[req.row, : req.num_pages].copy()
        req.device_len = end
        req.in_flight += 1
        self.launched.append((req, end, read_or_filled))

    @precondition(lambda self: self.launched)
    @rule(succeeds=st.sampled_from([True, True, False]))
    def take_the_oldest_result(self, succeeds: bool) -> None:
        req, end, _ = self.launched.popleft()
        req.in_flight -= 1
        if req.deferred:
            self.cache.batch_done(req)
        if req in self.ended:
            self.trusted[req] &= succeeds
            self.release_if_idle(req)
        elif succeeds:
            req.kv_len = end
            self.cache.cache_unfinished(req)
        else:
            self.finish(req, trusted=False)

    @precondition(lambda self: self.admitted)
    @rule(which=st.integers(0, 30), trusted=st.booleans())
    def end_a_request(self, which: int, trusted: bool) -> None:
        req = self.admitted[which % len(self.admitted)]
        if req not in self.ended:
            self.finish(req, trusted)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 30))
    def one_who_waits_leaves(self, which: int) -> None:
        del self.waiting[which % len(self.waiting)]

    def finish(self, req: Req, trusted: bool) -> None:
        self.ended.add(req)
        self.trusted[req] = trusted
        self.cache.end_filling(req)
        self.release_if_idle(req)

    def release_if_idle(self, req: Req) -> None:
        if req.in_flight == 0:
            self.admitted.remove(req)
            self.ended.remove(req)
            self.cache.release(req, insert=self.trusted.pop(req))

    @rule(tokens=prompts)
    def begin_outside(self, tokens: list[int]) -> None:
        count = len(tokens) // PAGE_SIZE
        if len(self.outside) < 2 and count <= self.cache.pool.num_free:
            tree, key = self.cache.tree, key_of(tokens)
            handle = tree.begin_filling(tree.lock(tree.match(key)), key)
            filler = Outside(tokens, self.cache.pool.alloc(count), handle)
            self.fills[filler] = True
            self.outside.append(filler)

    @precondition(lambda self: self.outside)
    @rule(done=st.booleans())
    def end_outside(self, done: bool) -> None:
        filler = self.outside.pop(0)
        existing = len(filler.pages)
        if done:
            key = key_of(filler.tokens)
            existing, _ = self.cache.tree.insert(key, filler.pages, prompt_tokens=len(filler.tokens))
        self.cache.pool.free(filler.pages[:existing])
        self.cache.tree.unlock(filler.handle)

    @rule(count=st.integers(1, 20))
    def evict(self, count: int) -> None:
        self.cache.pool.free(self.cache.tree.evict(count))

    @invariant()
    def every_page_has_one_owner(self) -> None:
        cache = self.cache
        cache.pool.check_integrity()
        cache.tree.check_integrity()
        held = sum(map(cache.held_pages, self.admitted)) + sum(len(filler.pages) for filler in self.outside)
        assert cache.is_balanced(held)

    @invariant()
    def no_page_that_is_filled_or_read_is_free(self) -> None:
        for pages in [*(pages for *_, pages in self.launched), *(filler.pages for filler in self.outside)]:
            assert not self.cache.pool._is_free[pages].any()
        requests = [self.table.pages[req.row, req.tree_len // PAGE_SIZE : req.num_pages] for req in self.admitted]
        others = [filler.pages for filler in self.outside]
        cached = [node.pages for node, _ in self.cache.tree._walk()]
        numbers = np.concatenate([NO_PAGES, *requests, *others, *cached])
        assert len(numbers) == len(np.unique(numbers)), "a page has two owners"

    @invariant()
    def what_is_on_its_way_is_what_fillers_fill(self) -> None:
        """A page that no filler fills would be waited for forever."""
        coming = [node for node, _ in self.cache.tree._walk() if node.place is Place.ON_ITS_WAY]
        fillers = [key_of(tokens) for tokens in self.fillers()]
        for node in coming:
            key, above = node.key, node.parent
            while above is not None:
                key, above = above.key + key, above.parent
            assert any(filler.startswith(key) for filler in fillers)

    def teardown(self) -> None:
        """When all fillers have ended in any way, pages are free or cached, and no request waits."""
        while self.launched:
            self.take_the_oldest_result(succeeds=len(self.launched) % 2 == 0)
        while self.outside:
            self.end_outside(done=len(self.outside) % 2 == 0)
        for req in list(self.admitted):
            self.finish(req, trusted=True)
        assert self.cache.is_balanced()
        assert self.cache.tree.locked_pages == 0
        assert not any(self.cache.waits(self.cache.match(req)) for req in self.waiting)


TestFilling = Machine.TestCase
TestFilling.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
