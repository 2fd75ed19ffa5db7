"""What an engine that answers at once holds, and the KV events that say so: pure, no sockets.

The paged cache and the journal of the engine model, with memory for everything: nothing is evicted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from treeline_wire.events import encode_batch
from treeline_wire.frames import Reply, Request
from treeline_wire.load import TreelineLoad

from treeline_sim.model.cache import PagedCache
from treeline_sim.model.journal import Journal
from treeline_sim.tokens import TokenPrompt

PAGES = 1 << 20
PREFILL_TOKENS_PER_S = 10_000.0
DECODE_STEP_MS = 10.0


class SimCache:
    """Blocks of `block_size` tokens, chained by SHA-256 as the runtime's are."""

    def __init__(self, block_size: int, epoch: int) -> None:
        self.block_size = block_size
        self.epoch = epoch
        self._cache = PagedCache(block_size, PAGES)
        self._journal = Journal(block_size, epoch)
        self._reports = 0

    @property
    def seq(self) -> int:
        """Of the newest batch; -1 before the first."""
        return self._journal.seq

    @property
    def blocks(self) -> int:
        return self._cache.cached

    def matched_tokens(self, ids: Sequence[int]) -> int:
        """How many tokens of a prompt come from the cache: whole blocks, never the last token. O(tokens)."""
        matched = self._cache.matched(TokenPrompt(ids, self.block_size).blocks) * self.block_size
        return min(matched, (len(ids) - 1) // self.block_size * self.block_size)

    def store(self, ids: Sequence[int]) -> tuple[int, bytes] | None:
        """Hold a prompt's whole blocks. Returns (seq, payload) of the batch to publish, None if nothing was new."""
        prompt = TokenPrompt(ids, self.block_size)
        blocks = prompt.blocks
        held = self._cache.matched(blocks)
        self._cache.use(blocks[:held])
        self._journal.removed(self._cache.take(len(blocks) - held))
        self._journal.stored(prompt, held, len(blocks), self._cache.name(blocks[held:]))
        self._cache.give(blocks)
        flushed = self._journal.flush(time.time())
        return None if flushed is None else (flushed[0], encode_batch(flushed[1].ts, flushed[1].events))

    def reply(self, request: Request, topic: bytes) -> Iterator[Reply]:
        """What the ROUTER socket answers, message by message."""
        return self._journal.reply(request, topic)

    def load(self) -> TreelineLoad:
        """An idle engine: requests are answered at once, so none is ever running when a report is made."""
        seq, self._reports = self._reports, self._reports + 1
        return TreelineLoad(
            epoch=self.epoch,
            seq=seq,
            pages_used=self.blocks,
            pages_total=PAGES,
            page_size=self.block_size,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            decode_step_ms=DECODE_STEP_MS,
            max_running=1024,
        )
