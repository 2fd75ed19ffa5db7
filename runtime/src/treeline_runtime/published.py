"""Messages to the publisher: changes of the cache and of the load, as in `messages`."""

from __future__ import annotations

from typing import Literal

import msgspec
from treeline_wire.load import TreelineLoad


class Stored(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """A run of consecutive pages entered the engine's own pool."""

    block_hashes: list[int]
    """Unsigned 64-bit, one per page, of the digest chain (treeline_wire.events)."""
    parent_hash: int | None
    """The page before the run; None at the start of a sequence."""
    token_ids: list[int]
    """len(block_hashes) x page_size."""
    namespace: str | None = None
    output_from: int = 0
    """Index into `token_ids` of the first sampled token; len(token_ids) if none is sampled."""


Medium = Literal["GPU", "CPU", "DISK"]
"""A tier of the cache, by the field's names. GPU: the engine's own pool, on whatever device; CPU: host memory."""


class Copied(msgspec.Struct, tag=True, frozen=True):
    """Pages, each of which is in another tier, are now in this one too."""

    block_hashes: list[int]
    medium: Medium


class Removed(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Pages left a tier of the cache, leaves first."""

    block_hashes: list[int]
    medium: Medium = "GPU"


class Cleared(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """All tiers of the cache are empty, or are to be taken as empty."""


CacheEvent = Stored | Copied | Removed | Cleared


class CacheUpdate(msgspec.Struct, tag=True, frozen=True):
    """A step's changes of the cache, in order."""

    events: list[CacheEvent]


class AuditCounts(msgspec.Struct, frozen=True):
    """What audits of the cache found about one source of cached tokens, since the start."""

    audited: int = 0
    diverged: int = 0
    dropped: int = 0
    """Never computed, or not to the end."""
    off: bool = False
    """It gave wrong answers and is not used any more."""


class TierLoad(msgspec.Struct, frozen=True):
    """The cache below the device. Totals are since the start."""

    used_bytes: dict[str, int] = {}
    """By medium, as the next two."""
    total_stored_tokens: dict[str, int] = {}
    total_loaded_tokens: dict[str, int] = {}
    """CPU: copied to the device; DISK, PEER: to the host."""
    total_loads: dict[str, int] = {}
    """By what became of the pages that a request might have loaded: `loaded`; `computed`, since that was faster;
    `failed`, all or some of them, and computed."""
    total_failures: dict[str, int] = {}
    """`bad_page`: with wrong checksum or header, not used; `disk`: reads and writes; `peer`: reads of runtimes."""
    total_sent_tokens: int = 0
    """To other runtimes."""
    fingerprint: str = ""
    """Of the pages: other runtimes can use them if theirs is the same."""


class LoadUpdate(TreelineLoad, tag=True, frozen=True, omit_defaults=True):
    """The scheduler's load after a step that changed it: our report to routers without the publisher's fields (`epoch`,
    `seq`, `in_flight`), and the rest of SGLang's report."""

    tokens_used: int = 0
    total_prefill_uncached_tokens: int = 0
    """Computed since the start."""
    total_prefill_busy_us: int = 0
    total_encoder_queries: int = 0
    """Images and videos that steps needed, since the start."""
    total_encoder_hits: int = 0
    """Those whose embeddings were still there."""
    total_encoded_tokens: int = 0
    """Of the others."""
    total_encoder_us: int = 0
    total_jumps: int = 0
    total_forced_tokens: int = 0
    """Added by jumps since the start."""
    total_drafts: int = 0
    """Times that a step verified guesses of a request, since the start."""
    total_draft_tokens: int = 0
    """These guesses."""
    accepted_per_position: list[int] = msgspec.field(default_factory=list)
    """The right ones among them, by their place in the draft."""
    asleep: int = 0
    """Sleep level (SleepReq); 0 = awake. Routers see it as draining."""
    audits: dict[str, AuditCounts] = msgspec.field(default_factory=dict)
    """By source; {} without audits."""
    tiers: TierLoad | None = None
    """None: the cache is on the device only."""
    max_loras: int = 0
    """Slots of adapters; 0: it serves none."""
    running_adapters: list[str] = msgspec.field(default_factory=list)
    """Names of those with a running request; all names of each."""
    waiting_adapters: list[str] = msgspec.field(default_factory=list)
    """Names of those with a waiting one."""
    lost_adapters: list[str] = msgspec.field(default_factory=list)
    """Names of those that cannot be read again."""

    @property
    def used_share(self) -> float:
        """Share of the KV cache held by running requests: 0 to 1."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0

    @property
    def tokens_total(self) -> int:
        return self.pages_total * self.page_size


ToPublisher = CacheUpdate | LoadUpdate
