"""The cache audits itself: some of the requests that took tokens from the cache are computed again without it, and what
the model says is compared.

`watched` asks the executor for the likeliest first tokens of these requests, and `take` keeps them. `step` computes
a chunk of the oldest audit; the scheduler calls it only while nothing runs or waits, and calls `pause` as soon as
something does. An audit reads nothing from the tree and inserts nothing; while it computes it holds a row and pages.

What may differ without a fault is rounding: kernels add in another order for other shapes. So the first computation is
cut where the cache ended, which gives the last step its first shape again, and only a difference beyond a limit is
looked at further: by a second computation with another cut. A source has lied if the cache's answer is far from both,
and they are near each other.
"""

from __future__ import annotations

import enum
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import torch
from treeline_wire.namespaces import adapter_of

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Batch, Phase, Req
from treeline_runtime.kvcache import NO_MATCH
from treeline_runtime.kvcache.host import Lower
from treeline_runtime.messages import SamplingParams
from treeline_runtime.models.config import ModelConfig
from treeline_runtime.published import AuditCounts
from treeline_runtime.scheduler.cache import CacheManager
from treeline_runtime.scheduler.launched import Launched, Sampled
from treeline_runtime.scheduler.resolve import Resolved

TOP = 32
"""Likeliest tokens that are compared."""
MOST_WAITING = 8
"""Audits that may wait; a further one replaces the oldest."""
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""By the model's type, the largest `difference` that is surely rounding. On the tiny model, right pages give at most
3e-5 in float32 and 0.3 in bfloat16, which rounds 8 times as much as float16, and wrong ones 2 (median)."""
COARSE_LIMIT = 2.0
"""The same, whatever the type, where rounding is magnified: by fp8 weights and caches, for which right pages give at
most 1.3, and by routers of experts."""
TIMES_ROUNDING = 4
"""A lie is so many times larger than the difference between the two computations without the cache."""

logger = logging.getLogger(__name__)


def limit_for(config: SchedulerConfig, model: ModelConfig, limits: Resolved) -> float:
    """In nats."""
    is_fp8 = config.quantization == "fp8" or model.quantization is not None or limits.kv_dtype != limits.dtype
    return COARSE_LIMIT if is_fp8 or model.moe is not None else LIMITS[limits.dtype]


class Source(enum.StrEnum):
    """Where cached tokens come from, the nearest first."""

    TREE = "tree"
    HOST = "host"
    DISK = "disk"
    PEER = "peer"


LOWER: Mapping[Source, Lower] = {Source.HOST: "CPU", Source.DISK: "DISK", Source.PEER: "PEER"}
SOURCES: Mapping[Lower | None, Source] = {None: Source.TREE} | {lower: source for source, lower in LOWER.items()}
"""By `Req.loaded_from`, the furthest one. It is blamed: if a nearer one has lied, audits find that once this one is
off."""


def sources_of(config: SchedulerConfig) -> list[Source]:
    """The sources that audits of this configuration may blame."""
    tiers = {Source.HOST: config.host_cache, Source.DISK: config.disk_cache, Source.PEER: config.host_cache}
    return [source for source in Source if config.cache_audit and tiers.get(source, "") is not None]


Tops = Mapping[int, float]
"""The likeliest tokens with their log probabilities."""


def difference(one: Tops, other: Tops) -> float:
    """Root mean square of the differences of log probabilities, in nats, over the tokens in either. A token that is
    missing in one is at most as likely there as the least likely that is not; it counts as near as that allows."""
    least_one, least_other = min(one.values()), min(other.values())

    def gap(token: int) -> float:
        here = one[token] if token in one else min(least_one, other[token])
        there = other[token] if token in other else min(least_other, one[token])
        return here - there

    tokens = one.keys() | other.keys()
    return math.sqrt(sum(gap(token) ** 2 for token in tokens) / len(tokens))


def _first(result: Sampled) -> Tops:
    """Of the result's first token."""
    return {token: logprob for logprob, token in result.top_logprobs[0][:TOP] if logprob is not None}


@dataclass(slots=True)
class Audit:
    """A request whose first output token is to be computed again."""

    rid: str
    source: Source
    tokens: list[int]
    namespace: str | None
    cached_tokens: int
    seen: Tops
    """Of its first output token, as computed with the cache."""
    again: list[Tops] = field(default_factory=list)
    """The same without it, each time cut otherwise."""


class CacheAudits:
    """Owns waiting audits, what the one being computed holds, and which sources are off."""

    def __init__(
        self,
        config: SchedulerConfig,
        limit: float,
        chunk_tokens: int,
        cache: CacheManager,
        launch: Callable[[Batch], Launched],
    ) -> None:
        """limit: see `limit_for`. chunk_tokens: computed at once, whole pages."""
        self._share = config.cache_audit
        self._secret = os.urandom(16)
        self._limit = limit
        self._chunk_tokens = chunk_tokens
        self._cache = cache
        self._launch = launch
        self._waiting: deque[Audit] = deque()
        self.req: Req | None = None
        """What the first of them holds on the device."""
        self._draining = False
        self.counts: dict[str, AuditCounts] = {source: AuditCounts() for source in sources_of(config)}
        """By source; replaced as a whole."""

    @property
    def held_pages(self) -> int:
        return 0 if self.req is None else self.req.num_pages

    # ---- with the cache -----------------------------------------------------------------------------------

    def watched(self, batch: Batch) -> dict[int, int]:
        """Number among the batch's sampled requests → how many of the likeliest tokens to report."""
        if not self._share:
            return {}
        sampled = ((j, batch.reqs[i], batch.ends[i]) for j, i in enumerate(batch.sampling))
        return {j: max(TOP, req.top_logprobs_num) for j, req, end in sampled if self._chooses(req, end)}

    def _chooses(self, req: Req, end: int) -> bool:
        """Depends on the request alone, so that `take` agrees with `watched`; its id may be the client's choice, so a
        secret keeps clients from choosing what is audited. Files of images stay only while their request lives."""
        if end != req.prompt_len or req.cached_tokens <= 0 or req.media is not None:
            return False
        drawn = blake2b(req.rid.encode(), key=self._secret, digest_size=8).digest()
        return int.from_bytes(drawn) < self._share * 2**64

    def take(self, req: Req, end: int, result: Sampled) -> None:
        """Keeps the first output token's probabilities of a watched request, and leaves those that it asked for."""
        if not self._share or not self._chooses(req, end) or not result.top_logprobs:  # a step may give no token
            return
        seen = _first(result)
        result.top_logprobs[0] = result.top_logprobs[0][: req.top_logprobs_num]
        if self._draining:
            return
        if len(self._waiting) == MOST_WAITING:
            self._count(self._waiting.popleft().source, dropped=1)
        tokens = req.tokens[: req.prompt_len]
        source = SOURCES[req.loaded_from]
        self._waiting.append(Audit(req.rid, source, tokens, req.namespace, req.cached_tokens, seen))

    # ---- without it ---------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Computes a chunk of the oldest audit and waits for it. Returns whether there was one that fits. Only for
        idle moments: a verdict may empty the tree."""
        if not self._waiting:
            return False
        audit = self._waiting[0]
        if self._cache.slots.is_on_disk_alone(adapter_of(audit.namespace)):
            self._end(dropped=1)
            return True
        try:
            if self.req is None and not self._begin(audit):
                return False
            again = self._compute(audit)
        except Exception:
            logger.exception("the audit of request %r failed", audit.rid)
            self._end(dropped=1)
            return True
        if again is not None:
            self.pause()
            audit.again.append(again)
            self._judge(audit)
        return True

    def _begin(self, audit: Audit) -> bool:
        tokens = audit.tokens
        if self._cache.pages_for(len(tokens)) > self._cache.available_pages:
            return False
        self.req = Req(
            rid=audit.rid,
            tokens=tokens,
            prompt_len=len(tokens),
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            seed=0,
            stop_ids=frozenset(),
            max_new_tokens=1,
            namespace=audit.namespace,
            adapter=adapter_of(audit.namespace),
            return_logprob=True,
            top_logprobs_num=TOP,
        )
        self._cache.admit(self.req, NO_MATCH)  # has no key, so nobody waits for what it computes
        return True

    def _compute(self, audit: Audit) -> Tops | None:
        """Computes the next chunk; returns the likeliest tokens after the last one."""
        req = self.req
        assert req is not None
        start, whole = req.device_len, len(req.tokens)
        end = min(start + self._chunk_tokens, whole)
        if not audit.again and start < audit.cached_tokens:
            end = min(end, audit.cached_tokens)
        self._cache.extend(req, end)
        launched = self._launch(Batch(Phase.PREFILL, [req], [start], [end], [end == whole]))
        (result,) = launched.result()
        if result.failed is not None:
            raise RuntimeError(result.failed)
        req.device_len = end
        return _first(result) if end == whole else None

    def _judge(self, audit: Audit) -> None:
        size = min(difference(audit.seen, again) for again in audit.again)
        if size <= self._limit:
            self._end(audited=1)
            return
        if len(audit.again) == 1:
            return  # it is computed once more
        rounding = difference(*audit.again)
        if size <= TIMES_ROUNDING * rounding:
            self._end(audited=1)
            return
        logger.error(
            "cache audit: request %r got another answer with %d of its %d tokens from the cache (%s) than without: log "
            "probabilities differ by %.3g, and by %.3g between two computations without it; %s is off until a flush",
            *(audit.rid, audit.cached_tokens, len(audit.tokens), audit.source, size, rounding, audit.source),
        )
        self._end(audited=1, diverged=1)
        self._cache.flush()  # from every source, pages have come into the tree
        self._switch(audit.source, off=True)

    def _switch(self, source: Source, *, off: bool) -> None:
        self._set(source, off=off)
        if source is Source.TREE:
            self._cache.keeps = not off
        elif self._cache.tiers is not None:
            self._cache.tiers.switch(LOWER[source], off=off)

    # ---- interruptions ------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Gives up what an audit holds; it will start over."""
        if self.req is not None:
            self._cache.release(self.req, insert=False)
            self.req = None

    def drop(self) -> None:
        """Gives up all waiting audits."""
        while self._waiting:
            self._end(dropped=1)

    def drain(self) -> None:
        """No further audits."""
        self._draining = True
        self.drop()

    def start_over(self) -> None:
        """Drops audits of a cache that is being flushed, and switches sources on again."""
        self.drop()
        for source in Source:
            if source in self.counts and self.counts[source].off:
                self._switch(source, off=False)

    def _end(self, **more: int) -> None:
        """Ends the oldest audit."""
        self.pause()
        self._count(self._waiting.popleft().source, **more)

    def _count(self, source: Source, **more: int) -> None:
        counts = self.counts[source]
        self._set(source, **{name: getattr(counts, name) + n for name, n in more.items()})

    def _set(self, source: Source, **values: int) -> None:
        self.counts = self.counts | {source: msgspec.structs.replace(self.counts[source], **values)}
