"""Rates and sizes that the picker derives from repeated scrapes of an engine's metrics.

Gauges are the load itself. Totals only grow, and their growth since an earlier scrape counts; a total that has become
smaller belongs to a new process, and counts from there. The prefill rate is measured from two kinds of totals:

- While requests waited at both of two scrapes, the engine was busy all the time between them: its rate is the tokens
  computed in that time. Decodes that shared its steps are in it, as they will be for the next request.
- Otherwise from the computed tokens of answered requests and the seconds that their prefills took. Prefills that
  overlap make it look slower than it is, which is why this is not used while requests wait. Nor is it for an engine
  that gets prompts from others, which are counted as computed, in no time.

Neither is measured from little work: overhead dominates it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct

MIN_TRAINING_TOKENS = 128
"""Least uncached work that is measured: with less, overhead dominates."""
MIN_BUSY_S = 2.0
"""Least time between measured scrapes: an engine counts tokens when a prompt is done, so a long prompt that began
earlier would look like great speed."""
MIN_STEPS = 64
"""Least steps that are measured: fewer say little of a step's length, and the shortest ever seen is remembered."""
ASSUMED_PROMPT_TOKENS = 512.0
"""Length of a waiting request's prompt where neither picks nor the engine say how long prompts are."""
MIN_TRANSFER_TOKENS = 1024
"""Least tokens of prompts from other engines that are measured."""
MOST_RATE = 1e7
"""Tokens per second. A higher rate is a mistake, and would be assumed for all new engines."""

Totals: TypeAlias = tuple[float, float]


class ScrapedLoad(Struct, frozen=True):
    """The values of one page. Zeros and `None` mean "not reported". `kv_usage` is the share of `tokens_total` that
    running requests hold; `adapters` have running requests. For the totals see `model_server_metrics.MetricNames`.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    tokens_total: int = 0
    computed_tokens: float | None = None
    prompts: Totals | None = None
    prefills: Totals | None = None
    steps: Totals | None = None
    transfers: Totals | None = None
    adapters: frozenset[str] | None = None


@dataclass(slots=True)
class Growth:
    """The growth of two totals since the last result; small steps add up.

    >>> growth = Growth()
    >>> [growth.step(totals, least=10) for totals in ((100, 1), (105, 2), (112, 3), (3, 0), (20, 5))]
    [None, None, (12, 2), None, (17, 5)]
    """

    base: Totals | None = None

    def step(self, totals: Totals | None, least: float, least_second: float = 0.0) -> Totals | None:
        """Return the growth; `None` until both totals have grown by at least these, and if one has become smaller."""
        if totals is None or self.base is None:
            self.base = totals
            return None
        first, second = totals[0] - self.base[0], totals[1] - self.base[1]
        if first < 0 or second < 0:  # the engine restarted: its totals began again
            self.base = totals
            return None
        if first < least or second <= 0 or second < least_second:
            return None
        self.base = totals
        return first, second


@dataclass(slots=True)
class ScrapedTotals:
    """The state derived from the totals of one engine."""

    step_s: float = 0.0
    """Seconds between two tokens of a request, as last measured."""
    prompt_tokens: float = 0.0
    """Tokens computed for each recently answered request."""
    transfer_s: float = 0.0
    """Seconds for each token of prompts that came from another engine, as last measured."""
    _waited: bool = False
    _busy: Growth = field(default_factory=Growth)
    _prompts: Growth = field(default_factory=Growth)
    _prefills: Growth = field(default_factory=Growth)
    _steps: Growth = field(default_factory=Growth)
    _transfers: Growth = field(default_factory=Growth)

    def on_scrape(self, load: ScrapedLoad, at: float) -> float | None:
        """Take a scrape made at `at`; return prefill tokens per second, if they could be measured."""
        if (prompts := self._prompts.step(load.prompts, least=1)) is not None:
            self.prompt_tokens = prompts[1] / prompts[0]
        if (steps := self._steps.step(load.steps, least=MIN_STEPS)) is not None:
            self.step_s = steps[1] / steps[0]
        if (moved := self._transfers.step(load.transfers, least=MIN_TRANSFER_TOKENS)) is not None:
            self.transfer_s = moved[1] / moved[0]
        measured = self._prefills.step(load.prefills, least=MIN_TRAINING_TOKENS)
        computed = None if load.computed_tokens is None else (load.computed_tokens, at)
        if self._waited and load.waiting:
            measured = self._busy.step(computed, MIN_TRAINING_TOKENS, MIN_BUSY_S)
        else:
            self._busy.base = computed
            if self.prompt_tokens < MIN_TRAINING_TOKENS or (load.transfers is not None and load.transfers[0] > 0):
                measured = None
        self._waited = load.waiting > 0
        if measured is None or measured[0] > MOST_RATE * measured[1]:
            return None
        return measured[0] / measured[1]
