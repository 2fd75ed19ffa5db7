"""The Kubernetes source: which kinds are followed for a scope, and the lists of endpoints that come of it.

Everything here is level-triggered: when a mirror has changed, the whole view is computed anew from all mirrors, at most
so often that it takes a tenth of the time. What cannot be followed stays as it was last seen; :meth:`describe` says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from treeline_wire import labels
from treeline_wire.models import ModelRule

from treeline_epp.endpoint import EndpointSpec
from treeline_epp.kube.client import KubeClient
from treeline_epp.kube.mirror import Health, Mirror, Resource, selector_text
from treeline_epp.kube.models import read_model
from treeline_epp.kube.pods import Pod, endpoints, read_pod
from treeline_epp.kube.pools import (
    OLD_GROUP,
    OWN_GROUP,
    UPSTREAM_GROUP,
    VERSIONS,
    Pool,
    in_order,
    old_pool,
    own_pool,
    selected_pods,
    upstream_pool,
)
from treeline_epp.kube.reflector import Reflector
from treeline_epp.metrics import Sample

log = logging.getLogger(__name__)

_PACE_S = 0.02
_SHARE = 9.0
"""Pause between two computations, as a multiple of what the last one took."""
_READERS: Mapping[str, Callable[[msgspec.Raw], Pool]] = {
    OWN_GROUP: own_pool,
    UPSTREAM_GROUP: upstream_pool,
    OLD_GROUP: old_pool,
}


class Scope(msgspec.Struct, frozen=True):
    """What a picker is for: all our pools of a gateway, one pool of any group, or pods of a selector (with ports)."""

    namespace: str
    gateway: str = ""
    pool: str = ""
    group: str = OWN_GROUP
    selector: Mapping[str, str] = {}
    ports: tuple[int, ...] = ()

    def has(self, pool: Pool) -> bool:
        """Is it one of our pools?"""
        return pool.name == self.pool if self.pool else pool.gateway == self.gateway


OnModels = Callable[[Mapping[str, Sequence[str]], Sequence[ModelRule]], None]
"""Called with the pools' configured models (oldest pool first) and the rules, whenever either has changed."""


class KubernetesSource:
    """Use it as a context; then iterate over :meth:`specs`."""

    def __init__(
        self,
        scope: Scope,
        client: KubeClient,
        on_models: OnModels,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scope = scope
        self._client = client
        self._on_models = on_models
        self._clock = clock
        self._changed = asyncio.Event()
        self._pools: Reflector[Pool] | None = None
        self._models: Reflector[ModelRule | None] | None = None
        self._pods: Reflector[Pod] | None = None
        self._next_pods: Reflector[Pod] | None = None
        self._told: tuple[object, ...] | None = None
        self._missed = False
        self._specs: tuple[EndpointSpec, ...] = ()
        self._specs_of: tuple[object, ...] | None = None
        self.passes = 0
        self.pass_seconds = 0.0

    async def __aenter__(self) -> KubernetesSource:
        scope = self.scope
        if not scope.selector:
            self._pools = self._follow("inferencepools", _READERS[scope.group], scope.group)
        if scope.group != UPSTREAM_GROUP and not scope.selector:
            self._models = self._follow("inferencemodels", read_model, scope.group, optional=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._next_pods is not None:
            await self._next_pods.stop()
        await asyncio.gather(*(reflector.stop() for reflector in self._reflectors()))
        await self._client.close()

    async def specs(self) -> AsyncIterator[tuple[EndpointSpec, ...]]:
        """The endpoints: first when everything that is needed has been seen, then after every change."""
        current: tuple[EndpointSpec, ...] | None = None
        self._changed.set()
        while True:
            await self._changed.wait()
            self._changed.clear()
            started = time.perf_counter()
            try:
                specs = await self._pass()
            except Exception:
                log.exception("endpoints cannot be computed; the last ones stay")
                specs = None
            took = time.perf_counter() - started
            self.passes += 1
            self.pass_seconds += took
            if specs is not None and specs != current:
                log.info("%d endpoints from Kubernetes", len(specs))
                current = specs
                yield specs
            await asyncio.sleep(max(_PACE_S, _SHARE * took))

    # --- one pass -----------------------------------------------------------------------------------------------------

    async def _pass(self) -> tuple[EndpointSpec, ...] | None:
        """The endpoints as they are now; ``None`` while something that is needed has never been seen."""
        pools = self._current_pools()
        if pools is None:
            return None
        await self._follow_pods(pools)
        if self._pods is None or not self._pods.mirror.settled:
            return None
        if self._models is not None and not self._models.mirror.settled:
            return None
        models = None if self._models is None else self._models.mirror
        told = (pools, None if models is None else models.revision)
        if self._told != told:
            self._told = told
            known = () if models is None else models.objects.values()
            rules = tuple(rule for rule in known if rule is not None)
            self._on_models({pool.name: pool.models for pool in pools}, rules)
        pods = self._pods.mirror
        if self._specs_of != (pools, pods, pods.revision):
            self._specs_of = (pools, pods, pods.revision)
            self._specs = endpoints(pools, pods.objects.values())
        return self._specs

    def _current_pools(self) -> list[Pool] | None:
        """Our pools, oldest first. ``None`` before they were listed, or before the one that was named exists."""
        scope = self.scope
        if scope.selector:
            return [selected_pods(scope.selector, scope.ports)]
        assert self._pools is not None
        mirror = self._pools.mirror
        if not mirror.settled:
            return None
        ours = in_order(pool for pool in mirror.objects.values() if scope.has(pool))
        if not ours and not self._missed:
            log.warning("%s: is --pool-namespace right? It is used as soon as it is there", self._nothing())
        self._missed = not ours
        return None if scope.pool and not ours and self._told is None else ours

    def _nothing(self) -> str:
        """There is no pool of ours. (A namespace that does not exist looks like an empty one.)"""
        scope = self.scope
        if scope.pool:
            return f"there is no InferencePool {scope.pool} of {scope.group} in namespace {scope.namespace}"
        return (
            f"no InferencePool of {scope.group} in namespace {scope.namespace} names gateway {scope.gateway}"
        )

    async def _follow_pods(self, pools: Sequence[Pool]) -> None:
        """Follow the pods of these pools. Until those of a new selector are known, the old ones stay in use."""
        selector = labels.POOL
        if self.scope.group != OWN_GROUP or self.scope.selector:
            if not pools or not pools[0].selector:
                return
            selector = selector_text(pools[0].selector)
        elif self.scope.pool:
            selector = f"{labels.POOL}={self.scope.pool}"
        newest = self._next_pods or self._pods
        if newest is None or newest.mirror.resource.selector != selector:
            if self._next_pods is not None:
                await self._next_pods.stop()
            self._next_pods = self._follow("pods", read_pod, "", selector)
        if self._next_pods is not None and (self._pods is None or self._next_pods.mirror.settled):
            if self._pods is not None:
                await self._pods.stop()
            self._pods, self._next_pods = self._next_pods, None

    def _follow(
        self,
        plural: str,
        read: Callable[[msgspec.Raw], Any],
        group: str,
        selector: str = "",
        *,
        optional: bool = False,
    ) -> Reflector[Any]:
        resource = Resource(
            plural,
            VERSIONS.get(group, "v1"),
            self.scope.namespace,
            group=group,
            selector=selector,
            optional=optional,
        )
        reflector = Reflector(self._client, Mirror(resource, read), self._changed.set, self._clock)
        reflector.start()
        return reflector

    # --- looking ------------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, object]:
        """How fresh each kind is, for the readiness page; ``stale`` names those that are not followed at the moment.

        ``missing`` says, where there is no pool to pick for, which one is meant.
        """
        now = self._clock()
        kinds = {r.mirror.resource.label: r.mirror.health(now) for r in self._reflectors()}
        if self._pods is None:
            waiting = f"InferencePool {self.scope.pool}" if self.scope.pool else "the list of InferencePools"
            kinds["pods"] = Health(False, False, None, f"waiting for {waiting} of {self.scope.group}")
        stale = sorted(kind for kind, health in kinds.items() if not health.watching)
        missing = self._nothing() if self._missed else None
        return {"namespace": self.scope.namespace, "kinds": kinds, "stale": stale, "missing": missing}

    def samples(self) -> Iterator[Sample]:
        """Gauges and counters for the metrics page."""
        now = self._clock()
        for reflector in self._reflectors():
            mirror = reflector.mirror
            kind = {"kind": mirror.resource.label}
            health = mirror.health(now)
            yield "gauge", "kube_synced", "1 when the kind has been listed once.", kind, health.synced
            yield "gauge", "kube_watching", "1 while a watch of the kind is open.", kind, health.watching
            if health.age_s is not None:
                text = "Seconds since the API server was last heard about the kind."
                yield "gauge", "kube_watch_age_seconds", text, kind, health.age_s
            yield "gauge", "kube_objects", "Objects known of the kind.", kind, len(mirror.objects)
            yield "counter", "kube_lists", "Complete lists of the kind.", kind, mirror.lists
            yield "counter", "kube_events", "Watch events of the kind.", kind, mirror.events
            for reason, count in mirror.errors.items():
                text = "What went wrong while following the kind, by reason."
                yield "counter", "kube_errors", text, {**kind, "reason": reason}, count
        yield "counter", "kube_passes", "Times that endpoints and models were computed anew.", {}, self.passes
        yield "counter", "kube_pass_seconds", "Time that took.", {}, self.pass_seconds

    def _reflectors(self) -> list[Reflector[Any]]:
        found = (self._pools, self._models, self._pods)
        return [reflector for reflector in found if reflector is not None]
