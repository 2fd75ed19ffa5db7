"""Owns all pages: the free list, the radix tree, and what requests hold, with rows and slots of adapters.

    page table of a request:   | in the tree, locked | its own                   |
    in tokens:                 0 …               tree_len …      num_pages x page_size

Invariant: free + in the tree + held by requests = all pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.kvcache import Match, PagePool, Pages, RadixCache, key_of, salted_key_of
from treeline_runtime.scheduler.slots import AdapterSlots
from treeline_runtime.scheduler.table import TableManager

if TYPE_CHECKING:
    from treeline_runtime.scheduler.tiers import Tiers

MIN_SHARED_TOKENS = 32
"""The fewest tokens being filled that a request waits a step for."""


class CacheManager:
    """Moves pages between free list, tree and requests."""

    def __init__(
        self, config: SchedulerConfig, num_pages: int, table: TableManager, *, takes_items: bool = False
    ) -> None:
        self.page_size = config.page_size
        self.pool = PagePool(num_pages)
        self.tree = RadixCache(config.page_size, config.eviction_policy, salted=takes_items)
        self._salted = takes_items
        self.keeps = config.prefix_cache != "off"
        """Whether anything gets into the tree."""
        self.slots = AdapterSlots(config.max_loras)
        self._table = table
        self.tiers: Tiers | None = None
        """What is kept below the device, and copied there or back."""

    @property
    def available_pages(self) -> int:
        """Pages that `extend` can hand out, with evictions."""
        return self.pool.num_free + self.tree.evictable_pages

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    # ---- admission ----------------------------------------------------------------------------------------

    def key_of(self, req: Req) -> bytes:
        """The key of all its tokens."""
        if not self._salted:
            return key_of(req.tokens)
        items = () if req.media is None else req.media.items
        return salted_key_of(req.tokens, self.page_size, ((item.start, item.digest) for item in items))

    def match(self, req: Req) -> Match:
        """Finds the cached prefix of a waiting request. Changes nothing."""
        found = self.tree.match(req.key, req.namespace, req.cacheable_len)
        if req.media is not None:
            while (end := req.media.uncut(matched := found.num_pages * self.page_size)) < matched:
                found = self.tree.match(req.key, req.namespace, end)
        return found

    def waits(self, match: Match) -> bool:
        """Whether the request should wait because others are filling enough beyond its match."""
        return match.coming * self.page_size >= MIN_SHARED_TOKENS

    @property
    def loading(self) -> list[Req]:
        """Waiting requests, or some that have ended, for which pages of the device were taken."""
        return [] if self.tiers is None else self.tiers.loads.reqs

    def load(self, req: Req, match: Match) -> bool:
        """Begins to load what the tiers below the device have of a request that would be admitted now. False: there is
        nothing to wait for."""
        return self.keeps and self.tiers is not None and self.tiers.load(req, match)

    def admit(self, req: Req, match: Match) -> None:
        """Gives `req` a row and its adapter a slot, locks its match, which must be fresh, and marks the rest of its
        prompt as being filled by it, until that is in the tree or `end_filling`."""
        if req.adapter is not None:
            req.slot = self.slots.take(req.adapter, req.client)
        if req.media is None:
            req.row = self._table.alloc(req.tokens)
        else:
            req.row = self._table.alloc(req.media.shown(req.tokens), req.media.delta)
        req.handle = self.tree.lock(match, req.priority)
        req.num_pages = match.num_pages
        req.tree_len = req.kv_len = req.device_len = match.num_pages * self.page_size
        if req.handle is not None:
            pages = self.tree.pages_of(self.tree.whole(req.handle))
            self._table.write_pages(req.row, 0, pages)
            if self.tiers is not None:
                self.tiers.hit(req.handle, pages)
        if self.keeps:
            req.handle = self.tree.begin_filling(req.handle, req.key, req.namespace)

    def end_filling(self, req: Req) -> None:
        """Removes the mark that this request is filling its prompt. Idempotent."""
        req.handle = self.tree.end_filling(req.handle)

    # ---- while running ------------------------------------------------------------------------------------

    def missing_pages(self, req: Req, end: int) -> int:
        """Pages that `req` needs to hold `end` tokens."""
        return max(self.pages_for(end) - req.num_pages, 0)

    def extend(self, req: Req, end: int) -> None:
        """Makes room for `end` tokens. The caller checked `available_pages`."""
        missing = self.missing_pages(req, end)
        if missing == 0:
            return
        shortage = missing - self.pool.num_free
        if shortage > 0:
            self.pool.free(self.tree.evict(shortage))
        self._table.write_pages(req.row, req.num_pages, self.pool.alloc(missing))
        req.num_pages += missing

    def cache_unfinished(self, req: Req) -> None:
        """Inserts computed whole pages and moves the lock there, unless it extends further, to pages being filled.

        Pages that the tree already had replace the request's copies, which are freed, or deferred while a launched
        batch may read them.
        """
        if not self.keeps:
            return
        total = req.kv_len // self.page_size
        held = req.tree_len // self.page_size
        if total <= held:
            return
        own = self._table.pages[req.row, :total]
        key = self.key_of(req) if self._salted else key_of(req.tokens)  # a call less in every chat
        existing, node = self.tree.insert(
            key[: total * self.tree.page_bytes],
            own,
            prompt_tokens=req.prompt_len,
            namespace=req.namespace,
            priority=req.priority,
        )
        assert node is not None
        assert existing >= held, f"locked pages left the tree under {req}"
        if existing > held:
            duplicates = own[held:existing].copy()
            self._table.write_pages(req.row, 0, self.tree.pages_of(self.tree.whole(node)))
            self._discard(req, duplicates)
        if self.tree.depth(req.handle) < total:
            self.tree.lock_node(node)
            self.tree.unlock(req.handle)
            req.handle = node
        req.tree_len = total * self.page_size
        if self.tiers is not None and not req.needs_all:
            self.tiers.inserted(node, held, existing)

    def _discard(self, req: Req, pages: Pages) -> None:
        if req.in_flight:
            req.deferred.append((req.in_flight, pages))
        else:
            self.pool.free(pages)

    def batch_done(self, req: Req) -> None:
        """A launched batch with `req` is processed: frees duplicates that are no longer read."""
        deferred, req.deferred = req.deferred, []
        for batches, pages in deferred:
            if batches > 1:
                req.deferred.append((batches - 1, pages))
            else:
                self.pool.free(pages)

    def told(self) -> None:
        """A step with the news of table and slots was launched."""
        self._table.told()
        if self.slots.news:
            self.slots.told()

    # ---- the end ------------------------------------------------------------------------------------------

    def release(self, req: Req, *, insert: bool) -> Pages:
        """Takes row, pages and lock from `req`, which may not be in flight. With `insert`, its computed pages stay
        cached. Returns the freed pages.
        """
        assert req.in_flight == 0, f"release while in flight: {req}"
        assert req.row >= 0, f"released twice: {req}"
        if insert:
            self.cache_unfinished(req)
        own = self._table.pages[req.row, req.tree_len // self.page_size : req.num_pages]
        freed = np.concatenate([own, *(pages for _, pages in req.deferred)])
        self.pool.free(freed)
        req.deferred.clear()
        self.tree.unlock(req.handle)
        req.handle = None
        self._table.free(req.row)
        if req.adapter is not None:
            self.slots.release(req.adapter, req.client)
        req.row = req.slot = -1
        req.num_pages = req.tree_len = req.kv_len = req.device_len = 0
        return freed

    def flush(self) -> None:
        """Empties the tree; no request or copy may hold a lock."""
        self.pool.free(self.tree.reset())

    def wipe(self) -> None:
        """Empties the tree and all tiers below it."""
        self.flush()
        if self.tiers is not None:
            self.tiers.clear()

    # ---- watching -----------------------------------------------------------------------------------------

    def load_fields(self, audited: int) -> dict[str, Any]:
        """What LoadUpdate has of it and its tiers. audited: pages that an audit holds, which are not in use."""
        cached = self.tree.evictable_pages
        used = self.pool.num_pages - self.pool.num_free - cached - audited
        return {
            "pages_used": used,
            "pages_cached": cached,
            "pages_total": self.pool.num_pages,
            "page_size": self.page_size,
            "tokens_used": used * self.page_size,
            "resident": self.slots.resident,
            **({} if self.tiers is None else self.tiers.load_fields()),
        }

    def held_pages(self, req: Req) -> int:
        return req.num_pages - req.tree_len // self.page_size + sum(len(pages) for _, pages in req.deferred)

    def is_balanced(self, held: int = 0) -> bool:
        held += 0 if self.tiers is None else self.tiers.loads.held_pages
        return self.pool.num_free + self.tree.num_pages + held == self.pool.num_pages

    def check_integrity(self, reqs: Iterable[Req]) -> None:
        """Asserts that every page has exactly one owner; `reqs` are all with a row."""
        reqs = list(reqs)
        self.pool.check_integrity()
        self.tree.check_integrity()
        self.slots.check_integrity()
        if self.tiers is not None:
            self.tiers.store.host.check_integrity()
        held = sum(self.held_pages(r) for r in reqs)
        free, cached, total = self.pool.num_free, self.tree.num_pages, self.pool.num_pages
        assert self.is_balanced(held), f"{free} free + {cached} cached + {held} held pages are not {total}"
        if not reqs and (self.tiers is None or not self.tiers.is_copying):
            assert self.tree.locked_pages == 0, f"{self.tree.locked_pages} pages locked by nobody"
        used = self._table.num_rows - self._table.num_free
        assert len(reqs) == used, f"{used} rows used by {len(reqs)} requests"
