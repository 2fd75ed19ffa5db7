"""The cache's tiers below the device: what is stored there, and when it is brought back.

A page is stored at its second use: computed once and matched once, or computed twice. Uses count across evictions, for
a bounded number of evicted pages: a page that left between two uses is found at the third.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch
from treeline_wire.events import block_hash, root_digest

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.kvcache import KVPool, Match, Node, PagePool, Pages, RadixCache
from treeline_runtime.kvcache.disk import DiskTier
from treeline_runtime.kvcache.host import HostTier, Slab
from treeline_runtime.kvcache.page import PageFormat
from treeline_runtime.kvcache.remote import RemotePages
from treeline_runtime.kvcache.store import Lower, PageStore, Reading, Workers
from treeline_runtime.messages import TierLoad
from treeline_runtime.scheduler.administration import Residence
from treeline_runtime.scheduler.cache import MIN_SHARED_TOKENS, CacheManager
from treeline_runtime.scheduler.lending import Lending
from treeline_runtime.scheduler.loads import Load, Loads
from treeline_runtime.scheduler.rates import LoadRates
from treeline_runtime.scheduler.reports import SchedulerStats
from treeline_runtime.scheduler.resolve import Resolved, told_as_settings

REMEMBERED = 4
"""Evicted pages that are remembered for each slot of the host."""
LEAST_REMEMBERED = 1024
SETTLE_S = 3.0
"""Time for copies to end before a flush or sleep, which they take only if a disk hangs."""


class Tiers:
    """Decides, counts, and owns all copies between the device and the host."""

    def __init__(
        self,
        tree: RadixCache,
        pool: PagePool,
        store: PageStore,
        workers: Workers,
        rates: LoadRates,
        *,
        kv_pool: Callable[[], KVPool],
        clock: Callable[[], float],
    ) -> None:
        """kv_pool: the device's memory as it is now."""
        self._tree = tree
        self.store = store
        self._workers = workers
        self.rates = rates
        self._kv_pool = kv_pool
        self._clock = clock
        self._used_once: OrderedDict[bytes, None] = OrderedDict()
        """Evicted pages that are not stored, the oldest first."""
        self._most_remembered = max(REMEMBERED * store.host.num_slots, LEAST_REMEMBERED)
        self._copying_out = 0
        self.lending = Lending(tree, store, self._put)
        self.remote: RemotePages | None = None
        """Other runtimes; None: they are not asked."""
        self._peers_off = False
        self.loads = Loads(tree, pool, self._start, self._ended)
        self._load_seconds = 0.0
        self._outcomes = Counter[str](loaded=0, computed=0, failed=0)
        """What became of loads, as in `TierLoad.total_loads`."""
        tree.on_evicted = self._evicted

    # ---- out ----------------------------------------------------------------------------------------------

    def hit(self, node: Node | None) -> None:
        """A request uses the cached pages up to `node`."""
        if node is not None:
            digests, pages = self._tree.digests_of(node), self._tree.pages_of(self._tree.whole(node))
            self.store.touch(digests)
            self._put(node, digests, pages)

    def inserted(self, node: Node, start: int, existing: int) -> None:
        """A request computed the pages from `start` to the end of `node`; those before `existing` were cached."""
        digests = self._tree.digests_of(node)
        again = [i for i in range(start, len(digests)) if i < existing or digests[i] in self._used_once]
        for i in again:
            self._used_once.pop(digests[i], None)
        if again:
            pages = self._tree.pages_of(self._tree.whole(node))
            self._put(node, [digests[i] for i in again], pages[again])

    def _put(self, node: Node, digests: Sequence[bytes], pages: Pages) -> None:
        def copied() -> None:
            self._copying_out -= 1
            self._tree.unlock(node)

        if self.store.put(self._kv_pool(), digests, pages, copied):
            self._copying_out += 1
            self._tree.lock_node(node)

    def _evicted(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            if self.store.where(digest) is None:
                self._used_once[digest] = None
                if len(self._used_once) > self._most_remembered:
                    self._used_once.popitem(last=False)

    # ---- back ---------------------------------------------------------------------------------------------

    def load(self, req: Req, match: Match) -> bool:
        """Begins to load what follows the match of a waiting request that would be admitted now. False: it is not
        loaded, and has to be computed."""
        if req.loaded:
            return False
        wanted = self._following(req, match)
        if (more := self._at_peer(req, match.num_pages + len(wanted))) is None:
            return True
        wanted |= dict.fromkeys(more, "PEER")
        if len(wanted) * self._tree.page_size < MIN_SHARED_TOKENS:
            return False
        req.loaded = True
        allowed = {medium: medium == "PEER" or self.rates.allows(medium) for medium in dict.fromkeys(wanted.values())}
        digests = list[bytes]()
        for digest, medium in wanted.items():
            if not allowed[medium]:
                break
            digests.append(digest)
        self._outcomes["computed"] += not digests
        return bool(digests) and self.loads.begin(req, match, digests, self._clock())

    def _following(self, req: Req, match: Match) -> dict[bytes, Lower]:
        """The digests of the stored pages that follow a match, in order, with their tiers."""
        size, at = self._tree.page_size, match.num_pages
        if len(req.digests) < at:
            above = self._tree.digests_of(match.node)
            req.digests = above[:at]
        found = dict[bytes, Lower]()
        while (at + 1) * size <= req.cacheable_len:
            self._extend_digests(req, at)
            medium = self.store.where(req.digests[at])
            if medium is None:
                break
            found[req.digests[at]] = medium
            at += 1
        return found

    def _extend_digests(self, req: Req, at: int) -> None:
        """Makes sure that the digest of its page `at` is known; those before it are."""
        if at == len(req.digests):
            size, parent = self._tree.page_size, req.digests[-1] if req.digests else root_digest(req.namespace)
            req.digests.append(block_hash(parent, req.tokens[at * size : (at + 1) * size]))

    def _at_peer(self, req: Req, at: int) -> Sequence[bytes] | None:
        """The digests of its pages from `at` on that another runtime has; None: it is being asked."""
        there, size = req.remote, self._tree.page_size
        if self.remote is None or there is None or self._peers_off:
            return ()
        end = req.cacheable_len // size
        if there.asked is None:
            may = self.remote.may_ask(there.address) and self.rates.allows("PEER")
            if not may or (end - at) * size < MIN_SHARED_TOKENS:
                req.remote = None
                return ()
            for page in range(at, end):
                self._extend_digests(req, page)
            there.asked = req.digests[at:]
            ask = partial(self.remote.have, there.address, self.store.form, there.asked)
            self._workers.start(ask, there.answer, asks_peer=True)
        if there.count is None:
            return None
        return list(takewhile(set(there.asked[: there.count]).__contains__, req.digests[at:end]))

    def _start(
        self, req: Req, digests: Sequence[bytes], pages: Pages, then: Callable[[Reading], None]
    ) -> Reading | None:
        pull = None
        if self.remote is not None and req.remote is not None:
            pull = partial(self.remote.pull, req.remote.address, self.store.form)
            req.remote = None
        return self.store.get(self._kv_pool(), digests, pages, then, pull)

    def _ended(self, load: Load, seconds: float) -> None:
        reading = load.reading
        self._outcomes["loaded" if reading.count == len(load.pages) else "failed"] += 1
        self._load_seconds += seconds
        if "PEER" in reading.pages:
            load.req.loaded_from = "PEER"
        total = sum(reading.seconds.values())
        for medium, spent in reading.seconds.items():  # several threads spend more than passes
            self.rates.on_load(medium, reading.pages[medium], seconds * spent / total)

    # ---- all ----------------------------------------------------------------------------------------------

    def take(self) -> bool:
        """Takes what copies have done. Returns whether that may change what can be computed."""
        arrived, now = self._workers.take(), self._clock()
        asked, stalled = self.lending.step(now), self.loads.check(now)
        return arrived or asked or stalled

    def settle(self) -> bool:
        """Waits a moment for all copies to end. Returns whether they have."""
        deadline = time.monotonic() + SETTLE_S
        while self.is_copying and (left := deadline - time.monotonic()) > 0:
            self._workers.take(left)
        return not self.is_copying

    @property
    def is_copying(self) -> bool:
        """Whether anything is read or written by a copy, here or on the disk."""
        return self._workers.busy > 0

    @property
    def is_expecting(self) -> bool:
        """Whether pages of the device will soon be free or in the tree that are not now."""
        return self._copying_out > 0 or self.loads.is_expecting

    def load_report(self) -> TierLoad:
        store, size = self.store, self._tree.page_size
        host, disk, stats = store.host, store.disk, store.stats
        return TierLoad(
            host_pages=host.num_pages,
            host_bytes=host.num_pages * store.page_bytes,
            disk_pages=0 if disk is None else disk.num_pages,
            disk_bytes=0 if disk is None else disk.num_bytes,
            total_stored_tokens={medium: pages * size for medium, pages in stats.stored_pages.items()},
            total_loaded_tokens={medium: pages * size for medium, pages in stats.loaded_pages.items()},
            total_loads=dict(self._outcomes),
            total_load_seconds=self._load_seconds,
            total_skipped_tokens=stats.skipped_pages * size,
            total_bad_pages=stats.bad_pages,
            total_failures=stats.failures,
            total_sent_tokens=stats.sent_pages * size,
            fingerprint=store.form.fingerprint.hex(),
        )

    def switch_peers(self, *, off: bool) -> None:
        """Other runtimes are not asked while they are off, and all that may have come from them is forgotten. Nothing
        may be copied."""
        self._peers_off = off
        if off:
            self.clear()

    def clear(self) -> None:
        """Forgets all pages. Nothing may be copied."""
        self.store.clear()
        self._used_once.clear()

    def renew(self, form: PageFormat) -> None:
        """The weights may have changed: nothing of others is ever found. Nothing may be copied."""
        self.store.renew(form)
        self._used_once.clear()

    def close(self) -> None:
        self.store.close()


def open_tiers(
    config: SchedulerConfig,
    limits: Resolved,
    cache: CacheManager,
    residence: Residence,
    stats: SchedulerStats,
    wake: Callable[[], None],
    clock: Callable[[], float],
) -> Tiers | None:
    """The tiers that the settings ask for. Raises ConfigError."""
    if not limits.host_pages:
        return None
    form = residence.page_format()
    with told_as_settings(f"--host-cache {config.host_cache}", torch.device("cpu"), hint="make it smaller"):
        slab = Slab(limits.host_pages, form.nbytes, limits.device)
    disk = None
    if config.disk_cache is not None:
        disk = DiskTier(Path(config.disk_cache), config.disk_cache_size, form)
    workers = Workers(wake)
    store = PageStore(form, HostTier(limits.host_pages), slab, disk, workers, cache.tree.events)
    rates = LoadRates(lambda: stats.prefill_tokens_per_s, limits.page_size)
    return Tiers(cache.tree, cache.pool, store, workers, rates, kv_pool=lambda: residence.executor.pool, clock=clock)
