"""The running set, and what to decode next."""

from __future__ import annotations

from treeline_runtime.core import Batch, Phase, Req
from treeline_runtime.scheduler.cache import CacheManager


class DecodeManager:
    """Owns the requests that produce tokens: a dict, so that their order is that of admission everywhere."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self.running: dict[str, Req] = {}

    def runnable(self) -> list[Req]:
        """Those whose last token is not launched yet."""
        return [req for req in self.running.values() if req.launched_tokens < req.max_new_tokens]

    def missing_pages(self, reqs: list[Req]) -> int:
        """Pages to be found before the next step of `reqs`."""
        return sum(self._cache.missing_pages(req, req.device_len + 1) for req in reqs)

    def next_batch(self, reqs: list[Req]) -> Batch:
        """One token for each; the pages are there."""
        ends = [req.device_len + 1 for req in reqs]
        for req, end in zip(reqs, ends, strict=True):
            self._cache.extend(req, end)
        return Batch(Phase.DECODE, reqs, [req.device_len for req in reqs], ends, [True] * len(reqs))


def retraction_order(reqs: list[Req]) -> list[Req]:
    """Who goes first when memory runs out: the least urgent, then who loses least output, then who has the longest
    prompt (its prefix stays cached)."""
    return sorted(reqs, key=lambda req: (req.priority, req.output_len, -req.prompt_len))
