"""The running set: what to decode next, its expected memory, and who is retracted when memory runs out."""

from __future__ import annotations

from collections.abc import Iterable

from treeline_runtime.core import Batch, Phase, Req
from treeline_runtime.scheduler.cache import CacheManager
from treeline_runtime.scheduler.drafting import MOST_SAMPLED, Speculation

INITIAL_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_STEPS = 20
OUTPUT_CLIP_TOKENS = 4096
"""The most further tokens expected of a request: users set large maxima and rarely reach them."""


class NewTokenRatio:
    """The share of its remaining output that a running request is expected to produce.

    Starts high, decays while memory suffices, and jumps to the real value after retractions.
    """

    def __init__(self, conservativeness: float = 1.0) -> None:
        self.initial = min(1.0, INITIAL_RATIO * conservativeness)
        self.minimum = self.initial * MIN_RATIO_FACTOR
        self.value = self.initial
        self._decay = (self.initial - self.minimum) / DECAY_STEPS

    def on_decode(self) -> None:
        self.value = max(self.value - self._decay, self.minimum)

    def on_retract(self, running: Iterable[Req]) -> None:
        """`running`: the requests that stay."""
        decoded = allowed = count = 0
        for req in running:
            decoded += req.output_len
            allowed += req.max_new_tokens
            count += 1
        self.value = min(1.0, (decoded + RETRACT_STEPS * count) / (allowed + 1))

    def on_idle(self) -> None:
        self.value = self.initial


def remaining_tokens(req: Req) -> int:
    return min(req.max_new_tokens - req.output_len, OUTPUT_CLIP_TOKENS)


def reserved_pages(reqs: Iterable[Req], ratio: float, page_size: int) -> int:
    """Pages that admitted requests are expected to take besides those they hold: rest of the prompt, and output."""
    total = 0
    for req in reqs:
        share = 1.0 if req.sampling.ignore_eos else ratio
        expected = max(len(req.tokens) - req.num_pages * page_size, 0) + int(remaining_tokens(req) * share)
        total += -(-expected // page_size)
    return total


def cost_pages(req: Req, matched_tokens: int, page_size: int) -> int:
    """Pages that `req` may take in the end: uncached tokens, all output, and one to spare."""
    return -(-(len(req.tokens) - matched_tokens + remaining_tokens(req)) // page_size) + 1


class DecodeManager:
    """Owns requests whose prompts are computed or launched, in the order of admission. Requests without output tokens
    stay until their result is taken."""

    def __init__(self, cache: CacheManager, step_tokens: int, speculation: Speculation | None = None) -> None:
        """step_tokens: the most tokens computed at once, besides one for each."""
        self._cache = cache
        self._step_tokens = step_tokens
        self._speculation = speculation
        self.running: dict[str, Req] = {}

    def runnable(self) -> list[Req]:
        """The running requests whose last token is not launched yet."""
        return [req for req in self.running.values() if req.launched_tokens < req.max_new_tokens]

    def missing_pages(self, reqs: list[Req]) -> int:
        """Pages needed for the next step of `reqs`."""
        return sum(self._cache.missing_pages(req, end) for req, end in zip(reqs, self._ends(reqs), strict=True))

    def next_batch(self, reqs: list[Req]) -> Batch:
        """One token for each, or all that a jump added, and guesses as far as there is room; the pages for the others
        are there."""
        ends = self._ends(reqs)
        for req, end in zip(reqs, ends, strict=True):
            self._cache.extend(req, end)
        samples = [end >= len(req.tokens) for req, end in zip(reqs, ends, strict=True)]
        if self._speculation is not None and self._speculation.pays(reqs):
            # the rest is for prompts in the same step
            room = min(self._step_tokens // 2, MOST_SAMPLED) - sum(
                end - req.device_len for req, end in zip(reqs, ends, strict=True)
            )
            for i, req in enumerate(reqs):
                if ends[i] == len(req.tokens) and not req.in_flight:
                    share = -(-room // (len(reqs) - i))  # who began first takes no more than others
                    ends[i] += self._draft(req, self._speculation.draft(req, share))
                    room -= len(req.draft)
        return Batch(Phase.DECODE, reqs, [req.device_len for req in reqs], ends, samples)

    def _draft(self, req: Req, guesses: list[int]) -> int:
        """Takes the guesses for which there are pages; returns their number."""
        known = len(req.tokens)
        while guesses and self._cache.missing_pages(req, known + len(guesses)) > self._cache.available_pages:
            guesses.pop()
        self._cache.extend(req, known + len(guesses))
        req.draft = guesses
        return len(guesses)

    def _ends(self, reqs: list[Req]) -> list[int]:
        """The end position of each request: one token on, or several that are forced, if the step has room."""
        ends, room = [], max(self._step_tokens - len(reqs), 0)
        for req in reqs:
            more = min(max(len(req.tokens) - req.device_len - 1, 0), room)
            ends.append(req.device_len + 1 + more)
            room -= more
        return ends


def retraction_order(reqs: list[Req]) -> list[Req]:
    """The least urgent, then those with least output to lose, then the longest prompt (its prefix stays cached)."""
    return sorted(reqs, key=lambda req: (req.priority, req.output_len, -req.prompt_len))
