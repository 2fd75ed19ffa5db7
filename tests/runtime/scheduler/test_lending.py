"""Pages given to other runtimes, in every order of requests, copies, failures, evictions, flushes and new weights: what
is sent is right, every request is answered once, and nothing stays kept or is freed too early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, takewhile
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from treeline_runtime.kvcache import KVPool, PagePool, RadixCache, key_of
from treeline_runtime.kvcache.host import HostTier, Slab
from treeline_runtime.kvcache.page import PageFormat
from treeline_runtime.kvcache.store import PageStore
from treeline_runtime.kvcache.workers import Work, Workers
from treeline_runtime.scheduler.lending import LATE_S
from treeline_runtime.scheduler.rates import LoadRates
from treeline_runtime.scheduler.tiers import Tiers
from treeline_wire.events import block_hash, root_digest
from treeline_wire.pages import MOST_DIGESTS, GetRequest, HaveRequest, Held, Pages

PAGE_SIZE, PAGES, SLOTS, PAGE_BYTES = 4, 24, 8, 8


class Jobs(Workers):
    """Copies that run, and end, when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[Sequence[Any], Callable[[Any], list[Any]], Any]] = []
        self.done: list[tuple[list[Any], Any]] = []

    @property
    def busy(self) -> Counter[Work]:  # type: ignore[override]
        return Counter(copy=len(self.begun) + len(self.done))

    def start(self, kind: Work, parts: list[Sequence[Any]], work: Callable[[Any], list[Any]], then: Any) -> None:
        assert kind == "copy"
        (part,) = parts
        self.begun.append((part, work, then))

    def run(self, which: int, *, fails: bool = False) -> None:
        part, work, then = self.begun.pop(which % len(self.begun))
        self.done.append(([None] * len(part) if fails else work(part), then))

    def take(self, wait_s: float = 0.0) -> bool:
        done, self.done = self.done, []
        for result, then in done:
            then(result, 0.0)
        return bool(done)


class Device:
    """Pages whose bytes are the beginning of their digests."""

    def __init__(self) -> None:
        self.bytes = np.zeros((PAGES, PAGE_BYTES), dtype=np.uint8)

    def copy_out(self, pages: Sequence[int], to: Sequence[npt.NDArray[np.uint8]]) -> None:
        for page, there in zip(pages, chain.from_iterable(to), strict=True):
            np.copyto(there, self.bytes[page])


def digests_of(tokens: list[int]) -> list[bytes]:
    found, parent = list[bytes](), root_digest(None)
    for at in range(0, len(tokens) // PAGE_SIZE * PAGE_SIZE, PAGE_SIZE):
        parent = block_hash(parent, tokens[at : at + PAGE_SIZE])
        found.append(parent)
    return found


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree, self.pool, self.jobs, self.device = RadixCache(PAGE_SIZE), PagePool(PAGES), Jobs(), Device()
        self.form = PageFormat(b"f" * 16, PAGE_BYTES)
        slab = Slab(SLOTS, PAGE_BYTES, torch.device("cpu"))
        store = PageStore(self.form, HostTier(SLOTS), slab, None, self.jobs, self.tree.events)
        self.tiers = Tiers(
            self.tree,
            self.pool,
            store,
            self.jobs,
            LoadRates(lambda: 0.0, PAGE_SIZE),
            kv_pool=lambda: cast(KVPool, self.device),
            clock=lambda: self.now,
        )
        self.host = store.host
        self.lent: list[list[bytes]] = []
        """Pages that a copy for a peer may read."""
        lend = store.lend

        def watched(digests: Sequence[bytes], then: Callable[[list[int], memoryview], None]) -> None:
            there = list(takewhile(self.host.has, digests))
            self.lent.append(there)

            def ended(checksums: list[int], data: memoryview) -> None:
                self.lent.remove(there)
                then(checksums, data)

            lend(digests, ended)

        store.lend = watched  # type: ignore[method-assign]
        self.now = 0.0
        self.asked = Counter[int]()
        self.answered = Counter[int]()

    prompts = st.tuples(st.integers(0, 1), st.integers(9, 50), st.integers(0, 1)).map(
        lambda drawn: [drawn[0], *range(drawn[1]), 200 + drawn[2]]
    )
    """Prompts of two families that share their beginnings."""

    def forget(self, count: int) -> None:
        freed = self.tree.evict(count)
        self.pool.free(freed)
        self.device.bytes[freed] = 0xEE

    # ---- the engine ---------------------------------------------------------------------------------------

    @rule(tokens=prompts)
    def compute(self, tokens: list[int]) -> None:
        digests = digests_of(tokens)
        self.forget(max(0, len(digests) - self.pool.num_free))
        if len(digests) > self.pool.num_free:
            return
        pages = self.pool.alloc(len(digests))
        existing, node = self.tree.insert(key_of(tokens), pages, prompt_tokens=len(tokens))
        for page, digest in zip(pages[existing:], digests[existing:], strict=True):
            self.device.bytes[page] = list(digest[:PAGE_BYTES])
        self.pool.free(pages[:existing])
        assert node is not None
        self.tiers.inserted(node, 0, existing)

    @rule(count=st.integers(1, PAGES))
    def evict(self, count: int) -> None:
        self.forget(count)

    @rule(seconds=st.sampled_from([0.0, LATE_S / 2, LATE_S]))
    def step(self, seconds: float) -> None:
        self.now += seconds
        self.tiers.take()

    @precondition(lambda self: self.jobs.begun)
    @rule(which=st.integers(0, 9), fails=st.sampled_from([False, False, False, True]))
    def a_copy_is_done(self, which: int, fails: bool) -> None:
        self.jobs.run(which, fails=fails)

    def settle(self) -> None:
        while self.jobs.busy.total():
            while self.jobs.begun:
                self.jobs.run(0)
            self.jobs.take()

    @rule()
    def flush(self) -> None:
        """Or sleep: both wait for copies."""
        self.settle()
        freed = self.tree.reset()
        self.pool.free(freed)
        self.device.bytes[freed] = 0xEE
        self.tiers.clear()

    @rule(name=st.sampled_from([b"f", b"g"]))
    def update_weights(self, name: bytes) -> None:
        self.flush()
        self.form = PageFormat(name * 16, PAGE_BYTES)
        self.tiers.renew(self.form)

    # ---- its peers ----------------------------------------------------------------------------------------

    @rule(tokens=prompts, number=st.integers(0, 3), turned=st.booleans(), stale=st.sampled_from([False, False, True]))
    def ask_for_pages(self, tokens: list[int], number: int, turned: bool, stale: bool) -> None:
        """Also twice, in a wrong order, or as computed by other weights. Some peers die before their answer."""
        form, digests = self.form, digests_of(tokens)[:: -1 if turned else 1]
        fingerprint = b"x" * 16 if stale else form.fingerprint
        self.asked[number] += 1

        def tell(answer: Any, data: Any) -> None:
            assert isinstance(answer, Pages)
            self.answered[answer.number] += 1
            assert len(data) == PAGE_BYTES * len(answer.checksums)
            assert not (stale and answer.checksums)
            for i, checksum in enumerate(answer.checksums):
                page = bytes(data[i * PAGE_BYTES : (i + 1) * PAGE_BYTES])
                assert page == digests[i][:PAGE_BYTES], "a page was changed while it was read"
                assert checksum == form.checksum(digests[i], memoryview(page))

        self.tiers.lending.ask(GetRequest(fingerprint, digests, number), tell)

    @rule(tokens=prompts)
    def ask_how_many(self, tokens: list[int]) -> None:
        digests, found = digests_of(tokens), list[int]()
        self.tiers.lending.ask(
            HaveRequest(self.form.fingerprint, digests), lambda answer, _: found.append(cast(Held, answer).count)
        )
        while not found:
            self.tiers.take()
        here = [one in self.host or self.tree.find(one) is not None for one in digests]
        assert found == [[*here, False].index(False)]

    # ---- invariants ---------------------------------------------------------------------------------------

    @invariant()
    def every_page_and_slot_has_one_owner(self) -> None:
        self.host.check_integrity()
        self.tree.check_integrity()
        assert self.pool.num_free + self.tree.num_pages == PAGES
        assert all(self.host._entries[digest].readers for there in self.lent for digest in there)
        assert all(self.answered[number] <= self.asked[number] for number in self.answered)

    def teardown(self) -> None:
        while self.answered != self.asked:
            self.now += LATE_S
            self.tiers.take()
            self.settle()
        self.settle()
        assert self.tree.locked_pages == 0
        self.flush()


def test_a_peer_that_names_pages_in_a_wild_order_begins_few_copies() -> None:
    made = Machine()
    prompts = [[family, *range(40), 200] for family in (0, 1)]
    for tokens in prompts:
        made.compute(tokens)
    named = [*chain.from_iterable(zip(*map(digests_of, prompts), strict=True))]
    made.tiers.lending.ask(HaveRequest(made.form.fingerprint, named, coming=True), lambda *_: None)
    made.tiers.take()
    assert len(made.jobs.begun) <= 2


def test_a_step_takes_few_requests_that_name_many_pages() -> None:
    made, told = Machine(), list[object]()
    made.compute([0, *range(40), 200])
    named = digests_of([0, *range(40)])[:1] * MOST_DIGESTS
    for _ in range(16):
        made.tiers.lending.ask(HaveRequest(made.form.fingerprint, named), lambda answer, _: told.append(answer))
    made.tiers.take()
    assert 0 < len(told) <= 4
    while len(told) < 16:
        assert made.tiers.take()


TestLending = Machine.TestCase
TestLending.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
