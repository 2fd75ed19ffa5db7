"""The endpoints of this picker, from discovery to the picker: the one owner of who is known, ready, draining or gone.

Each discovered endpoint has a *member* with two tasks: a watcher that asks the engine how it is, and a follower that
gets its tokenizer and listens to its publisher. Everything is level-triggered: a task reports what is, and the fleet
makes picker, catalog and EDS agree with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

import httpx
import zmq.asyncio
from treeline_wire.load import LoadStat, TreelineLoad
from treeline_wire.security import CurveKeys
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.catalog import Catalog, Renderer
from treeline_epp.eds import Eds
from treeline_epp.endpoint import EndpointSpec
from treeline_epp.engines import EngineClient, EngineError, EngineInfo, EngineState, EngineWatcher
from treeline_epp.metrics import Sample
from treeline_epp.picker import Picker
from treeline_epp.publisher import Action, State
from treeline_epp.subscriber import Load, Stats, Subscriber, Wiring

log = logging.getLogger(__name__)

SETTLE_S = 2.0
"""Readiness waits at most this long for engines that do not answer and for publishers that do not catch up."""
_BEAT_S = 0.05


class Member:
    """One endpoint and its tasks."""

    def __init__(self, spec: EndpointSpec, watcher: EngineWatcher) -> None:
        self.spec = spec
        self.watcher = watcher
        self.registered: EndpointSpec | None = (
            None  # as the picker has it: with models, and the process's epoch
        )
        self.follows = False  # has a publisher whose state counts for readiness
        self.reports_draining = False
        self.ready, self.draining = spec.ready, spec.draining  # as discovery says; may change while it lives
        self.tasks: list[asyncio.Task[None]] = []
        self.follower: asyncio.Task[None] | None = None

    @property
    def state(self) -> EngineState:
        """The engine's state as the watcher sees it; draining as soon as its load report or discovery says so."""
        state = self.watcher.state
        if state is not EngineState.READY:
            return state
        if self.draining or self.reports_draining:
            return EngineState.DRAINING
        return EngineState.READY if self.ready else EngineState.UNREADY


class Fleet:
    """See the module. ``bundle`` is a tokenizer given by hand; it is then used for every engine. ``on_gone`` hears
    the name of every endpoint that discovery has dropped."""

    def __init__(
        self,
        picker: Picker,
        catalog: Catalog,
        eds: Eds,
        http: httpx.AsyncClient,
        *,
        curve: CurveKeys | None = None,
        bundle: TokenizerBundle | None = None,
        on_gone: Callable[[str], None] = lambda _name: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = Stats()
        self._picker = picker
        self._catalog = catalog
        self._eds = eds
        self._http = http
        self._curve = curve
        self._bundle = bundle
        self._on_gone = on_gone
        self._clock = clock
        self._zmq = zmq.asyncio.Context()
        self._members: dict[str, Member] = {}
        self._past: Counter[str] = Counter()
        self._discovered = asyncio.Event()
        self._beat = asyncio.Event()
        self._fetching: dict[str, asyncio.Lock] = {}
        eds.on_ack = self._select

    # --- running ------------------------------------------------------------------------------------------------------

    async def run(self, source: AsyncIterator[tuple[EndpointSpec, ...]]) -> None:
        """Follow discovery until cancelled. Raises what discovery raises."""
        ticking = asyncio.create_task(self._tick())
        try:
            async for specs in source:
                await self._apply(specs)
                self._discovered.set()
            await ticking  # a source of fixed endpoints ends; the fleet does not
        finally:
            ticking.cancel()
            for name in list(self._members):
                await self._remove(name)
            self._zmq.destroy(linger=0)

    async def settle(self) -> None:
        """Return when requests can be decided well: discovery has spoken, engines were asked, publishers caught up.

        The last two are waited for no longer than :data:`SETTLE_S`. EDS answers start in between.
        """
        await self._discovered.wait()
        deadline = self._clock() + SETTLE_S
        members = list(self._members.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                for member in members:
                    await member.watcher.probed.wait()
        self._eds.set_synced()
        while self._clock() < deadline and not self._caught_up():
            await self._beat.wait()

    def kick(self, name: str) -> None:
        """A request suggests that this endpoint is in trouble: ask it now."""
        if (member := self._members.get(name)) is not None:
            member.watcher.kick()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            self._picker.on_tick(self._clock())
            self._select()
            self._beat.set()
            self._beat = asyncio.Event()

    def _caught_up(self) -> bool:
        for name, member in self._members.items():
            if member.state is not EngineState.READY:
                continue
            endpoint = self._picker.endpoints.get(name)
            if endpoint is None or not endpoint.ready:
                return False
            if member.follows and (endpoint.publisher is None or endpoint.publisher.state is not State.LIVE):
                return False
        return True

    # --- membership ---------------------------------------------------------------------------------------------------

    async def _apply(self, specs: Sequence[EndpointSpec]) -> None:
        """Make the members equal the list."""
        wanted = {spec.name: spec for spec in specs}
        for name, member in list(self._members.items()):
            spec = wanted.get(name)
            if spec is None or spec.identity != member.spec.identity:
                await self._remove(name)
        for name, spec in wanted.items():
            member = self._members.get(name) or self._add(spec)
            member.ready, member.draining = spec.ready, spec.draining
        self._announce()

    def _add(self, spec: EndpointSpec) -> Member:
        client = EngineClient(self._http, spec.address)

        async def report(state: EngineState, info: EngineInfo | None) -> None:
            self._on_report(member, client, state, info)

        member = Member(spec, EngineWatcher(spec, client, report))
        self._members[spec.name] = member
        member.tasks.append(self._spawn(member.watcher.run, f"watch {spec.name}"))
        return member

    async def _remove(self, name: str) -> None:
        member = self._members.pop(name)
        self._remember(name)
        tasks = [*member.tasks, *([member.follower] if member.follower else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._picker.remove_endpoint(name)
        self._catalog.remove_endpoint(name)
        self._on_gone(name)

    def _spawn(self, run: Callable[[], Coroutine[Any, Any, None]], what: str) -> asyncio.Task[None]:
        """A task that a defect restarts instead of ending: one endpoint must not take the picker with it."""

        async def forever() -> None:
            while True:
                try:
                    return await run()
                except Exception:
                    log.exception("%s failed; it starts again", what)
                    await asyncio.sleep(1.0)

        return asyncio.create_task(forever(), name=what)

    # --- what engines say ---------------------------------------------------------------------------------------------

    def _on_report(
        self, member: Member, client: EngineClient, state: EngineState, info: EngineInfo | None
    ) -> None:
        if state is EngineState.READY and info is not None:
            self._register(member, client, info)
        self._announce()

    def _register(self, member: Member, client: EngineClient, info: EngineInfo) -> None:
        """Make the picker know a ready engine; a new process behind the name starts from nothing."""
        known = member.registered
        spec = dataclasses.replace(member.spec, models=info.models, uid=f"{member.spec.uid}/{info.epoch}")
        if spec == known:
            return
        if known is None or known.uid != spec.uid:
            self._remember(spec.name)
        self._picker.add_endpoint(spec, ready=False)
        member.registered = spec
        renderer = self._catalog.renderer(
            info.fingerprint if self._bundle is None else self._bundle.fingerprint
        )
        self._catalog.set_endpoint(
            spec.name, spec.pool, spec.models, renderer.fingerprint if renderer else None
        )
        if known is not None and known.uid == spec.uid:
            return  # other models, the same process
        member.reports_draining = False
        if member.follower is not None:
            member.follower.cancel()
        member.follows = info.source is not None and info.source.events_port is not None
        member.follower = self._spawn(lambda: self._follow(member, client, info), f"follow {spec.name}")

    def _remember(self, name: str) -> None:
        """Keep the counts of a publisher that the picker is about to forget: counters must not fall."""
        endpoint = self._picker.endpoints.get(name)
        if endpoint is not None and endpoint.publisher is not None:
            self._past.update(endpoint.publisher.counts)

    async def _follow(self, member: Member, client: EngineClient, info: EngineInfo) -> None:
        """Get the engine's tokenizer, then listen to its publisher for as long as it is the same process."""
        spec = member.registered
        assert spec is not None
        name = spec.name
        renderer = await self._renderer(client, info)
        fingerprint = renderer.fingerprint if renderer is not None else None
        self._catalog.set_endpoint(name, spec.pool, spec.models, fingerprint)
        if info.source is None:
            return
        if info.source.curve and self._curve is None:
            log.error("endpoint %s publishes with keys; give this picker --curve-dir to listen to it", name)
            member.follows = False
            return
        endpoint = self._picker.endpoints[name]

        def on_load(load: Load) -> Sequence[Action]:
            return self._on_load(member, load)

        wiring = Wiring(
            publisher=self._picker.publisher(name, renderer.keys if renderer is not None else None),
            on_load=on_load,
            on_trouble=member.watcher.kick,
            in_flight=lambda: len(endpoint.load.reservations),
            stats=self.stats,
            clock=self._clock,
        )
        await Subscriber(self._zmq, info.source, wiring, self._curve if info.source.curve else None).run()

    async def _renderer(self, client: EngineClient, info: EngineInfo) -> Renderer | None:
        """The renderer for an engine; its tokenizer is fetched once for all engines with the same fingerprint."""
        if self._bundle is not None:
            return await asyncio.to_thread(self._catalog.add_renderer, self._bundle)
        if not info.fingerprint:
            return None
        async with self._fetching.setdefault(info.fingerprint, asyncio.Lock()):
            pause = 0.2
            while (known := self._catalog.renderer(info.fingerprint)) is None:
                try:
                    bundle = await client.tokenizer()
                    if bundle.fingerprint != info.fingerprint:
                        log.error("tokenizer %s was announced, %s came", info.fingerprint, bundle.fingerprint)
                        return None
                    return await asyncio.to_thread(self._catalog.add_renderer, bundle)
                except EngineError as error:
                    log.warning("no tokenizer yet: %s", error)
                    await asyncio.sleep(pause)
                    pause = min(5.0, 2 * pause)
            return known

    def _on_load(self, member: Member, load: LoadStat | TreelineLoad) -> Sequence[Action]:
        draining = isinstance(load, TreelineLoad) and load.draining
        if draining != member.reports_draining:
            member.reports_draining = draining
            self._announce()
            member.watcher.kick()
        return self._picker.on_load(member.spec.name, load, self._clock())

    # --- what Envoy and the picker are told ---------------------------------------------------------------------------

    def _announce(self) -> None:
        """Tell Envoy which endpoints there are, then let the picker choose among those that Envoy knows."""
        self._eds.announce(
            {
                member.spec.address: member.state is EngineState.DRAINING
                for member in self._members.values()
                if member.state in (EngineState.READY, EngineState.DRAINING)
            }
        )
        self._select()

    def _select(self) -> None:
        for name, member in self._members.items():
            if member.registered is not None:
                ready = member.state is EngineState.READY and self._eds.selectable(member.spec.address)
                self._picker.set_ready(name, ready)
                self._picker.set_draining(name, member.state is EngineState.DRAINING)

    # --- looking ------------------------------------------------------------------------------------------------------

    def samples(self) -> Iterator[Sample]:
        """Gauges and counters for the metrics page."""
        states = Counter(member.state for member in self._members.values())
        for state in EngineState:
            yield "gauge", "endpoints", "Endpoints by state.", {"state": state.value}, states[state]
        publishers = Counter(
            e.publisher.state for e in self._picker.endpoints.values() if e.publisher is not None
        )
        for known in State:
            yield "gauge", "publishers", "Publishers by state.", {"state": known.value}, publishers[known]
        failing = sum(e.breaker.tripped for e in self._picker.endpoints.values())
        yield (
            "gauge",
            "endpoints_failing",
            "Endpoints left out because they answer errors alone.",
            {},
            failing,
        )
        stats, eds = self.stats, self._eds.state
        events = Counter(self._past)
        for endpoint in self._picker.endpoints.values():
            if endpoint.publisher is not None:
                events.update(endpoint.publisher.counts)
        for event, count in events.items():
            yield "counter", "publisher", "What publishers went through, by event.", {"event": event}, count
        for what, size in self._picker.index.totals().items():
            yield "gauge", f"tree_{what}", "Size of the prefix index.", {}, size
        yield "counter", "events", "KV events received.", {}, stats.events
        yield "counter", "event_batches", "KV event batches received.", {}, stats.batches
        yield "counter", "load_reports", "Load reports received.", {}, stats.loads
        yield (
            "counter",
            "publisher_disconnects",
            "Sessions with publishers that ended.",
            {},
            stats.disconnects,
        )
        for reason, count in stats.rejected.items():
            yield "counter", "rejected", "Messages and events refused, by reason.", {"reason": reason}, count
        yield "gauge", "eds_connected", "Envoys subscribed to endpoints.", {}, eds.connected()
        yield "gauge", "eds_pending", "Envoys that have not acknowledged the newest list.", {}, eds.pending()
        yield "counter", "eds_acks", "Acknowledged endpoint lists.", {}, eds.acks
        yield "counter", "eds_rejections", "Endpoint lists that an Envoy rejected.", {}, eds.rejections

    def listing(self) -> dict[str, object]:
        """Pools with their models and endpoints, as the operator reads them: what could be picked now.

        ``in_flight`` is null where it is not known; ``cached_tokens`` is what the tree knows of.
        """
        now = self._clock()
        endpoints: dict[str, list[dict[str, object]]] = {}
        for name, member in sorted(self._members.items()):
            known = self._picker.endpoints.get(name)
            endpoints.setdefault(member.spec.pool, []).append(
                {
                    "name": name,
                    "address": member.spec.address,
                    "ready": known is not None and known.eligible,
                    "draining": member.state is EngineState.DRAINING or member.draining,
                    "in_flight": known.load.in_flight(now) if known is not None else None,
                    "cached_tokens": known.pod.blocks * known.pod.block_size if known is not None else 0,
                }
            )
        models = self._catalog.models_by_pool()
        pools = {
            pool: {"models": models.get(pool, []), "endpoints": endpoints.get(pool, [])}
            for pool in dict.fromkeys([*models, *endpoints])
        }
        return {"synced": self._discovered.is_set(), "pools": pools}

    def describe(self) -> list[dict[str, object]]:
        """The members, for the debug page."""
        return [self._describe(name, member) for name, member in sorted(self._members.items())]

    def _describe(self, name: str, member: Member) -> dict[str, object]:
        endpoint = self._picker.endpoints.get(name)
        out: dict[str, object] = {
            "name": name,
            "address": member.spec.address,
            "pool": member.spec.pool,
            "state": member.state.value,
            "models": member.registered.models if member.registered is not None else (),
        }
        if endpoint is not None:
            out["selectable"] = endpoint.eligible
            out["failing"] = endpoint.breaker.tripped
            out["silent"] = endpoint.load.silent(self._clock())
            out["reservations"] = len(endpoint.load.reservations)
            out["reserved_tokens"] = endpoint.load.reservations.tokens
            out["publisher"] = endpoint.publisher.state.value if endpoint.publisher is not None else None
        return out
