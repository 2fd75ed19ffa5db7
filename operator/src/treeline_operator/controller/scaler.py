"""Sets the replicas of pools with autoscaling.type Picker, by the demand that their pickers stream, and says of pools
with `spec.prefill` how many pods should compute prompts; the plan follows the status.

A pool is checked with each report of its pickers, and every other second. If another HorizontalPodAutoscaler targets it
(KEDA makes one, too), it is left to that.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import msgspec
from treeline_kube.client import Client
from treeline_kube.clock import now
from treeline_kube.errors import KubeError, LostLease
from treeline_wire.signals import SILENT_S, PoolSignals, Signals, merged

from treeline_operator.api.conditions import Reason
from treeline_operator.api.parts import API_VERSION
from treeline_operator.api.pool import InferencePool
from treeline_operator.controller.observe import Observer
from treeline_operator.controller.pickers import Address, PickerClient
from treeline_operator.controller.queue import Backoff, Outcome, Queue
from treeline_operator.controller.recorder import Recorder
from treeline_operator.controller.store import POOL, Change
from treeline_operator.plan.replicas import Desired, Heard, History, PromptTarget, Target, desired
from treeline_operator.world import Key, Ref, Scaled, Scaling

log = logging.getLogger(__name__)

_AGAIN_S: Final = (0.25, 5.0)


@dataclass(slots=True)
class Following:
    """The pickers of one gateway, each followed by its own task; `on_report` is called after each report."""

    source: PickerClient
    on_report: Callable[[], None]
    clock: Callable[[], float]
    _tasks: dict[Address, asyncio.Task[None]] = field(default_factory=dict)
    _said: dict[Address, tuple[float, Signals]] = field(default_factory=dict)

    def set(self, addresses: Iterable[Address]) -> None:
        """Follow exactly these pickers."""
        wanted = set(addresses)
        for address in self._tasks.keys() - wanted:
            self._tasks.pop(address).cancel()
            self._said.pop(address, None)
        for address in wanted - self._tasks.keys():
            self._tasks[address] = asyncio.create_task(self._follow(address), name=f"signals of {address[0]}")

    def heard(self, pool: str) -> Heard | None:
        """The pickers' combined demand for a pool; None while no picker reports it."""
        told: list[PoolSignals] = []
        missing = not self._tasks
        for address in self._tasks:
            at, said = self._said.get(address, (float("-inf"), Signals()))
            one = said.pools.get(pool)
            if self.clock() - at > SILENT_S or not said.synced or one is None:
                missing = True
            else:
                told.append(one)
        return Heard(merged(told), whole=not missing) if told else None

    async def stop(self) -> None:
        """Stop following."""
        tasks = list(self._tasks.values())
        self.set(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, address: Address) -> None:
        failures = 0
        while True:
            try:
                async for signals in self.source.lines(address):
                    failures = 0
                    self._said[address] = self.clock(), signals
                    self.on_report()
                why = "it has ended"
            except (OSError, msgspec.MsgspecError) as exc:
                why = str(exc)
            except Exception as exc:
                log.exception("signals of %s cannot be followed", address[0])
                why = type(exc).__name__
            failures += 1
            log.log(logging.INFO if failures == 3 else logging.DEBUG, "signals of %s: %s", address[0], why)
            base, cap = _AGAIN_S
            await asyncio.sleep(min(cap, base * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0))


_LOOK_S: Final = 2.0
_OWNERS_S: Final = 10.0
_AUTOSCALERS: Final = "autoscaling/v2"


@dataclass(slots=True)
class _Known:
    """Scaling state of one pool. `written`: the generation before the last write, and the replicas that it set.
    `prompts`: the pods that should compute prompts, 0 before the first look, with their own history."""

    gateway: tuple[str, str]
    uid: str
    target: Target
    history: History = ()
    written: tuple[int, int] | None = None
    last: Scaled | None = None
    prompts: int = 0
    prompt_history: History = ()


@dataclass(slots=True)
class Scaler:
    """Keeps `observer.scaling` filled, and reports changed pools (`changed`).

    `addresses(namespace, gateway)` are the admin ports of a gateway's pickers.
    """

    observer: Observer
    scales: Client
    source: PickerClient
    recorder: Recorder
    addresses: Callable[[str, str], list[Address]]
    changed: Callable[[Key], None]
    clock: Callable[[], datetime]
    monotonic: Callable[[], float] = now
    _known: dict[Key, _Known] = field(default_factory=dict)
    _following: dict[tuple[str, str], Following] = field(default_factory=dict)
    _owners: dict[str, tuple[float, dict[str, str]]] = field(default_factory=dict)
    _queue: Queue = field(init=False)

    def __post_init__(self) -> None:
        self._queue = Queue(self._scale, concurrency=8, backoff=Backoff(0.2, 5.0), fatal=(LostLease,))

    def on_change(self, change: Change) -> None:
        """A listener of the store's."""
        if (change.ref.api_version, change.ref.kind) == (API_VERSION, POOL):
            self._queue.add(Key("pool", change.ref.namespace, change.ref.name))

    async def run(self) -> None:
        """Until `stop`."""
        await self._queue.run()

    async def stop(self) -> None:
        """Stop scaling and listening."""
        await self._queue.stop(0.0)
        for following in list(self._following.values()):
            await following.stop()
        self._following.clear()

    async def _scale(self, key: Key) -> Outcome:
        pool = self.observer.pool(key.namespace, key.name)
        observed = self.observer.store.get(Ref(API_VERSION, POOL, key.namespace, key.name))
        if observed is None or not isinstance(pool, InferencePool) or not _is_scaled_here(pool):
            await self._forget(key)
            return Outcome("none")  # a change of it brings it back
        known = await self._know(key, pool)
        following = self._listening(known.gateway)
        heard = following.heard(pool.name)
        self._advise(pool, known, heard)
        if pool.spec.autoscaling.type == "None":
            self._tell(key, Scaling(heard is not None, prompts=known.prompts))
            return Outcome(after_s=_LOOK_S)
        replicas = pool.spec.replicas
        if known.written is not None and known.written[0] == pool.metadata.generation:
            replicas = known.written[1]  # what we wrote has not come back yet
        try:
            wanted = desired(heard, known.target, replicas, known.history, self.monotonic())
            owner = await self._owner(pool, writes=wanted.replicas != replicas)
            if owner:
                known.history = ()
            else:
                known.history = wanted.history
                if wanted.replicas != replicas:
                    await self._write(pool, observed.resource_version, known, replicas, wanted)
        except LostLease:
            raise
        except KubeError as exc:
            log.info("pool %s is not scaled: %s", pool.name, exc, extra={"fields": key._asdict()})
            return Outcome("unavailable", retry=True)
        self._tell(key, Scaling(heard is not None, owner, known.last, known.prompts))
        return Outcome(after_s=_LOOK_S)

    def _advise(self, pool: InferencePool, known: _Known, heard: Heard | None) -> None:
        """Keep the number of pods that should compute prompts, from the first report on."""
        own = pool.spec.prefill
        if own is None or (heard is None and not known.prompts):
            known.prompts, known.prompt_history = 0, ()
            return
        before = known.prompts or pool.advised_prefill or own.replicas
        target = PromptTarget.of(own, pool.spec.autoscaling)
        wanted = desired(heard, target, before, known.prompt_history, self.monotonic())
        known.prompts, known.prompt_history = wanted.replicas, wanted.history
        if own.max_replicas is not None and wanted.replicas != before:
            text = f"prefill replicas {before} \u2192 {wanted.replicas}: {wanted.why}"
            log.info("%s", text, extra={"object": pool.ref})
            self.recorder.emit(pool.ref, pool.metadata.uid, "Normal", Reason.AUTOSCALED, text)

    async def _write(self, pool: InferencePool, version: str, known: _Known, before: int, wanted: Desired) -> None:
        await self.scales.scale_by_subresource(pool.ref, version, wanted.replicas)
        known.written = pool.metadata.generation, wanted.replicas
        known.last = Scaled(self.clock(), wanted.replicas, wanted.why)
        text = f"replicas {before} \u2192 {wanted.replicas}: {wanted.why}"
        log.info("%s", text, extra={"object": pool.ref})
        self.recorder.emit(pool.ref, pool.metadata.uid, "Normal", Reason.AUTOSCALED, text)

    async def _know(self, key: Key, pool: InferencePool) -> _Known:
        """The state of a pool. Another window or other bounds start a new one, since earlier demand does not apply."""
        gateway = (pool.namespace, pool.spec.gateway.name)
        target = Target.of(pool.spec.autoscaling)
        known = self._known.get(key)
        if known is not None and (known.uid, known.gateway) != (pool.metadata.uid, gateway):
            await self._forget(key)
            known = None
        if known is None:
            known = self._known[key] = _Known(gateway, pool.metadata.uid, target)
        if known.target != target:
            known.target, known.history = target, ()
        return known

    def _listening(self, gateway: tuple[str, str]) -> Following:
        following = self._following.get(gateway)
        if following is None:

            def told() -> None:
                for key, known in self._known.items():
                    if known.gateway == gateway:
                        self._queue.add(key)

            following = self._following[gateway] = Following(self.source, told, self.monotonic)
        following.set(self.addresses(*gateway))
        return following

    async def _forget(self, key: Key) -> None:
        known = self._known.pop(key, None)
        self._tell(key, None)
        if known is None or any(other.gateway == known.gateway for other in self._known.values()):
            return
        if (following := self._following.pop(known.gateway, None)) is not None:
            await following.stop()

    def _tell(self, key: Key, scaling: Scaling | None) -> None:
        place = (key.namespace, key.name)
        if self.observer.scaling.get(place) == scaling:
            return
        if scaling is None:
            self.observer.scaling.pop(place, None)
        else:
            self.observer.scaling[place] = scaling
        self.changed(key)

    async def _owner(self, pool: InferencePool, *, writes: bool) -> str:
        """The autoscaler of somebody else, as kind and name; empty if none. Checked every few seconds, and before a
        write (`writes`), unless one was found a moment ago."""
        looked_at, owners = self._owners.get(pool.namespace, (float("-inf"), {}))
        old = self.monotonic() - looked_at > _OWNERS_S
        if old or (writes and pool.name not in owners):
            found = [one async for one in self.scales.list(_AUTOSCALERS, "HorizontalPodAutoscaler", pool.namespace)]
            owners = dict(_scaled_by(found))
            self._owners[pool.namespace] = self.monotonic(), owners
        return owners.get(pool.name, "")


def _is_scaled_here(pool: InferencePool) -> bool:
    return not pool.deleting and (pool.spec.autoscaling.type == "Picker" or pool.spec.prefill is not None)


def _scaled_by(autoscalers: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """`(pool, autoscaler)` for each other autoscaler of our pools."""
    found = []
    for one in autoscalers:
        target = (one.get("spec") or {}).get("scaleTargetRef") or {}
        group = str(target.get("apiVersion", "")).partition("/")[0]
        if (group, target.get("kind")) == (API_VERSION.partition("/")[0], POOL):
            found.append((str(target.get("name")), f"{one['kind']} {one['metadata']['name']}"))
    return found
