"""The endpoints of this picker. The fleet alone decides which of them are known, ready, draining or gone.

Each discovered endpoint has a *member* with two tasks: a watcher that asks the engine for its state, and a follower
that gets its tokenizer and listens to its publisher. Everything is level-triggered: a task reports the present state,
and the fleet makes picker, registry and EDS agree with it. A server whose requests may name a data-parallel rank is one
member, and one endpoint of the picker for each rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from treeline_wire.frames import Request
from treeline_wire.load import TreelineLoad
from treeline_wire.security import CurveKeys

from treeline_epp.endpoints.adapters.base import EngineInfo, KvSource, LoadReports
from treeline_epp.endpoints.engine_http import EngineKey
from treeline_epp.endpoints.http_client import HttpClient
from treeline_epp.endpoints.model_server_metrics import MetricNames
from treeline_epp.endpoints.scraped import ScrapedLoad
from treeline_epp.endpoints.scraper import Scraper, Scraping
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.transfer import Role
from treeline_epp.endpoints.watcher import EngineClient, EngineState, EngineWatcher, ProbePace, Sweep
from treeline_epp.index.pods import Pod
from treeline_epp.keyers.prompt_keyer import PromptKeyer
from treeline_epp.kvevents.connection import KvCallbacks, KvConnection, KvStats, Load, Ticker, new_context
from treeline_epp.kvevents.hearing import Hearing
from treeline_epp.kvevents.item_events import ItemEvents
from treeline_epp.kvevents.subscription import KvSubscription
from treeline_epp.member import Member, RankLoads
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.model_registry import Adapters, ModelRegistry
from treeline_epp.tokenizers.engine_keyers import EngineKeyers
from treeline_epp.tokenizers.watch import TokenizerSource, TokenizerSources
from treeline_epp.way_judge import WayJudge
from treeline_epp.xds.eds import Eds

log = logging.getLogger(__name__)

READY_WAIT_S = 2.0
"""Longest that readiness waits for engines that do not answer and for publishers that do not catch up."""
_BEAT_S = 0.05
_AT_ONCE = 16
"""Endpoints that are added or removed before other tasks get a turn: each takes half a millisecond."""
_SLICE = 128
"""Endpoints that are checked before other tasks get a turn: a millisecond."""
_CHECKED_EACH_SECOND = 250
"""Most subscriptions that check for lost events every second; with more, each checks less often."""


class Fleet:
    """The endpoints and their tasks; see the module. `tokenizers` are configured ones, which are preferred to the
    engines' own; `key_file` has the API key of engines that have none of their own. `on_gone` is called with the name
    of every endpoint that discovery has dropped.
    """

    def __init__(
        self,
        picker: Picker,
        registry: ModelRegistry,
        eds: Eds,
        *,
        curve: CurveKeys | None = None,
        tokenizers: TokenizerSources | None = None,
        key_file: Path | None = None,
        on_gone: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self.stats = KvStats()
        self.picker = picker
        self.registry = registry
        self.eds = eds
        self._curve = curve
        self._key_file = key_file
        self._keyers = EngineKeyers(registry, tokenizers or TokenizerSources())
        self._judge = WayJudge(picker, self._keyers, self.stats, has_curve=curve is not None)
        self.ways = self._judge.ways
        self._on_gone = on_gone
        self._zmq = new_context()
        self._ticker = Ticker()
        self._pace = ProbePace()
        self._sweep = Sweep()
        self.scraping = Scraping()
        self.members: dict[str, Member] = {}
        self.past: Counter[str] = Counter()  # counts of ended subscriptions: counters must not fall
        self.discovered = asyncio.Event()
        self._beat = asyncio.Event()
        self._waiting: set[str] = set()  # ready, but not yet known to Envoy
        self._changed = asyncio.Event()  # endpoints, or Envoys' acknowledgements, since the last list
        eds.on_ack = self._on_ack

    # --- running ------------------------------------------------------------------------------------------------------

    async def run(self, source: AsyncIterator[tuple[EndpointSpec, ...]]) -> None:
        """Follow discovery until cancelled. Raises the errors of discovery."""
        ticking = asyncio.create_task(self._tick())
        publishers = asyncio.create_task(self._ticker.run())
        tokenizers = self._spawn(lambda: self._keyers.sources.run(self._on_tokenizer), "tokenizers")
        announcing = self._spawn(self._announce, "announce")
        try:
            async for specs in source:
                await self._apply(specs)
                self.discovered.set()
            await ticking  # a source of fixed endpoints ends; the fleet does not
        finally:
            ticking.cancel()
            publishers.cancel()
            tokenizers.cancel()
            announcing.cancel()
            await asyncio.gather(*map(self._halt, self.members.values()))
            await self.scraping.http.close()
            self._zmq.destroy(linger=0)

    async def wait_until_ready(self) -> None:
        """Return when requests can be decided well: discovery has given a list, engines were asked, publishers caught
        up.

        The last two are waited for no longer than `READY_WAIT_S`. EDS answers start in between.
        """
        await self.discovered.wait()
        deadline = time.monotonic() + READY_WAIT_S
        members = list(self.members.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_WAIT_S):
                for member in members:
                    await member.watcher.probed.wait()
        self.eds.set_synced()
        while time.monotonic() < deadline and not await self._caught_up():
            await self._beat.wait()

    def probe_now(self, name: str) -> None:
        """Probe an endpoint now: a request suggests that it is in trouble."""
        if (member := self.members.get(name)) is not None:
            member.watcher.probe_now()

    def client(self, name: str) -> HttpClient | None:
        """Return the client for the engine of that name, with its API key; None if it has gone."""
        member = self.members.get(name)
        return None if member is None else member.client.http

    def ask_for_models(self) -> None:
        """Ask engines for their models in the background: a request named an unknown one."""
        if self._sweep.due(now := time.monotonic()):
            self._sweep.begin(list(self.members), now)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            self.picker.on_tick(time.monotonic())
            self._look_for_adapters()
            for name in self._sweep.take():
                self.probe_now(name)
            now = time.monotonic()
            due = self._judge.due(now)
            async for members in self._slices():
                self._select(member.spec.name for member in members if member.spec.name in self._waiting)
                self._judge.look(members, now, due=due)
            self.ways.tell()
            self._beat.set()
            self._beat = asyncio.Event()

    def _look_for_adapters(self) -> None:
        """Probe engines whose events name a new adapter: it was loaded after they were last asked for their models."""
        news = self.picker.index.new_adapters
        if news:
            for endpoint in self.picker.endpoints.values():
                if not news.isdisjoint(endpoint.pods):
                    self.probe_now(endpoint.spec.server)
            news.clear()

    async def _slices(self) -> AsyncIterator[list[Member]]:
        """Yield the members in slices, without those removed meanwhile; between two slices other tasks get a turn."""
        members = list(self.members.values())
        for at in range(0, len(members), _SLICE):
            yield [one for one in members[at : at + _SLICE] if self.members.get(one.spec.name) is one]
            await asyncio.sleep(0)

    async def _caught_up(self) -> bool:
        async for members in self._slices():
            for member in members:
                if member.state is not EngineState.READY:
                    continue
                endpoint = self.picker.endpoints.get(member.spec.name)
                if endpoint is None or not endpoint.ready or not member.caught_up:
                    return False
        return True

    # --- membership ---------------------------------------------------------------------------------------------------

    async def _apply(self, specs: Sequence[EndpointSpec]) -> None:
        """Make the members equal to the list."""
        wanted = {spec.name: spec for spec in specs}
        gone = []
        async for members in self._slices():
            for member in members:
                other = wanted.get(member.spec.name)
                if other is None or other.identity != member.spec.identity:
                    gone.append(member.spec.name)
        for at in range(0, len(gone), _AT_ONCE):
            await asyncio.gather(*map(self._remove, gone[at : at + _AT_ONCE]))
        work = 0
        for name, spec in wanted.items():
            known = self.members.get(name)
            member = known or self._add(spec)
            if spec.ready and not member.ready:
                member.watcher.probe_now()
            member.ready, member.draining = spec.ready, spec.draining
            work += 1 if known else _SLICE // _AT_ONCE
            if work >= _SLICE:
                work = 0
                await asyncio.sleep(0)
        self._changed.set()

    def _announce_soon(self, name: str) -> None:
        """Announce a changed endpoint to Envoy soon. A list costs time for each endpoint, so many changes share one."""
        self._select((name,))
        self._changed.set()

    def _add(self, spec: EndpointSpec) -> Member:
        key_file = spec.key_file or self._key_file
        http = HttpClient() if key_file is None else HttpClient(EngineKey(key_file))
        client = EngineClient(http, spec.address, spec.engine, spec.kv, apart=spec.role is not Role.BOTH)
        watcher = EngineWatcher(spec, client, lambda state, info: self._on_report(member, state, info), self._pace)
        scraper = Scraper(spec.name, spec.address, self.scraping, lambda loads, at: self._on_scraped(member, loads, at))
        member = Member(spec, client, watcher, scraper)
        self.members[spec.name] = member
        member.tasks.append(self._spawn(member.watcher.run, f"watch {spec.name}"))
        member.tasks.append(self._spawn(member.scraper.run, f"scrape {spec.name}"))
        return member

    async def _remove(self, name: str) -> None:
        member = self.members.pop(name)
        self._unsubscribe(member)
        await self._halt(member)
        self._forget(member.ranks or (member.spec,))
        self.registry.remove_endpoint(name)
        self.ways.remove(name)

    def _forget(self, endpoints: Iterable[EndpointSpec]) -> None:
        for spec in endpoints:
            self.picker.remove_endpoint(spec.name)
            self._on_gone(spec.name)

    async def _halt(self, member: Member) -> None:
        tasks = [*member.tasks, *([member.follower] if member.follower else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await member.client.http.close()

    def _spawn(self, run: Callable[[], Coroutine[Any, Any, None]], what: str) -> asyncio.Task[None]:
        """Start a task that begins again after a defect: one endpoint must not take the picker with it."""

        async def forever() -> None:
            while True:
                try:
                    return await run()
                except Exception:
                    log.exception("%s failed; it starts again", what)
                    await asyncio.sleep(1.0)

        return asyncio.create_task(forever(), name=what)

    # --- reports of engines -------------------------------------------------------------------------------------------

    def _on_report(self, member: Member, state: EngineState, info: EngineInfo | None) -> None:
        if state is EngineState.READY and info is not None:
            self._register(member, info)
        member.scraper.follow(_scraped(member.client, state, info), [one.rank for one in member.ranks] or (None,))
        self._announce_soon(member.spec.name)

    def _register(self, member: Member, info: EngineInfo) -> None:
        """Register a ready engine with the picker; a new process behind the name begins without history."""
        known = member.registered
        spec = info.registered(member.spec)
        if spec == known:
            return
        if known is None or known.uid != spec.uid:
            self._unsubscribe(member)
        before, member.ranks = member.ranks, info.endpoints(spec)
        self._forget(gone for gone in before if gone.name not in {one.name for one in member.ranks})
        for one in member.ranks:
            self.picker.add_endpoint(one, ready=False, ranks=max(1, len(info.sources)) if one.rank is None else 1)
        member.registered = spec
        self._select([spec.name])  # with another role it may be one that Envoy does not know
        self._set_served(spec, info, self._keyers.known(spec, info))
        if known is not None and known.uid == spec.uid:  # other models, the same process
            if self._keyers.source(known) is not self._keyers.source(spec):
                self._follow_anew(member, info)
            return
        member.reports_draining, member.reports_adapters = set(), ([], {})
        self._start_following(member, info)

    def _start_following(self, member: Member, info: EngineInfo) -> None:
        if member.follower is not None:
            member.follower.cancel()
        member.rank_loads = RankLoads()
        member.keyer = member.keyer_problem = None
        member.follows = info.publishes
        member.hearing = Hearing()
        member.follower = self._spawn(lambda: self._follow(member, info), f"follow {member.spec.name}")

    def _follow_anew(self, member: Member, info: EngineInfo) -> None:
        """Follow an engine again from the beginning: its tokenizer changed, and with it the keys of its entries."""
        self._unsubscribe(member)
        for endpoint in self.picker.present(member.ranks):
            for pod in endpoint.pods:
                self.picker.index.clear(pod)
        self._start_following(member, info)

    def _on_tokenizer(self, source: TokenizerSource) -> None:
        """Handle a change of a tokenizer source: a new tokenizer, or a new problem."""
        concerned, respelled = set(), set()
        for name, member in self.members.items():
            spec, info, used = member.registered, member.watcher.info, member.keyer
            if spec is None or info is None or self._keyers.source(spec) is not source:
                continue
            if source.bundle is None or (used is not None and used.fingerprint == source.bundle.fingerprint):
                self._judge.judge(member, info)
                continue
            concerned.add(name)
            if used is not None and (endpoint := self.picker.endpoints.get(name)) is not None:
                respelled.add(endpoint.pod.scope)
        for scope in respelled:
            self.picker.index.respell(scope)
        for name, member in self.members.items():
            info, endpoint = member.watcher.info, self.picker.endpoints.get(name)
            in_scope = endpoint is not None and endpoint.pod.scope in respelled
            if info is not None and member.registered is not None and (name in concerned or in_scope):
                self._follow_anew(member, info)

    def _on_problem(self, member: Member, info: EngineInfo, problem: str) -> None:
        member.keyer_problem = problem
        self._judge.judge(member, info)

    def _set_served(self, spec: EndpointSpec, info: EngineInfo, keyer: PromptKeyer | None) -> None:
        if keyer is not None:
            self.registry.keep_keyer(keyer)
        fingerprint = keyer.fingerprint if keyer is not None else None
        self.registry.set_endpoint(
            spec.name,
            spec.pool,
            spec.models,
            fingerprint,
            isolates_clients=info.isolates_clients,
            adapters=Adapters(info.engine, info.adapters),
        )

    def _unsubscribe(self, member: Member) -> None:
        for subscription in member.subscriptions.values():
            self.past.update(subscription.counts)
        member.subscriptions.clear()

    async def _follow(self, member: Member, info: EngineInfo) -> None:
        """Get the engine's tokenizer, then listen to its publishers for as long as it is the same process."""
        spec = member.registered
        assert spec is not None
        name = spec.name
        keyer = member.keyer = await self._keyers.keyer(
            spec, info, member.client, lambda problem: self._on_problem(member, info, problem)
        )
        # Its models may have changed meanwhile.
        self._set_served(member.registered or spec, member.watcher.info or info, keyer)
        self._judge.judge(member, info)
        if info.encrypted and self._curve is None:
            log.error("endpoint %s publishes with keys; give this picker --curve-dir to listen to it", name)
            member.follows = False
            return
        async with asyncio.TaskGroup() as ranks:
            pods = ((one, pod) for one in self.picker.present(member.ranks) for pod in one.pods)
            for source, (endpoint, pod) in zip(info.sources, pods, strict=False):
                sharing = info.sources if endpoint.spec.rank is None else (source,)
                ranks.create_task(self._listen(member, source, endpoint, pod, keyer, sharing))

    async def _listen(
        self,
        member: Member,
        source: KvSource,
        endpoint: Endpoint,
        pod: Pod,
        keyer: PromptKeyer | None,
        ranks: Sequence[KvSource],
    ) -> None:
        """Follow one rank's publisher until cancelled. `ranks`: those of its endpoint, whose loads add up."""
        # After a defect this task begins again, with the old subscription.
        subscription = member.subscriptions.get(source.rank)
        if subscription is None:
            subscription = member.subscriptions[source.rank] = KvSubscription(
                self.picker.index,
                pod,
                keyer.keys if keyer is not None else None,
                ours=source.hello,
                replays=source.replay_port is not None,
                stretch=lambda: max(1.0, len(self.members) / _CHECKED_EACH_SECOND),
            )
            if keyer is not None and keyer.media is not None:
                subscription.applied.reader = ItemEvents(keyer.media, endpoint.spec.name)
        reporting = [one.rank for one in ranks if one.load_port is not None]
        callbacks = KvCallbacks(
            subscription=subscription,
            on_load=lambda load: self._on_load(member, endpoint.spec.name, source.rank, reporting, load),
            on_trouble=member.watcher.probe_now,
            in_flight=lambda: len(endpoint.load.reservations),
            stats=self.stats,
        )
        await KvConnection(self._zmq, self._ticker, source, callbacks, self._curve if source.curve else None).run()

    def _on_load(
        self, member: Member, endpoint: str, rank: int, reporting: Sequence[int], load: Load
    ) -> Sequence[Request]:
        """Take a load report of one of an endpoint's ranks that send any; return requests for its publisher."""
        now = time.monotonic()
        if isinstance(load, TreelineLoad) and (load.adapters, load.digests) != member.reports_adapters:
            member.reports_adapters = load.adapters, load.digests
            member.watcher.probe_now()
        draining = isinstance(load, TreelineLoad) and load.draining
        if draining != (rank in member.reports_draining):
            member.reports_draining ^= {rank}
            self._announce_soon(member.spec.name)
            member.watcher.probe_now()
        whole = load if isinstance(load, TreelineLoad) else member.rank_loads.take(rank, load, reporting)
        if whole is not None:
            self.picker.on_load(endpoint, whole, now)
        subscription = member.subscriptions.get(rank)
        if subscription is None or not isinstance(load, TreelineLoad):
            return ()
        return subscription.on_heartbeat(load.epoch, None, now)

    def _on_scraped(self, member: Member, loads: Sequence[ScrapedLoad], at: float) -> None:
        for one, load in zip(member.ranks, loads, strict=False):
            self.picker.on_load(one.name, load, at)

    # --- the lists of Envoy and of the picker -------------------------------------------------------------------------

    async def _announce(self) -> None:
        """After each change, send Envoy the list of endpoints; the picker chooses among those that Envoy knows."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            found: dict[str, bool] = {}
            async for members in self._slices():
                for member in members:
                    served = member.registered is None or member.registered.role is not Role.PREFILL
                    if served and (state := member.state) in (EngineState.READY, EngineState.DRAINING):
                        found[member.spec.address] = state is EngineState.DRAINING
            self.eds.announce(found)
            async for members in self._slices():
                self._select(member.spec.name for member in members)
            await asyncio.sleep(_BEAT_S)

    def _on_ack(self) -> None:
        """Handle an acknowledgement of an Envoy: check endpoints that wait for it now, the others at their turn."""
        self._select(islice(self._waiting, _SLICE))
        self._changed.set()

    def _select(self, names: Iterable[str]) -> None:
        """Let the picker choose each of these that is ready and known to Envoy; others wait for a later beat."""
        for name in list(names):
            member = self.members.get(name)
            if member is None or member.registered is None:
                self._waiting.discard(name)
                continue
            known = member.registered.role is Role.PREFILL or self.eds.selectable(member.spec.address)
            ready = member.state is EngineState.READY
            for one in member.ranks:
                self.picker.set_ready(one.name, ready and known)
                self.picker.set_draining(one.name, member.state is EngineState.DRAINING)
            if ready and not known:
                self._waiting.add(name)
            else:
                self._waiting.discard(name)


def _scraped(client: EngineClient, state: EngineState, info: EngineInfo | None) -> tuple[MetricNames, ...]:
    """Return the names to look for in an engine's metrics; none if it pushes its load or cannot be asked."""
    if state not in (EngineState.READY, EngineState.DRAINING) or info is None:
        return ()
    pushes = client.adapter.load is LoadReports.BEATS or any(source.load_port is not None for source in info.sources)
    return () if pushes else client.adapter.metrics
