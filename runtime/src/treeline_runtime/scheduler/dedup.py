"""Requests that share a prefix whose pages are on their way into the tree: one computes it, the others wait and hit."""

from __future__ import annotations

from treeline_runtime.core import Req
from treeline_runtime.kvcache.radix import TOKEN_BYTES, common_prefix

MIN_SHARED_TOKENS = 32
"""Waiting a step must be worth it."""


class PendingPrefixes:
    """Prompts whose pages are being filled: in this step, or in one whose results are not known. Those that share less
    than MIN_SHARED_TOKENS never meet in the dict."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str | None, bytes], list[bytes]] = {}

    def add(self, req: Req) -> None:
        if len(req.tokens) >= MIN_SHARED_TOKENS:
            self._keys.setdefault(_place(req), []).append(req.key)

    def saves_tokens(self, req: Req, matched_tokens: int) -> bool:
        """Whether waiting for a pending prefill would supply MIN_SHARED_TOKENS more than the cache does now."""
        if req.cacheable_len < matched_tokens + MIN_SHARED_TOKENS:
            return False
        needed = (matched_tokens + MIN_SHARED_TOKENS) * TOKEN_BYTES
        return any(common_prefix(key, req.key) >= needed for key in self._keys.get(_place(req), ()))


class QueuedPrefixes:
    """Prompts of a queue, in their order: what each shares with the last one before it that begins as it does, which
    is nearly always the most that it shares with any. Cheaper than `PendingPrefixes`, for an estimate."""

    def __init__(self) -> None:
        self._last: dict[tuple[str | None, bytes], bytes] = {}

    def add(self, req: Req) -> int:
        """→ the tokens that one before `req` will have computed for it. One comparison, O(length) memcmp."""
        if len(req.tokens) < MIN_SHARED_TOKENS:
            return 0
        place = _place(req)
        before, self._last[place] = self._last.get(place, b""), req.key
        return min(common_prefix(before, req.key) // TOKEN_BYTES, req.cacheable_len)


def _place(req: Req) -> tuple[str | None, bytes]:
    return req.namespace, req.key[: MIN_SHARED_TOKENS * TOKEN_BYTES]
