"""The operator as a process: pages first, then the lease, then the watches and the work; and how it ends."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
from treeline_kube.client import Client
from treeline_kube.errors import LostLease
from treeline_kube.yaml_depth import deep_json
from treeline_wire import ports

from treeline_operator.api.parts import API_VERSION
from treeline_operator.controller.downloads import Downloads
from treeline_operator.controller.execute import Executor
from treeline_operator.controller.health import Pages, Vitals
from treeline_operator.controller.informer import Informer, Timing
from treeline_operator.controller.lease import Candidate, Elector, LeaseTiming, own_account
from treeline_operator.controller.metrics import Metrics
from treeline_operator.controller.observe import Observer, keys_for_change
from treeline_operator.controller.picker_probe import PickerProbe
from treeline_operator.controller.pickers import PickerClient
from treeline_operator.controller.queue import Queue
from treeline_operator.controller.reconciler import Reconciler
from treeline_operator.controller.recorder import Recorder
from treeline_operator.controller.scaler import Scaler
from treeline_operator.controller.store import POOL, Change, Store
from treeline_operator.controller.warnings import Warnings
from treeline_operator.names import FIELD_MANAGER, STATUS_MANAGER
from treeline_operator.settings import Settings
from treeline_operator.world import Key, Platform

log = logging.getLogger(__name__)

_CROWD: Final = 20
_CROWD_SPACING_S: Final = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Settings):
    """The settings and identity of one replica, and times without flags."""

    identity: str
    pod: str = ""
    platform: Platform = field(default_factory=Platform)
    lease: LeaseTiming = field(default_factory=LeaseTiming)
    picker_port: int = ports.PICKER_ADMIN
    shutdown_s: float = 10.0
    workers: int = 8
    timing: Timing = field(default_factory=Timing)


class Operator:
    """One replica. Tests and benchmarks may read `phase` and `pages`."""

    def __init__(self, options: Options, cluster: Client, metrics: Metrics, vitals: Vitals) -> None:
        self.options = options
        self.store = Store()
        self.metrics = metrics
        self.vitals = vitals
        self.observer = Observer(self.store, options.platform)
        self.informer = Informer(
            cluster, self.store, options.namespaces or ("",), options.timing, offered=self._offered
        )
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        pickers = PickerClient(self._session)
        self._recorder = Recorder(cluster, metrics, options.identity, _clock)
        self._downloads = Downloads(self.store, cluster, self.enqueue)
        self._probe = PickerProbe(self.observer, pickers, self.enqueue, options.picker_port)
        self._warnings = Warnings(cluster, self.enqueue)
        self._scaler = Scaler(
            observer=self.observer,
            scales=cluster,
            source=pickers,
            recorder=self._recorder,
            addresses=self._probe.addresses,
            changed=self.enqueue,
            clock=_clock,
        )
        reconciler = Reconciler(
            observer=self.observer,
            executor=Executor(cluster, self.store, _clock),
            statuses=cluster,
            recorder=self._recorder,
            metrics=metrics,
            probe=self._probe,
            downloads=self._downloads,
            warnings=self._warnings,
            clock=_clock,
            wake=self._wake,
        )
        self.queue = Queue(
            reconciler.reconcile, finished=metrics.finished, concurrency=options.workers, fatal=(LostLease,)
        )
        self.store.listeners += [self.observer.forget, self._changed, self._scaler.on_change]
        metrics.depth, metrics.oldest = self.queue.depth, self.queue.oldest
        metrics.objects = self.store.__len__
        metrics.watch_ages = vitals.watch_ages = self.informer.ages
        vitals.oldest_key, vitals.troubles = self.queue.oldest, self.informer.troubles

    def enqueue(self, key: Key) -> None:
        """Reconcile a key as soon as possible."""
        self.queue.add(key)

    async def sync(self) -> None:
        """Begin to watch; returns when all existing objects are known."""
        self.vitals.phase = "syncing"
        self.informer.start()
        await self.informer.synced()
        self.vitals.phase = "leading"
        log.info("synced", extra={"objects": len(self.store), "apis": sorted(self.observer.platform.apis)})

    async def work(self) -> None:
        """Reconcile; ends only by an exception: LostLease, or a defect."""
        async with asyncio.TaskGroup() as group:
            for coroutine in (
                self.queue.run(),
                self.informer.watch(),
                self._recorder.run(),
                self._downloads.run(),
                self._warnings.run(),
                self._resync(),
                self._scaler.run(),
                self._probe.run(),
            ):
                group.create_task(coroutine)

    async def finish(self) -> None:
        """Let what runs end, for a while, and write the last Events; nothing new is begun."""
        cancelled = await self.queue.stop(self.options.shutdown_s)
        if cancelled:
            log.warning("%d reconciliations were cut off", cancelled)
        await self._recorder.flush(1.0)

    async def close(self) -> None:
        """Cut off what still runs, and close all connections."""
        await self.queue.stop(0.0)
        await self._scaler.stop()
        await self._probe.stop()
        await self._warnings.stop()
        await self._downloads.stop()
        await self.informer.stop()
        await self._session.close()

    def _changed(self, change: Change) -> None:
        if change.after is None:
            self.metrics.conditions(change.ref, ())
        elif change.before is None and change.ref.kind == POOL and change.ref.api_version == API_VERSION:
            # The first status of a new pool must not wait for the plans of all others.
            self.queue.add(Key("pool", change.ref.namespace, change.ref.name), new=True)
        self._wake(keys_for_change(change, self.store))

    def _wake(self, found: Iterable[Key]) -> None:
        keys = sorted(found)
        for number, key in enumerate(keys):
            # A change for many pools is spread out, so that a single pool's change does not wait behind hundreds.
            if len(keys) > _CROWD and key.kind == "pool":
                self.queue.add_after(key, number * _CROWD_SPACING_S)
            else:
                self.queue.add(key)

    async def _resync(self) -> None:
        period = self.options.resync_s
        while True:
            for key in list(self.observer.all_keys()):
                self.queue.add_after(key, random.uniform(0.5, 1.0) * period)
            await asyncio.sleep(period)

    def _offered(self, apis: frozenset[str], forbidden: frozenset[str]) -> None:
        self.observer.platform = replace(self.observer.platform, apis=apis, forbidden=forbidden)
        log.info("optional APIs: %s, forbidden: %s", sorted(apis), sorted(forbidden))
        for key in list(self.observer.all_keys()):
            self.enqueue(key)


async def operate(options: Options, stop: asyncio.Event) -> int:
    """Run one replica until `stop` is set (0), or something ends that should not (1). One that loses the lease stands
    by for it again.

    Raises PortInUse, and what the configuration of the client raises.
    """
    metrics, vitals = Metrics(), Vitals()

    async with AsyncExitStack() as stack:
        stack.enter_context(deep_json())  # kopf decodes in its own way
        pages = await Pages(vitals, metrics).open(options.host, options.health_port, options.metrics_port)
        stack.push_async_callback(pages.close)
        cluster = await _connect(options, metrics)
        stack.push_async_callback(cluster.close)
        candidate = None
        if options.leader_elect:
            candidate = Candidate(lambda: _elector(options, metrics))
            cluster.deadline = candidate.valid_until
            stack.push_async_callback(candidate.close)
        while True:
            vitals.phase = "standby"
            if candidate is not None and not await _unless(stop, candidate.acquire()):
                return 0
            metrics.leads(True)
            log.info("leading", extra={"identity": options.identity})
            operator = Operator(options, cluster, metrics, vitals)
            try:
                status = await _lead(operator, candidate, stop)
            finally:
                await operator.close()
                metrics.leads(False)
            if status is not None:
                return status


async def _connect(options: Options, metrics: Metrics) -> Client:
    return await Client.from_config(
        options.kubeconfig,
        options.context,
        on_request=metrics.requested,
        field_manager=FIELD_MANAGER,
        status_manager=STATUS_MANAGER,
    )


async def _elector(options: Options, metrics: Metrics) -> Elector:
    cluster, namespace = await _connect(options, metrics), options.platform.operator_namespace
    owner = own_account(namespace)
    return Elector(cluster, namespace, options.lease_name, options.identity, options.lease, owner, options.pod)


async def _lead(operator: Operator, candidate: Candidate | None, stop: asyncio.Event) -> int | None:
    """The exit status; None where the lease was lost, and nothing else."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(_sync_and_work(operator), name="operator")]
    if candidate is not None:
        tasks.append(asyncio.create_task(candidate.hold(), name="lease"))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
        if not ended:
            log.info("stopping")
            operator.vitals.phase = "stopping"
            await operator.finish()
            return 0
        lost = [_explain(task.exception()) for task in ended]
        return None if all(lost) else 1
    finally:
        for task in (stopping, *tasks):
            task.cancel()
        await asyncio.gather(stopping, *tasks, return_exceptions=True)


async def _sync_and_work(operator: Operator) -> None:
    await operator.sync()
    await operator.work()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None] | Awaitable[None]) -> bool:
    """Whether the work ended before `stop`."""
    task, stopping = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
    finished = task.done()
    for one in (task, stopping):
        one.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return finished


def _explain(exc: BaseException | None) -> bool:
    """Log why the work ended, the innermost reasons first; whether it was the loss of the lease and nothing else."""
    if isinstance(exc, BaseExceptionGroup):
        return min([_explain(inner) for inner in exc.exceptions])  # all are logged
    if isinstance(exc, LostLease):
        log.error("%s; another replica may lead, so this one stands by", exc)
        return True
    if exc is not None:
        log.error("ended unexpectedly", exc_info=exc)
    return False


def _clock() -> datetime:
    return datetime.now(UTC)
