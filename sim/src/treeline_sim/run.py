"""Runs of a trace on a fleet, with policies by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from treeline_sim.figures import Figures, figures_of
from treeline_sim.model.engine import Engine, EngineConfig
from treeline_sim.model.presets import DEFAULT, PRESETS
from treeline_sim.picker_core import PickerCore, policies
from treeline_sim.routers import ORACLES, Router, TraceRequest
from treeline_sim.simulation import NO_FAULTS, Faults, FleetConfig, Sharing, Simulation
from treeline_sim.traces.base import Draw, Trace
from treeline_sim.traces.mooncake import read_mooncake

FLEET = 8
"""Number of endpoints for which traces define their rates."""


@dataclass(frozen=True)
class Plan:
    """The settings of a simulation. Zeros: the values of the trace and the preset. `trace` may be a file in Mooncake's
    format. Without `sharing` no endpoint computes prompts for another one, or gives its pages.
    """

    trace: Trace | Path
    endpoints: int = FLEET
    pickers: int = 1
    seed: int = 1
    preset: str = DEFAULT
    requests: int = 0
    rate: float = 0.0
    speedup: float = 1.0
    kv_tokens: int = 0
    block_size: int = 0
    news_s: float = 0.002
    faults: Faults = NO_FAULTS
    sharing: Sharing | None = None

    @property
    def engine(self) -> EngineConfig:
        """The engine of each endpoint."""
        engine = PRESETS[self.preset].engine
        kv_tokens = self.kv_tokens or engine.kv_tokens
        if not self.kv_tokens and isinstance(self.trace, Trace) and self.trace.pressure:
            kv_tokens = int(self.trace.working_set_tokens / self.trace.pressure / self.endpoints)
        return replace(engine, kv_tokens=kv_tokens, block_size=self.block_size or engine.block_size)

    @property
    def fleet(self) -> FleetConfig:
        """The fleet. Raises ValueError for impossible settings."""
        slower = self.trace.slower if isinstance(self.trace, Trace) else (1.0,)
        fleet = FleetConfig(self.engine, self.endpoints, self.pickers, self.seed, faults=self.faults, slower=slower)
        return replace(fleet, news_s=self.news_s, sharing=self.sharing or Sharing())

    @property
    def total(self) -> int | None:
        """The number of requests; None if only the file knows."""
        if isinstance(self.trace, Trace):
            return self.requests or self.trace.requests
        return self.requests or None

    def generate(self) -> Iterator[TraceRequest]:
        """Yield the requests, the same each time. Raises TraceError and OSError when reading a file."""
        size = self.engine.block_size
        if isinstance(self.trace, Trace):
            rate = self.rate or self.trace.rate * PRESETS[self.preset].scale * self.endpoints / FLEET
            return islice(self.trace.generate(Draw(self.seed, size, rate)), self.total)
        return islice(read_mooncake(self.trace, size, self.seed, self.speedup), self.total)


def known_policies() -> list[str]:
    """Return the names of the picker's policies, its default first, and of the oracles."""
    return [*policies(), *ORACLES]


def simulate(plan: Plan, policy: str, progress: Callable[[int], None] = lambda done: None) -> Figures:
    """Run the trace with one policy. Raises ValueError for an impossible fleet, and the errors of `Plan.generate`."""

    def make(engines: Sequence[Engine | None], number: int) -> Router:
        if policy in ORACLES:
            return ORACLES[policy](engines, random.Random(f"{policy} {plan.seed} {number}"))
        return PickerCore(policy, plan.endpoints, 1000 * plan.seed + number, plan.sharing)

    return figures_of(policy, Simulation(plan.fleet, make).run(plan.generate(), progress))
