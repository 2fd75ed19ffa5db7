"""Loads in every order of arrivals, failures, aborts, stalls, evictions and other requests' results: no page is free
while a copy may write it, none is lost, and every request can go on."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.kvcache import NO_PAGES, Pages, Place, key_of
from treeline_runtime.kvcache.store import Reading
from treeline_runtime.messages import GenerateReq, SamplingParams
from treeline_runtime.scheduler.cache import CacheManager
from treeline_runtime.scheduler.loads import STALLED_S, Load, Loads, LoadState
from treeline_runtime.scheduler.table import TableManager

NUM_PAGES = 40
PAGE_SIZE = 4


class Copy:
    """A copy that writes to pages until the test ends it."""

    def __init__(self, pages: Pages, reading: Reading, then: object) -> None:
        self.pages = pages
        self.reading = reading
        self.then = then


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        config = SchedulerConfig(model="none", page_size=PAGE_SIZE)
        self.cache = CacheManager(config, NUM_PAGES, TableManager(8, 128, PAGE_SIZE))
        self.tree, self.pool = self.cache.tree, self.cache.pool
        self.loads = Loads(self.tree, self.pool, self.start, lambda load, _: self.ended.append(load))
        self.copies: list[Copy] = []
        self.waiting: list[Req] = []
        self.ended: list[Load] = []
        self.slots = True
        self.now = 0.0
        self.count = 0

    def start(self, _: Req, digests: object, pages: Pages, then: object) -> Reading | None:
        if not self.slots:
            return None
        reading = Reading(len(pages))
        self.copies.append(Copy(pages, reading, then))
        return reading

    prompts = st.tuples(st.integers(0, 1), st.integers(9, 70), st.integers(0, 1)).map(
        lambda drawn: [drawn[0], *range(drawn[1]), 200 + drawn[2]]
    )
    """Prompts of two families that share their beginnings."""

    @rule(tokens=prompts)
    def arrive(self, tokens: list[int]) -> None:
        self.count += 1
        message = GenerateReq(str(self.count), tokens, SamplingParams())
        req = Req.of(message, seed=0, eos_ids=(), max_new_tokens=1, arrival=self.count)
        req.key = key_of(tokens)
        self.waiting.append(req)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 30), pages=st.integers(1, 20), slots=st.sampled_from([True, True, False]))
    def load(self, which: int, pages: int, slots: bool) -> None:
        req = self.waiting[which % len(self.waiting)]
        match = self.cache.match(req)
        count = min(pages, req.cacheable_len // PAGE_SIZE - match.num_pages)
        free = self.cache.available_pages - self.tree.unlocked_pages(match)
        if self.cache.waits(match) or not 0 < count <= free:
            return
        self.slots = slots
        assert self.loads.begin(req, match, [b""] * count, self.now) == slots

    @precondition(lambda self: self.copies)
    @rule(which=st.integers(0, 30), pages=st.integers(1, 20))
    def a_copy_goes_on(self, which: int, pages: int) -> None:
        reading = self.copies[which % len(self.copies)].reading
        if not reading.stop:
            reading.progress = min(reading.progress + pages, reading.wanted)

    @precondition(lambda self: self.copies)
    @rule(which=st.integers(0, 30), kept=st.integers(0, 20))
    def a_copy_ends(self, which: int, kept: int) -> None:
        """After all of its pages, or with a failure after some of them."""
        copy = self.copies.pop(which % len(self.copies))
        copy.reading.count = min(copy.reading.progress, kept)
        copy.then(copy.reading)  # type: ignore[operator]

    @rule(seconds=st.sampled_from([1.0, STALLED_S / 2, STALLED_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.loads.check(self.now)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 30))
    def one_who_waits_is_aborted(self, which: int) -> None:
        del self.waiting[which % len(self.waiting)]

    @rule(tokens=prompts)
    def another_request_computes_the_same(self, tokens: list[int]) -> None:
        count = len(tokens) // PAGE_SIZE
        if count <= self.pool.num_free:
            pages = self.pool.alloc(count)
            existing, _ = self.tree.insert(key_of(tokens), pages, prompt_tokens=len(tokens))
            self.pool.free(pages[:existing])

    @rule(count=st.integers(1, 20))
    def evict(self, count: int) -> None:
        self.pool.free(self.tree.evict(count))

    @precondition(lambda self: not self.loads)
    @rule()
    def flush(self) -> None:
        """It waits until all loads have ended."""
        self.cache.flush()
        assert self.pool.num_free == NUM_PAGES

    @invariant()
    def every_page_has_one_owner(self) -> None:
        self.pool.check_integrity()
        self.tree.check_integrity()
        assert self.cache.is_balanced(self.loads.held_pages)
        written = np.concatenate([NO_PAGES, *(copy.pages for copy in self.copies)])
        cached = np.concatenate([NO_PAGES, *(node.pages for node, _ in self.tree._walk())])
        assert not self.pool._is_free[written].any(), "a page that is written is free"
        assert len(np.unique(np.concatenate([written, cached]))) == len(written) + len(cached)
        assert len(self.loads) == len(self.copies)

    @invariant()
    def requests_wait_only_for_loads_that_go_on(self) -> None:
        coming = [node for node, _ in self.tree._walk() if node.place is Place.ON_ITS_WAY]
        assert bool(coming) <= self.loads.is_expecting
        assert all(load.state is LoadState.ENDED for load in self.ended)

    def teardown(self) -> None:
        while self.copies:
            self.a_copy_ends(0, kept=len(self.copies))
        assert self.cache.is_balanced()
        assert self.tree.locked_pages == 0
        assert not any(self.cache.waits(self.cache.match(req)) for req in self.waiting)


TestLoads = Machine.TestCase
TestLoads.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
