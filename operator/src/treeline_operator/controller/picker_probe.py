"""Polls every gateway's pickers for their lists, more often while a pool waits for a change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import msgspec
from treeline_wire import ports

from treeline_operator import names
from treeline_operator.controller.observe import Observer
from treeline_operator.controller.pickers import Address, PickerClient
from treeline_operator.controller.queue import Backoff, Outcome, Queue
from treeline_operator.plan.facts import is_available, label
from treeline_operator.world import Key, PickerEndpoint, PickerView, PoolRouting

log = logging.getLogger(__name__)

_MAX_WORD, _MAX_MESSAGE = 64, 400
_PATIENCE: Final = 3
_CALM_S: Final = 10.0
_HURRIED_S: Final = 0.5


class _Routing(msgspec.Struct):
    way: str
    reason: str = ""
    message: str = ""


class _Pool(msgspec.Struct):
    models: list[str] = []
    endpoints: tuple[PickerEndpoint, ...] = ()
    routing: _Routing | None = None


class _Answer(msgspec.Struct):
    synced: bool = False
    pools: dict[str, _Pool] = {}


_decode = msgspec.json.Decoder(_Answer).decode


def merge(views: Iterable[PickerView]) -> PickerView | None:
    """Merge the views of a gateway's pickers into what all agree on, since Envoy may ask any of them."""
    all_views = list(views)
    if not all_views:
        return None
    first, *others = all_views
    pools = {}
    for pool, endpoints in first.pools.items():
        listed = [{e.name: e for e in other.pools.get(pool, ())} for other in others]
        pools[pool] = tuple(
            _agreed([e, *(names_[e.name] for names_ in listed)])
            for e in endpoints
            if all(e.name in names_ for names_ in listed)
        )
    models = {
        pool: tuple(m for m in served if all(m in other.models.get(pool, ()) for other in others))
        for pool, served in first.models.items()
    }
    moments = [view.at for view in all_views if view.at is not None]
    # The worst of their reports, since a request may reach that one.
    routing = {
        pool: max(
            (view.routing[pool] for view in all_views if pool in view.routing), key=lambda one: one.way != "events"
        )
        for pool in dict.fromkeys(pool for view in all_views for pool in view.routing)
    }
    return PickerView(all(view.synced for view in all_views), pools, models, min(moments, default=None), routing)


def _agreed(told: Sequence[PickerEndpoint]) -> PickerEndpoint:
    first = told[0]
    known = [e.in_flight for e in told if e.in_flight is not None]
    in_flight = max(known, default=None)
    if len(known) < len(told) or len({e.draining for e in told}) > 1:
        in_flight = in_flight or None  # a picker that does not know, or still sends requests, vouches for no 0
    return PickerEndpoint(
        name=first.name,
        address=first.address,
        ready=all(e.ready for e in told),
        draining=any(e.draining for e in told),
        in_flight=in_flight,
        cached_tokens=max(e.cached_tokens for e in told),
        cache_sources_off=tuple(sorted({source for e in told for source in e.cache_sources_off})),
    )


@dataclass(slots=True)
class PickerProbe:
    """Keeps `observer.pickers` filled, and reports pools whose list has changed. `port` is that of the pickers'
    lists."""

    observer: Observer
    asker: PickerClient
    changed: Callable[[Key], None]
    port: int = ports.PICKER_ADMIN
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    _waiting: dict[tuple[str, str], str] = field(default_factory=dict)
    _failures: dict[tuple[str, str], int] = field(default_factory=dict)
    _queue: Queue = field(init=False)

    def __post_init__(self) -> None:
        self._queue = Queue(self._probe, concurrency=16, backoff=Backoff(_HURRIED_S, _CALM_S))

    def wait(self, namespace: str, gateway: str, pool: str, waits: bool) -> None:
        """Whether a pool waits for news from its gateway's picker."""
        if not waits:
            self.forget(namespace, pool)
        elif self._waiting.get((namespace, pool)) != gateway:
            self._waiting[namespace, pool] = gateway
            self._queue.add(Key("gateway", namespace, gateway))

    def forget(self, namespace: str, pool: str) -> None:
        """The pool waits for nothing any more."""
        self._waiting.pop((namespace, pool), None)

    def look(self, namespace: str, gateway: str) -> None:
        """Probe the gateway's picker soon, and repeat that while the gateway has pods."""
        self._queue.add(Key("gateway", namespace, gateway))

    async def run(self) -> None:
        """Probe until `stop`."""
        await self._queue.run()

    async def stop(self) -> None:
        """Stop probing."""
        await self._queue.stop(0.0)

    async def _probe(self, key: Key) -> Outcome:
        gateway = (key.namespace, key.name)
        addresses = self.addresses(key.namespace, key.name)
        if not addresses:
            self._failures.pop(gateway, None)
            self._set(gateway, None)
            return Outcome("none")  # a change of its pods brings it back
        delay = _HURRIED_S if any((space, of) == gateway for (space, _), of in self._waiting.items()) else _CALM_S
        try:
            asked_at = self.clock()
            answers = await asyncio.gather(*(self.asker.ask(address) for address in addresses))
            view = merge(_view(_decode(answer), asked_at) for answer in answers)
        except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
            failures = self._failures[gateway] = self._failures.get(gateway, 0) + 1
            log.log(logging.INFO if failures == _PATIENCE else logging.DEBUG, "%s", exc)
            if failures >= _PATIENCE:
                self._set(gateway, None)
            return Outcome("unreachable", after_s=delay)
        self._failures.pop(gateway, None)
        self._set(gateway, view)
        return Outcome(after_s=delay)

    def addresses(self, namespace: str, gateway: str) -> list[Address]:
        """The addresses of a gateway's ready pickers."""
        found = []
        for observed in self.observer.store.gateway_children(namespace, gateway):
            if observed.ref.kind != "Pod":
                continue
            pod = observed.object
            address = (pod.get("status") or {}).get("podIP")
            if address and label(pod, names.COMPONENT) == "epp" and is_available(pod):
                found.append((address, self.port))
        return found

    def _set(self, gateway: tuple[str, str], view: PickerView | None) -> None:
        before = self.observer.pickers.get(gateway)
        if view is None:
            self.observer.pickers.pop(gateway, None)
            self.observer.silent.setdefault(gateway, self.clock())
        else:
            self.observer.pickers[gateway] = view
        pools = self.observer.store.gateway_pools(*gateway)
        if view is not None or not pools:
            self.observer.silent.pop(gateway, None)
        for pool in pools:
            if _of(before, pool.ref.name) != _of(view, pool.ref.name):
                self.changed(Key("pool", pool.ref.namespace, pool.ref.name))


def _view(answer: _Answer, at: datetime | None = None) -> PickerView:
    return PickerView(
        synced=answer.synced,
        pools={pool: said.endpoints for pool, said in answer.pools.items()},
        models={pool: tuple(said.models) for pool, said in answer.pools.items()},
        at=at,
        routing={
            pool: PoolRouting(one.way[:_MAX_WORD], one.reason[:_MAX_WORD], one.message[:_MAX_MESSAGE])
            for pool, said in answer.pools.items()
            if (one := said.routing) is not None
        },
    )


def _of(view: PickerView | None, pool: str) -> object:
    """Return the parts of a picker's view that a pool waits for. The load of pods matters only while they drain."""
    if view is None:
        return None
    listed = [
        (e.name, e.address, e.ready, e.draining, e.in_flight if e.draining else None, e.cache_sources_off)
        for e in view.pools.get(pool, ())
    ]
    return view.synced, listed if pool in view.pools else None, view.models.get(pool), view.routing.get(pool)
