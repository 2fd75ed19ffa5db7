"""One endpoint of the fleet: what is known of it, and its tasks."""

from __future__ import annotations

import asyncio

from treeline_epp.endpoints.rank_loads import RankLoads
from treeline_epp.endpoints.scraper import Scraper
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.watcher import EngineClient, EngineState, EngineWatcher
from treeline_epp.keyers.prompt_keyer import PromptKeyer
from treeline_epp.kvevents.hearing import Hearing
from treeline_epp.kvevents.subscription import KvSubscription


class Member:
    """See the module. The fleet writes it."""

    def __init__(self, spec: EndpointSpec, client: EngineClient, watcher: EngineWatcher, scraper: Scraper) -> None:
        self.spec = spec
        self.client = client
        self.watcher = watcher
        self.scraper = scraper
        # As the picker has it: with models, and the process's epoch.
        self.registered: EndpointSpec | None = None
        self.follows = False  # publishes events, and so counts for readiness only when they have been applied
        self.subscriptions: dict[int, KvSubscription] = {}  # by rank
        self.hearing = Hearing()
        self.rank_loads = RankLoads()
        self.keyer: PromptKeyer | None = None  # as its events are read and its requests are keyed
        self.keyer_problem: str | None = None  # why its own tokenizer cannot be had
        self.reports_draining = False
        self.reports_adapters: list[str] = []  # that it has loaded, as its last report names them
        self.ready, self.draining = spec.ready, spec.draining  # as discovery says; may change while it lives
        self.tasks: list[asyncio.Task[None]] = []
        self.follower: asyncio.Task[None] | None = None

    @property
    def caught_up(self) -> bool:
        """Is all applied that its publishers are known to have published?"""
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
