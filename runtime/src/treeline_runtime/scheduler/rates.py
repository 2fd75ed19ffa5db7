"""Whether to load pages from a tier or to compute them: what is measured decides."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from treeline_runtime.kvcache.store import Moved

FORGET = 0.8
"""Weight of the past in a moving average."""
TRY_AGAIN = 32
"""Of so many loads from a tier that is too slow, one is made: it may be fast again."""
MOST_PLACES = 1024


class LoadRates:
    """Seconds per page of each tier, and of each peer by its address, against those of prefill. What has not been
    measured is fast."""

    def __init__(self, prefill_tokens_per_s: Callable[[], float], page_size: int) -> None:
        """prefill_tokens_per_s: 0 = not known yet."""
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._page_size = page_size
        self._averages: dict[str, tuple[float, float]] = {}
        """Pages and seconds: a load counts as much as it has pages, so small ones, slow each for themselves, do not
        decide about large ones."""
        self._refused: dict[str, int] = {}

    def seconds_per_page(self, medium: str) -> float:
        """To the device; 0 = not known yet."""
        pages, seconds = self._averages.get(medium, (0.0, 0.0))
        through = self.seconds_per_page("CPU") if medium != "CPU" and pages else 0.0
        return seconds / pages + through if pages else 0.0

    def tokens_per_s(self, medium: str) -> float:
        """0 = not known yet."""
        seconds = self.seconds_per_page(medium)
        return self._page_size / seconds if seconds else 0.0

    def is_slow(self, medium: str) -> bool:
        """Whether computing a page takes less time than loading it."""
        return self.seconds_per_page(medium) > self._compute_s()

    def page_s(self) -> float:
        """Seconds by which computing a page is slower than loading it from the host; inf = not known yet."""
        return self._compute_s() - self.seconds_per_page("CPU")

    def _compute_s(self) -> float:
        rate = self._prefill_tokens_per_s()
        return self._page_size / rate if rate else inf

    def allows(self, medium: str) -> bool:
        """Whether to load from this tier now."""
        if not self.is_slow(medium):
            return True
        self._refused[medium] = (self._refused.get(medium, 0) + 1) % TRY_AGAIN
        return self._refused[medium] == 0

    def on_load(self, medium: str, moved: Moved) -> None:
        """The first does not count: it includes one-time work, such as touching memory. One that was made although the
        tier is slow replaces the past."""
        if not moved.pages:
            return
        if medium not in self._averages:
            if len(self._averages) >= MOST_PLACES:
                self._averages.clear()
                self._refused.clear()
            self._averages[medium] = (0.0, 0.0)
            return
        pages, seconds = self._averages[medium]
        past = 0.0 if not pages or self.is_slow(medium) else FORGET
        new = 1 - past
        self._averages[medium] = past * pages + new * moved.pages, past * seconds + new * moved.seconds
