"""The running set: what to decode next, and who of it goes first when memory runs out."""

from __future__ import annotations

from treeline_runtime.core import Batch, Phase, Req
from treeline_runtime.scheduler.cache import CacheManager


class DecodeManager:
    """Owns the requests that produce tokens: a dict, so that their order is that of admission everywhere."""

    def __init__(self, cache: CacheManager, step_tokens: int) -> None:
        """step_tokens: computed at once at most, but for a token of each."""
        self._cache = cache
        self._step_tokens = step_tokens
        self.running: dict[str, Req] = {}

    def runnable(self) -> list[Req]:
        """Those whose last token is not launched yet."""
        return [req for req in self.running.values() if req.launched_tokens < req.max_new_tokens]

    def missing_pages(self, reqs: list[Req]) -> int:
        """Pages to be found before the next step of `reqs`."""
        return sum(self._cache.missing_pages(req, end) for req, end in zip(reqs, self._ends(reqs), strict=True))

    def next_batch(self, reqs: list[Req]) -> Batch:
        """One token for each, or all that a jump has added; the pages are there."""
        ends = self._ends(reqs)
        for req, end in zip(reqs, ends, strict=True):
            self._cache.extend(req, end)
        samples = [end >= len(req.tokens) for req, end in zip(reqs, ends, strict=True)]
        return Batch(Phase.DECODE, reqs, [req.device_len for req in reqs], ends, samples)

    def _ends(self, reqs: list[Req]) -> list[int]:
        """How far each goes: a token, or as far as its tokens are known and the step has room."""
        ends, room = [], max(self._step_tokens - len(reqs), 0)
        for req in reqs:
            more = min(max(len(req.tokens) - req.device_len - 1, 0), room)
            ends.append(req.device_len + 1 + more)
            room -= more
        return ends


def retraction_order(reqs: list[Req]) -> list[Req]:
    """Who goes first when memory runs out: the least urgent, then who loses least output, then who has the longest
    prompt (its prefix stays cached)."""
    return sorted(reqs, key=lambda req: (req.priority, req.output_len, -req.prompt_len))
