"""One endpoint of the fleet: its state, and its tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from treeline_wire.load import LoadStat

from treeline_epp.endpoints.scraper import Scraper
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.watcher import EngineClient, EngineState, EngineWatcher
from treeline_epp.keyers.prompt_keyer import PromptKeyer
from treeline_epp.kvevents.hearing import Hearing
from treeline_epp.kvevents.subscription import KvSubscription


class Member:
    """One endpoint of the fleet. Only the fleet changes it."""

    def __init__(self, spec: EndpointSpec, client: EngineClient, watcher: EngineWatcher, scraper: Scraper) -> None:
        self.spec = spec
        self.client = client
        self.watcher = watcher
        self.scraper = scraper
        # The spec that the picker has: with models, and the process's epoch.
        self.registered: EndpointSpec | None = None
        self.ranks: tuple[EndpointSpec, ...] = ()  # the endpoints that it is to the picker: one, or one for each rank
        self.follows = False  # whether it publishes events, which readiness then waits for
        self.subscriptions: dict[int, KvSubscription] = {}  # by rank
        self.hearing = Hearing()
        self.rank_loads = RankLoads()
        self.keyer: PromptKeyer | None = None  # reads its events and makes the keys of its requests
        self.keyer_problem: str | None = None  # why its own tokenizer cannot be used
        self.reports_draining: set[int] = set()  # ranks, by their last reports
        self.reports_adapters: tuple[list[str], dict[str, str]] = [], {}  # loaded ones, and their digests, as reported
        self.ready, self.draining = spec.ready, spec.draining  # from discovery; may change while it lives
        self.tasks: list[asyncio.Task[None]] = []
        self.follower: asyncio.Task[None] | None = None

    @property
    def caught_up(self) -> bool:
        """Whether all batches that its publishers are known to have published are applied."""
        return not self.follows or (
            bool(self.subscriptions) and all(one.live and not one.busy for one in self.subscriptions.values())
        )

    @property
    def state(self) -> EngineState:
        """The engine's state as the watcher sees it; draining as soon as its load report or discovery says so."""
        state = self.watcher.state
        if state is not EngineState.READY:
            return state
        if self.draining or self.reports_draining:
            return EngineState.DRAINING
        return EngineState.READY if self.ready else EngineState.UNREADY


class RankLoads:
    """The last report of each rank, and their sum: ranks work at the same time, so counts add up."""

    def __init__(self) -> None:
        self._last: dict[int, LoadStat] = {}

    def take(self, rank: int, load: LoadStat, ranks: Collection[int]) -> LoadStat | None:
        """Return the load of all ranks, `load` being the newest of `rank`; None until each of `ranks` has reported."""
        if len(ranks) <= 1:
            return load
        self._last[rank] = load
        known = [self._last[other] for other in ranks if other in self._last]
        return _together(known) if len(known) == len(ranks) else None


def _together(loads: list[LoadStat]) -> LoadStat:
    return LoadStat(
        num_running=sum(load.num_running for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        num_tokens=sum(load.num_tokens for load in loads),
        max_total_num_tokens=sum(load.max_total_num_tokens for load in loads),
        num_waiting_uncached_tokens=sum(load.num_waiting_uncached_tokens for load in loads),
        num_total_tokens=sum(load.num_total_tokens for load in loads),
        max_running_requests=sum(load.max_running_requests for load in loads),
        total_prefill_uncached_tokens=sum(load.total_prefill_uncached_tokens for load in loads),
        # Their busy times overlap: the engine's speed is all ranks' tokens by one rank's time.
        total_prefill_busy_us=sum(load.total_prefill_busy_us for load in loads) // len(loads),
    )
