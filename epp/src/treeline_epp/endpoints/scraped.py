"""What a picker learns from one look after another at an engine's metrics.

Gauges are the load itself. Of totals, which only grow, the growth since an earlier look counts; one that has become
less belongs to another process, and is counted from there. From two kinds of them the prefill rate is measured:

- While requests waited at both ends of the time between two looks, the engine had work all the time: its rate is what
  it computed in that time. Decodes that shared its steps are in it, as they will be for the next request.
- Else by the computed tokens of answered requests and the seconds that their prefills took. Prefills that overlap make
  it look slower than it is, which is why this is not used while requests wait.

Neither is taken from little work: overhead dominates it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct

MIN_TRAINING_TOKENS = 128
"""Less uncached work than this teaches nothing of rates: overhead dominates."""
MIN_BUSY_S = 2.0
"""Tokens are counted when a prompt is done: in less time a long one, begun before, would look like great speed."""
MIN_STEPS = 64
"""Fewer than these say little of how long a step takes, and the shortest ever seen is remembered."""
ASSUMED_PROMPT_TOKENS = 512.0
"""Of a waiting request, where neither picks nor the engine say how long prompts are."""
MOST_RATE = 1e7
"""Tokens per second. More than this is a mistake, and would be taken for the speed of all engines that are new."""

Totals: TypeAlias = tuple[float, float]


class ScrapedLoad(Struct, frozen=True):
    """What one page said. Zeros and `None` mean "not reported". `kv_usage` is the share of `tokens_total` that running
    requests hold. For the totals see `model_server_metrics.MetricNames`."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    tokens_total: int = 0
    computed_tokens: float | None = None
    prompts: Totals | None = None
    prefills: Totals | None = None
    steps: Totals | None = None


@dataclass(slots=True)
class Growth:
    """By how much two totals have grown since they were last asked for; small steps add up.

    >>> growth = Growth()
    >>> [growth.step(totals, least=10) for totals in ((100, 1), (105, 2), (112, 3), (3, 0), (20, 5))]
    [None, None, (12, 2), None, (17, 5)]
    """

    base: Totals | None = None

    def step(self, totals: Totals | None, least: float, least_second: float = 0.0) -> Totals | None:
        """`None` until each has grown, and by these at least; and where one has become less."""
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
    """What the totals of one engine have said so far."""

    step_s: float = 0.0
    """Seconds between two tokens of a request, when it was last seen to generate."""
    prompt_tokens: float = 0.0
    """Computed for an answered request, lately."""
    _waited: bool = False
    _busy: Growth = field(default_factory=Growth)
    _prompts: Growth = field(default_factory=Growth)
    _prefills: Growth = field(default_factory=Growth)
    _steps: Growth = field(default_factory=Growth)

    def on_scrape(self, load: ScrapedLoad, at: float) -> float | None:
        """Take a look made at `at`; returns prefill tokens per second, if they could be measured."""
        if (prompts := self._prompts.step(load.prompts, least=1)) is not None:
            self.prompt_tokens = prompts[1] / prompts[0]
        if (steps := self._steps.step(load.steps, least=MIN_STEPS)) is not None:
            self.step_s = steps[1] / steps[0]
        measured = self._prefills.step(load.prefills, least=MIN_TRAINING_TOKENS)
        computed = None if load.computed_tokens is None else (load.computed_tokens, at)
        if self._waited and load.waiting:
            measured = self._busy.step(computed, MIN_TRAINING_TOKENS, MIN_BUSY_S)
        else:
            self._busy.base = computed
            if self.prompt_tokens < MIN_TRAINING_TOKENS:
                measured = None
        self._waited = load.waiting > 0
        if measured is None or measured[0] > MOST_RATE * measured[1]:
            return None
        return measured[0] / measured[1]
