"""The cache's tiers below the device, and peers: what is stored there, and when it is brought back.

A page is stored at its second use: computed once and matched once, or computed twice. Uses count across evictions, for
a bounded number of evicted pages: a page that left between two uses is found at the third.

A waiting request that would be admitted first waits for pages of the disk, and after them of a peer, to come to the
host, a bounded piece at a time, and then for the host's to come to the device. Each page is asked for once, so this
ends, whatever fails: the request computes what is missing. A piece that takes too long is waited for no more, and as
long as the disk or the peer does not answer, nothing else is asked of it. A peer that computes the prompt is asked
again as long as pages come.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from treeline_wire.events import root_digest
from treeline_wire.pages import MOST_DIGESTS

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import ANSWER_S, Remote, Req
from treeline_runtime.kvcache import KVPool, Match, Node, PagePool, Pages, RadixCache, tokens_of
from treeline_runtime.kvcache.disk import DiskTier
from treeline_runtime.kvcache.host import HostTier, Lower
from treeline_runtime.kvcache.page import PageFormat
from treeline_runtime.kvcache.store import FETCH_BYTES, Fetch, Moved, PageStore, nowhere
from treeline_runtime.kvcache.workers import Workers
from treeline_runtime.published import TierLoad
from treeline_runtime.scheduler.administration import Residence
from treeline_runtime.scheduler.cache import MIN_SHARED_TOKENS, CacheManager
from treeline_runtime.scheduler.launched import Launched
from treeline_runtime.scheduler.lending import Lending
from treeline_runtime.scheduler.loads import Load, Loads
from treeline_runtime.scheduler.ranks.group import Followers
from treeline_runtime.scheduler.ranks.protocol import Share
from treeline_runtime.scheduler.rates import LoadRates
from treeline_runtime.scheduler.reports import SchedulerStats
from treeline_runtime.scheduler.resolve import Resolved

REMEMBERED = 4
"""Evicted pages that are remembered for each slot of the host."""
STALLED_S = 5.0
"""The longest time that requests wait for a piece from the disk or a peer …"""
LAGS_S = 1.0
"""… and for one from a peer which could be computed sooner."""
MOST_QUESTIONS = 8
"""A peer is asked which pages it has, and for those of a client, so often at once: one that hangs leaves threads to
others."""
LOOK_S = 0.001
"""While the device computes prompts, peers' questions and ended copies wait no longer."""
SETTLE_S = 3.0
"""Time for copies to end before a flush or sleep, which they take only if a disk or a rank hangs."""


class Tiers:
    """Decides, counts, and owns all copies between the device, the host, the disk and peers."""

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
        self._most_remembered = REMEMBERED * store.host.num_slots
        self._piece = max(1, FETCH_BYTES // store.form.nbytes)
        """Pages that a client may have on their way from the disk, and from each peer."""
        self._fetches: dict[Fetch, Req] = {}
        """With who began it."""
        self._questions = Counter[str]()
        """By peer, those without an answer."""
        self._in_line = defaultdict[str, dict[str | None, deque[tuple[Req, Remote, Sequence[bytes]]]]](dict)
        """By peer, further ones of each client, in the order of their turns."""
        self.lending = Lending(tree, store, self._put)
        self.loads = Loads(tree, pool, lambda *of: store.get(kv_pool(), *of), self._loaded)
        self._outcomes = Counter[str](loaded=0, computed=0, failed=0)
        """As in `TierLoad.total_loads`."""
        tree.on_evicted = self._evicted

    # ---- out ----------------------------------------------------------------------------------------------

    def hit(self, node: Node, pages: Pages) -> None:
        """A request uses these cached pages, which end with `node`."""
        digests = self._tree.digests_of(node)
        self.store.host.touch(digests)
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
        if self.store.put(self._kv_pool(), digests, pages, lambda: self._tree.unlock(node)):
            self._tree.lock_node(node)

    def _evicted(self, digests: Sequence[bytes]) -> None:
        store = self.store
        for digest in digests:
            if digest not in store.host and not (store.disk is not None and store.disk.has(digest)):
                self._used_once[digest] = None
                if len(self._used_once) > self._most_remembered:
                    self._used_once.popitem(last=False)

    # ---- back ---------------------------------------------------------------------------------------------

    def load(self, req: Req, match: Match) -> bool:
        """Begins to bring what follows the match of a waiting request that would be admitted now. True: it has to wait.
        False: the rest has to be computed."""
        if "CPU" in self.store.off:
            return False
        here = self._following(req, match, match.num_pages, self.store.host.has, most=len(req.tokens))
        if self._fetches_more(req, match, here):
            return True
        if req.loaded or not here or len(here) * self._tree.page_size < MIN_SHARED_TOKENS:
            return False
        req.loaded = True
        if not self.rates.allows("CPU"):
            self._outcomes["computed"] += 1
            return False
        self.loads.begin(req, match, here)
        return True

    def _following(self, req: Req, match: Match, at: int, has: Callable[[bytes], bool], most: int) -> list[bytes]:
        """The digests of at most so many pages from `at` on, at or after the end of the match, while `has` is true."""
        size, width, found = self._tree.page_size, self._tree.page_bytes, list[bytes]()
        if len(req.digests) < match.num_pages:
            req.digests = self._tree.digests_of(match.node)[: match.num_pages]
        while len(found) < most and (at + 1) * size <= req.cacheable_len:
            if at == len(req.digests):
                parent = req.digests[-1] if req.digests else root_digest(req.namespace)
                req.digests.append(self._tree.digest_of(parent, tokens_of(req.key[at * width : (at + 1) * width])))
            if not has(req.digests[at]):
                break
            found.append(req.digests[at])
            at += 1
        return found

    def _fetches_more(self, req: Req, match: Match, here: Sequence[bytes]) -> bool:
        """Whether more pages come to the host, after those which are `here`; may begin to fetch them."""
        at = match.num_pages + len(here)
        for digest in self._following(req, match, at, lambda _: True, most=1):
            if (fetch := next((fetch for fetch in self._fetches if digest in fetch.digests), None)) is not None:
                if fetch.limit_s > STALLED_S and req.remote is None:  # others have the patience, it has not
                    return not fetch.over and self._clock() - fetch.began_at < STALLED_S
                req.fetch = fetch
                return not fetch.over
        if at < req.fetched:
            return False
        peer, wanted = None, self._on_disk(req, match, at)
        if not wanted and (peer := req.remote) is not None:
            wanted = self._at_peer(req, peer, match, at)
            if req.awaits_pages(self._clock()):
                return True
        address, within_s = (None, 0.0) if peer is None else (peer.address, peer.within_s)
        few = (len(here) + len(wanted)) * self._tree.page_size < MIN_SHARED_TOKENS
        if not wanted or (few and not within_s):
            return False
        own = [fetch for fetch in self._fetches if (fetch.client, fetch.peer) == (req.client, address)]
        many = peer is not None and len(own) >= MOST_QUESTIONS
        if own and (many or sum(len(fetch.digests) for fetch in own) + len(wanted) > self._piece):
            req.fetch = own[0]  # then it is asked again
            return True
        req.fetched = at + len(wanted)
        page_s = inf if peer is None or within_s else self.rates.page_s()
        limit_s = min(max(STALLED_S, within_s), max(LAGS_S, len(wanted) * page_s))
        fetch = Fetch(dict.fromkeys(wanted), req.client, self._clock(), limit_s, address, page_s)
        if not within_s and not self.rates.allows(address or "DISK"):
            self._outcomes["computed"] += 1
            req.fetched = len(req.tokens)
            return False
        # a peer that computes gives a part when it is done: only the end of a prompt shows how fast it is
        measured = not within_s or req.fetched * self._tree.page_size + MIN_SHARED_TOKENS > req.cacheable_len
        if not self.store.fetch(fetch, here, partial(self._fetched, fetch, measured)):
            return False
        req.fetch = fetch
        self._fetches[fetch] = req
        return True

    def _answers(self, peer: str | None) -> bool:
        """Whether nothing that was to come from there, None: the disk, takes too long."""
        return not any(fetch.over and fetch.peer == peer for fetch in self._fetches)

    def _on_disk(self, req: Req, match: Match, at: int) -> Sequence[bytes]:
        """Pages from `at` on to fetch from there."""
        host, disk = self.store.host, self.store.disk
        if disk is None or not self.store.uses("DISK") or not self._answers(None):
            return ()
        return self._following(req, match, at, lambda one: disk.has(one) and one not in host, self._piece)

    def _at_peer(self, req: Req, peer: Remote, match: Match, at: int) -> Sequence[bytes]:
        """Pages from `at` on to fetch from another runtime; asks which it has, if that is not known."""
        store, address, host = self.store, peer.address, self.store.host
        usable = store.remote is not None and store.uses("PEER") and store.remote.may_ask(address)
        if not usable or not self._answers(address):
            req.remote = None
            return ()
        wanted = self._following(req, match, at, lambda one: one in peer.held and one not in host, self._piece)
        asks = not wanted and self._clock() < peer.until
        asked = self._following(req, match, at, lambda _: asks, MOST_DIGESTS)
        if len(asked) * self._tree.page_size >= MIN_SHARED_TOKENS:
            peer.is_asked, peer.until = True, min(peer.until, self._clock() + (peer.within_s or ANSWER_S))
            self._in_line[address].setdefault(req.client, deque()).append((req, peer, asked))
            self._ask(address)
        return wanted

    def _ask(self, address: str) -> None:
        """Asks a peer the next questions, as many as may be without an answer."""
        line = self._in_line[address]
        while line and self._questions[address] < MOST_QUESTIONS:
            own = line.pop(client := next(iter(line)))
            req, peer, digests = own.popleft()
            if own:
                line[client] = own
            if self._asks(req, peer):
                self._begin_to_ask(req, peer, digests)
        if not line:
            del self._in_line[address]

    def _asks(self, req: Req, peer: Remote) -> bool:
        """Whether a request still waits for what a peer says."""
        return req.finish is None and req.remote is peer and req.awaits_pages(self._clock())

    def _begin_to_ask(self, req: Req, peer: Remote, digests: Sequence[bytes]) -> None:
        address, remote = peer.address, self.store.remote
        assert remote is not None

        def answered(held: list[bytes | None], _seconds: float) -> None:
            self._questions -= Counter([address])
            peer.is_asked, peer.held = False, frozenset(one for one in held if one is not None)
            if peer.held or not peer.within_s:
                peer.until = inf if peer.within_s else -inf
            self._ask(address)

        self._questions[address] += 1
        wanted = partial(self._asks, req, peer)
        have = partial(remote.have, address, self.store.form, coming=peer.within_s > 0, wanted=wanted)
        self._workers.start("ask", [digests], have, answered)

    def _fetched(self, fetch: Fetch, measured: bool, moved: Moved) -> None:
        del self._fetches[fetch]
        fetch.over = True
        if measured:
            for place in {fetch.source, fetch.peer or fetch.source}:
                self.rates.on_load(place, moved)

    def _loaded(self, load: Load, moved: Moved) -> None:
        self._outcomes["loaded" if moved.pages == len(load.pages) else "failed"] += 1
        self.rates.on_load("CPU", moved)
        if moved.pages:
            load.req.loaded_from = moved.source

    # ---- all ----------------------------------------------------------------------------------------------

    def take(self, wait_s: float = 0.0) -> bool:
        """Takes what copies have done, or waits so long for one. Returns whether that may change what can be
        computed."""
        changed, now = self._workers.take(wait_s), self._clock()
        changed |= self.lending.step(now)
        for fetch, req in self._fetches.items():
            limit_s = fetch.limit_s if req.finish is None else STALLED_S
            if not fetch.over and now - fetch.began_at >= limit_s:
                fetch.over = changed = True
                self._outcomes["failed"] += 1
        return changed

    def take_until(self, launched: Launched) -> None:
        """Goes on with copies until a step is done: one of prompts is long, and peers want the pages of that before."""
        while not launched.is_done:
            self.take(LOOK_S)

    def settle(self) -> bool:
        """Waits a moment for all copies to end. Returns whether they have."""
        deadline = time.monotonic() + SETTLE_S
        for fetch in self._fetches:
            fetch.over = True  # nobody waits for it
        while self.is_copying and (left := deadline - time.monotonic()) > 0:
            self._workers.take(left)
        return not self.is_copying

    @property
    def is_copying(self) -> bool:
        """Whether anything is read or written by a copy, or a peer asked."""
        return self._workers.busy.total() > 0

    @property
    def is_expecting(self) -> bool:
        """Whether pages of the device will soon be free or in the tree that are not now."""
        return self._workers.busy["copy"] > 0

    def load_fields(self) -> dict[str, Any]:
        """What a load report says of them."""
        speed, report = self.rates.tokens_per_s, self.load_report()
        speeds = {"host": speed("CPU"), "disk": speed("DISK"), "peer": speed("PEER")}
        return {f"{name}_tokens_per_s": value for name, value in speeds.items()} | {"tiers": report}

    def load_report(self) -> TierLoad:
        store, size = self.store, self._tree.page_size
        used: dict[str, int] = {"CPU": store.host.num_pages * store.form.nbytes}
        if store.disk is not None:
            used["DISK"] = store.disk.num_bytes
        return TierLoad(
            used_bytes=used,
            total_stored_tokens={medium: pages * size for medium, pages in store.stored_pages.items()},
            total_loaded_tokens={medium: pages * size for medium, pages in store.loaded_pages.items()},
            total_loads=dict(self._outcomes),
            total_failures=dict(store.failures),
            total_sent_tokens=store.sent_pages * size,
            fingerprint=store.form.fingerprint.hex(),
        )

    def switch(self, tier: Lower, *, off: bool) -> None:
        """A tier that is off is not used, and forgets its pages, also those that have come from it to the host. Nothing
        may be copied."""
        if off:
            self.store.off.add(tier)
            self.store.forget("CPU")
            if tier == "DISK":
                self.store.forget("DISK")
        else:
            self.store.off.discard(tier)

    def clear(self) -> None:
        """Forgets all pages. Nothing may be copied."""
        self.store.forget("CPU")
        self.store.forget("DISK")
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
    group: Followers | None = None,
) -> Tiers | None:
    """The tiers that the settings ask for. group: the other ranks. Raises ConfigError."""
    if not limits.host_pages:
        return None
    form, disk = residence.page_format(), None
    slab = residence.open_slab(form.nbytes)
    try:
        if group is not None and slab.place is not None:
            group.tell(Share(slab.place, form.nbytes))
        if config.disk_cache is not None:
            disk = DiskTier(Path(config.disk_cache), config.disk_cache_size, form)
    except BaseException:
        slab.close()
        raise
    workers = Workers(wake)
    elsewhere = nowhere if group is None else group.copy
    store = PageStore(form, HostTier(limits.host_pages), slab, disk, workers, cache.tree.events, elsewhere)
    rates = LoadRates(lambda: stats.prefill_tokens_per_s, limits.page_size)
    return Tiers(cache.tree, cache.pool, store, workers, rates, kv_pool=lambda: residence.executor.pool, clock=clock)
