"""The waiting queue, and the choice of what to prefill next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from itertools import islice

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Batch, Phase, Req
from treeline_runtime.kvcache import Match, RadixCache, common_prefix
from treeline_runtime.messages import MediaItem
from treeline_runtime.scheduler.cache import MIN_SHARED_TOKENS, CacheManager
from treeline_runtime.scheduler.decode import cost_pages, reserved_pages
from treeline_runtime.scheduler.resolve import Resolved
from treeline_runtime.scheduler.waiting import Ranked, WaitingOrder

ESTIMATED_WAITING = 64
"""Waiting requests whose uncached tokens are updated for a load report; others keep their last estimate."""
SPARE = 8
"""One row and page in so many stays free for clients with nothing running, so that other clients' long answers do not
block them. Requests without a client may use all."""


MOST_PASSED = 128
"""Requests that a step passes over because they wait for pages or a slot: its time does not grow with the queue."""


class QueuedPrefixes:
    """Prompts of a queue in order, with what each shares with the last similar one before it, nearly always its longest
    shared prefix."""

    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree
        self._last: dict[tuple[str | None, bytes], bytes] = {}

    def add(self, req: Req) -> int:
        """Returns the tokens that an earlier one will have computed for `req`. One comparison, O(length) memcmp."""
        if len(req.tokens) < MIN_SHARED_TOKENS:
            return 0
        size, width = self._tree.page_size, self._tree.page_bytes
        beginning = req.namespace, req.key[: -(-MIN_SHARED_TOKENS // size) * width]
        before, self._last[beginning] = self._last.get(beginning, b""), req.key
        return min(common_prefix(before, req.key) // width * size, req.cacheable_len)


class PrefillManager:
    """Owns waiting requests, and the one whose prompt is being computed in chunks."""

    def __init__(
        self,
        config: SchedulerConfig,
        limits: Resolved,
        cache: CacheManager,
        clock: Callable[[], float],
        is_encoded: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        """is_encoded: whether the embeddings of an item are there, by its digest."""
        self._cache = cache
        self._clock = clock
        self._page_size = config.page_size
        self._chunk_tokens = limits.chunked_prefill_size
        self._least = max(config.page_size, limits.longest_span)
        self._spare_rows = limits.max_running_requests // SPARE
        self._spare_pages = cache.pool.num_pages // SPARE
        self._by_priority = config.schedule_policy == "priority"
        cached = (lambda req: cache.match(req).num_pages) if config.schedule_policy == "lpm" else None
        self._order = WaitingOrder(config.starvation_bound, by_priority=self._by_priority, cached=cached)
        self._starvation_bound = config.starvation_bound
        self.waiting: OrderedDict[str, Req] = OrderedDict()
        self.chunked: Req | None = None
        self._uncached_waiting = 0
        """The sum over `waiting`, kept: adding it up in every step would take time by the length of the queue."""
        self._bounded = config.max_queued_requests is not None
        self._replaceable: dict[str | None, Ranked] = {}
        """Requests that never began, by client: least urgent, latest first. Kept if the queue's length is limited."""
        self._is_encoded = is_encoded
        self._encodes: dict[bytes, int] = {}
        """Items that the next step encodes → their tokens."""
        self._estimated_version = -1
        """The tree's version at the last estimates of the queue's first requests; -1 if the queue has changed since."""

    # ---- the queue ----------------------------------------------------------------------------------------

    def queue(self, req: Req) -> None:
        self._enter(req)
        self._order.put(req)
        if self._bounded:
            rank = (req.priority if self._by_priority else 0, -req.arrival)
            self._replaceable.setdefault(req.client, Ranked()).put(req, rank)

    def requeue(self, req: Req) -> None:
        """Adds a retracted request at the front; its output is now part of its prefill."""
        self._enter(req)
        self.waiting.move_to_end(req.rid, last=False)
        self._order.put(req, front=True)

    def _enter(self, req: Req) -> None:
        req.key = self._cache.key_of(req)
        req.digests, req.loaded, req.fetched, req.fetch = [], False, 0, None
        req.waiting_since = self._clock()
        req.uncached_tokens = 0
        self._estimate(req)
        if req.adapter is not None:
            self._cache.slots.wait(req.adapter, req.rid, len(req.tokens))
        self.waiting[req.rid] = req
        self._estimated_version = -1

    def leave(self, req: Req) -> None:
        """Removes a request if it waits or its prompt is half done."""
        if self.chunked is req:
            self.chunked = None
        if self.waiting.pop(req.rid, None) is not None:
            self._uncached_waiting -= req.uncached_tokens
            self._estimated_version = -1
            if req.adapter is not None:
                self._cache.slots.leave(req.adapter, req.rid)
            self._order.leave(req)
            if (line := self._replaceable.get(req.client)) is not None:
                line.leave(req)
                if not len(line):
                    del self._replaceable[req.client]

    def find(self, rid: str) -> Req | None:
        """The request of this id, if it waits or part of its prompt is computed."""
        return self.chunked if self.chunked is not None and self.chunked.rid == rid else self.waiting.get(rid)

    def reqs(self) -> list[Req]:
        """The partly computed request, then the waiting ones."""
        return [*([] if self.chunked is None else [self.chunked]), *self.waiting.values()]

    def check_integrity(self) -> None:
        assert self._uncached_waiting == sum(req.uncached_tokens for req in self.waiting.values())
        order = list(self._order.in_order(self._clock()))
        assert len(order) == len(self.waiting)
        assert set(order) == set(self.waiting.values())

    def _estimate(self, req: Req, shared_tokens: int = 0) -> None:
        """shared_tokens: what another waiting one will have computed before."""
        before = req.uncached_tokens
        match = self._cache.match(req)
        cached = (match.num_pages + (match.coming if self._cache.waits(match) else 0)) * self._page_size
        if self._cache.keeps and shared_tokens >= cached + MIN_SHARED_TOKENS:  # else it does not wait for the other
            cached = shared_tokens - shared_tokens % self._page_size
        if req.remote is not None and req.remote.within_s:
            cached = req.cacheable_len  # another runtime computes the rest
        req.uncached_tokens = len(req.tokens) - cached
        self._uncached_waiting += req.uncached_tokens - before

    def uncached_tokens(self) -> int:
        """Tokens still to prefill; shared beginnings count once."""
        version = self._cache.tree.version
        if version != self._estimated_version:
            self._estimated_version = version
            queued = QueuedPrefixes(self._cache.tree)
            for req in islice(self.waiting.values(), ESTIMATED_WAITING):
                self._estimate(req, queued.add(req))
        return self._uncached_waiting + (len(self.chunked.tokens) - self.chunked.device_len if self.chunked else 0)

    # ---- the choice ---------------------------------------------------------------------------------------

    def next_batch(self, running: Collection[Req], free_rows: int, ratio: float, riding: int = 0) -> Batch | None:
        """Admits what fits and gives it pages; None if nothing can be prefilled now.

        riding: tokens of the step's budget for decoding requests, at most all but a page and the longest span.
        """
        if self.chunked is None and (not self.waiting or free_rows == 0):
            return None
        reserved = reserved_pages(running, ratio, self._page_size)
        batch, self._encodes = Batch(Phase.PREFILL, [], [], [], []), {}
        tokens_left = max(self._chunk_tokens - riding, self._least)
        if self.chunked is not None:
            req = self.chunked
            tokens_left -= self._append(batch, req, tokens_left)
            if req is self.chunked:
                return batch if batch.reqs else None
            reserved += reserved_pages(batch.reqs, ratio, self._page_size)
        loading = self._cache.loading  # each has its pages, and will need a row
        free_rows -= len(loading)
        busy = {req.client for req in (*running, *batch.reqs, *loading)}
        full: set[str | None] = set()
        passed = 0

        def may_come(client: str | None) -> bool:
            return client not in full and free_rows > self._spare(client, busy)[0]

        for req in self._order.in_order(now := self._clock(), may_come):
            if tokens_left <= 0 or free_rows <= 0 or self.chunked is not None or passed == MOST_PASSED:
                break
            if req.awaits_pages(now):
                continue
            if req.adapter is not None and not self._cache.slots.admits(req.adapter, req.client):
                passed += bool(running or batch.reqs)  # alone, it goes on to those for whom idle slots are kept
                continue
            _, spare = self._spare(req.client, busy)
            match = self._cache.match(req)
            matched = match.num_pages * self._page_size
            if self._cache.waits(match):
                passed += 1
                continue
            alone = not running and not batch.reqs
            if not self._fits(req, match, None if alone else reserved + spare):
                if spare and not self._is_kept_out_by_others(req, [*running, *batch.reqs], ratio):
                    full.add(req.client)
                    continue
                break
            if self._cache.load(req, match):
                passed += 1
                if len(self._cache.loading) > len(loading):
                    loading = self._cache.loading
                    free_rows -= 1
                    busy.add(req.client)
                continue
            if tokens_left < len(req.tokens) - matched and tokens_left < self._page_size:
                break
            self._admit(req, match)
            tokens_left -= self._append(batch, req, tokens_left)
            reserved += reserved_pages([req], ratio, self._page_size)
            busy.add(req.client)
            free_rows -= 1
        return batch if batch.reqs else None

    def _spare(self, client: str | None, busy: Set[str | None]) -> tuple[int, int]:
        """Rows and pages that a request of this client must leave free. `busy`: clients with a running request."""
        return (self._spare_rows, self._spare_pages) if client is not None and client in busy else (0, 0)

    def _fits(self, req: Req, match: Match, reserved: int | None) -> bool:
        """`reserved`: pages that admitted requests will take. None: there are none; the request is then admitted if its
        prompt fits, or it would wait forever."""
        matched = match.num_pages * self._page_size
        available = self._cache.available_pages - self._cache.tree.unlocked_pages(match)
        if reserved is None:
            prompt = len(req.tokens) + min(req.max_new_tokens, 1)
            return self._cache.pages_for(prompt) - match.num_pages <= available
        return cost_pages(req, matched, self._page_size) <= available - reserved

    def _is_kept_out_by_others(self, req: Req, running: Iterable[Req], ratio: float) -> bool:
        """Whether a request has waited for the starvation bound, and would fit beside its own client's running ones."""
        if self._clock() - req.waiting_since + req.waited_s < self._starvation_bound:
            return False
        own = [other for other in running if other.client == req.client]
        held = sum(other.num_pages for other in own) + reserved_pages(own, ratio, self._page_size)
        return held + self._spare_pages + cost_pages(req, 0, self._page_size) <= self._cache.pool.num_pages

    def _admit(self, req: Req, match: Match) -> None:
        self.leave(req)
        req.waited_s += self._clock() - req.waiting_since
        self._cache.admit(req, match)
        req.remote = None
        if req.cached_tokens < 0:
            req.cached_tokens = req.tree_len

    def replaced_by(self, req: Req, running: Iterable[Req], ahead: int) -> Req | None:
        """Returns the request that leaves a full queue for `req`: the last unstarted one of the client with the most
        waiting, then running. Within its own client a more urgent request may replace the least urgent one. None:
        `req` is refused. ahead: its client's requests that wait elsewhere."""
        held = Counter(other.client for other in running)

        def load(client: str | None) -> tuple[int, int]:
            more = 1 + ahead if client == req.client else 0
            return len(self._replaceable.get(client, ())) + more, held[client]

        fullest = max(self._replaceable, key=load, default=req.client)
        gives_way = load(fullest) > load(req.client)
        line = self._replaceable.get(fullest if gives_way else req.client)
        last = None if line is None else line.first()
        if last is None or not (gives_way or (self._by_priority and last[1].priority < req.priority)):
            return None
        return last[1]

    def _append(self, batch: Batch, req: Req, tokens_left: int) -> int:
        """Adds as much of `req` as fits; returns the tokens added. Sets `chunked` if some are left."""
        start, target = req.device_len, len(req.tokens)
        room = (self._cache.available_pages + req.num_pages) * self._page_size
        end = min(target, start + tokens_left, room)
        if req.media is not None:
            end = self._encodable(req.media.items, start, end, alone=not batch.reqs)
        if end < target:
            if req.media is not None and req.media.is_whole:  # between two items there may be no page's end
                end = req.media.uncut(end)
            else:
                end -= end % self._page_size
        self.chunked = req if end < target else None
        if end <= start:
            return 0
        self._cache.extend(req, end)
        batch.has_items |= req.media is not None
        batch.reqs.append(req)
        batch.starts.append(start)
        batch.ends.append(end)
        batch.samples.append(end == target and req.max_new_tokens > 0)
        return end - start

    def _encodable(self, items: Sequence[MediaItem], start: int, end: int, *, alone: bool) -> int:
        """The end of a chunk, at most `end`, that leaves out items which are too many to be encoded in this step.
        `alone`: the step has no other prompt yet, so it takes what is in the first page, and at least one item."""
        least = start - start % self._page_size + self._page_size
        for item in items:
            if item.start + item.count <= start or item.digest in self._encodes or self._is_encoded(item.digest):
                continue
            if item.start >= end:
                break
            full = sum(self._encodes.values()) + item.count > self._chunk_tokens
            if full and self._encodes and not (alone and item.start < least):
                return max(item.start, start)
            self._encodes[item.digest] = item.count
        return end
