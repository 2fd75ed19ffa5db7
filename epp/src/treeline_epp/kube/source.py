"""The Kubernetes source: it follows the kinds of a scope, and makes the list of endpoints from their objects.

Everything here is level-triggered: after each change the whole view is computed again from all objects, with pauses, so
that it takes a tenth of the time. Objects that cannot be followed stay as last seen; `describe` says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from treeline_kube.client import Client
from treeline_kube.driver import Driver
from treeline_kube.objects import Objects
from treeline_kube.reflector import Health, Reflector
from treeline_kube.resources import Collection, Resource, selector_text
from treeline_wire import labels
from treeline_wire.gateway_rules import ModelRewrite, Objective
from treeline_wire.models import ModelRule, PoolClaim

from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.kube.gateway_rules import VERSION, PoolRef, read_objective, read_rewrite
from treeline_epp.kube.objects import read_model
from treeline_epp.kube.pods import Pod, endpoints, read_pod
from treeline_epp.kube.pools import (
    OWN_GROUP,
    UPSTREAM_GROUP,
    VERSIONS,
    Pool,
    in_order,
    own_pool,
    selected_pods,
    upstream_pool,
)
from treeline_epp.metrics import Sample

log = logging.getLogger(__name__)

T = TypeVar("T")

_PODS = Resource("v1", "Pod", "pods")
_RULES = ("inferenceobjectives", "inferencemodelrewrites")
_PACE_S = 0.02
_SHARE = 9.0
"""Pause between two computations, as a multiple of what the last one took."""
_READERS: Mapping[str, Callable[[msgspec.Raw], Pool]] = {OWN_GROUP: own_pool, UPSTREAM_GROUP: upstream_pool}


@dataclass(frozen=True)
class Followed(Generic[T]):
    """The objects of a kind, in step with the API server while `driver` runs."""

    reflector: Reflector
    objects: Objects[T]
    driver: Driver

    def values(self) -> ValuesView[T]:
        """Return all objects."""
        return self.objects.objects.values()


class Scope(msgspec.Struct, frozen=True):
    """The pools that a picker serves: all our pools of a gateway, one pool of any group, or the pods of a selector
    (with ports). `rules_group` is the API group of objectives and rewrites; empty: they are not followed.
    """

    namespace: str
    gateway: str = ""
    pool: str = ""
    group: str = OWN_GROUP
    selector: Mapping[str, str] = {}
    ports: tuple[int, ...] = ()
    rules_group: str = ""

    def has(self, pool: Pool) -> bool:
        """Return whether the pool is in this scope."""
        return pool.name == self.pool if self.pool else pool.gateway == self.gateway


OnModels = Callable[[Mapping[str, PoolClaim], Sequence[ModelRule]], None]
"""Called with the pools' configured models (oldest pool first) and the rules, whenever either has changed."""

OnPolicies = Callable[[Mapping[str, str]], None]
"""Called with the policies that pools choose, by the pools' names, whenever the pools have changed."""

OnRules = Callable[[Sequence[Objective], Sequence[ModelRewrite]], None]
"""Called with the rules of our pools, whenever one of them or the pools have changed."""


class KubernetesSource:
    """A source of endpoints. Use it as a context; then iterate over `specs`."""

    def __init__(
        self,
        scope: Scope,
        client: Client,
        on_models: OnModels,
        on_rules: OnRules = lambda _objectives, _rewrites: None,
        on_policies: OnPolicies = lambda _chosen: None,
    ) -> None:
        self.scope = scope
        self._client = client
        self._on_models = on_models
        self._on_rules = on_rules
        self._on_policies = on_policies
        self._objectives: Followed[tuple[PoolRef, Objective] | None] | None = None
        self._rewrites: Followed[tuple[PoolRef, ModelRewrite] | None] | None = None
        self._rules_of: tuple[object, ...] | None = None
        self._changed = asyncio.Event()
        self._pools: Followed[Pool] | None = None
        self._models: Followed[ModelRule | None] | None = None
        self._pods: Followed[Pod] | None = None
        self._next_pods: Followed[Pod] | None = None
        self._reported: tuple[object, ...] | None = None
        self._none_found = False
        self._specs: tuple[EndpointSpec, ...] = ()
        self._specs_of: tuple[object, ...] | None = None
        self.passes = 0
        self.pass_seconds = 0.0

    async def __aenter__(self) -> KubernetesSource:
        scope = self.scope
        if scope.selector:
            return self
        version = f"{scope.group}/{VERSIONS[scope.group]}"
        pools = Resource(version, "InferencePool", "inferencepools")
        self._pools = self._follow(pools, _READERS[scope.group])
        if scope.group == OWN_GROUP:
            models = Resource(version, "InferenceModel", "inferencemodels")
            self._models = self._follow(models, read_model, optional=True)
        if scope.rules_group:
            version = f"{scope.rules_group}/{VERSION}"
            objectives = Resource(version, "InferenceObjective", _RULES[0])
            self._objectives = self._follow(objectives, read_objective, optional=True)
            rewrites = Resource(version, "InferenceModelRewrite", _RULES[1])
            self._rewrites = self._follow(rewrites, read_rewrite, optional=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._next_pods is not None:
            await self._next_pods.driver.stop()
        await asyncio.gather(*(followed.driver.stop() for followed in self._followed()))
        await self._client.close()

    async def specs(self) -> AsyncIterator[tuple[EndpointSpec, ...]]:
        """Yield the endpoints: first when every needed kind has been listed, then after every change."""
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
        """Return the present endpoints; `None` until every needed kind has been listed."""
        pools = self._current_pools()
        if pools is None:
            return None
        await self._follow_pods(pools)
        if self._pods is None or not self._pods.reflector.usable:
            return None
        if self._models is not None and not self._models.reflector.usable:
            return None
        models = self._models
        reported = (pools, None if models is None else models.objects.revision)
        if self._reported != reported:
            self._reported = reported
            known = () if models is None else models.values()
            rules = tuple(rule for rule in known if rule is not None)
            self._on_models({pool.name: pool.claim for pool in pools}, rules)
            self._on_policies({pool.name: pool.policy for pool in pools if pool.policy})
        if not self._set_rules(pools):
            return None
        pods = self._pods
        if self._specs_of != (pools, pods, pods.objects.revision):
            self._specs_of = (pools, pods, pods.objects.revision)
            self._specs = endpoints(pools, pods.values())
        return self._specs

    def _set_rules(self, pools: Sequence[Pool]) -> bool:
        """Report objectives and rewrites of our pools; return False until they have been listed."""
        objectives, rewrites = self._objectives, self._rewrites
        if objectives is None or rewrites is None:
            return True
        if not (objectives.reflector.usable and rewrites.reflector.usable):
            return False
        of = ([pool.name for pool in pools], objectives.objects.revision, rewrites.objects.revision)
        if self._rules_of != of:
            self._rules_of = of
            ours = {(self.scope.group, pool.name): pool.name for pool in pools}
            if self.scope.group == OWN_GROUP:  # clients of a Gateway may know only the pool's mirror
                ours |= {(UPSTREAM_GROUP, pool.name + labels.MIRROR_SUFFIX): pool.name for pool in pools}
            self._on_rules(list(_of(ours, objectives.values())), list(_of(ours, rewrites.values())))
        return True

    def _current_pools(self) -> list[Pool] | None:
        """Return our pools, oldest first. `None` before they were listed, or before the named one exists."""
        scope = self.scope
        if scope.selector:
            return [selected_pods(scope.selector, scope.ports)]
        assert self._pools is not None
        if not self._pools.reflector.usable:
            return None
        ours = in_order(pool for pool in self._pools.values() if scope.has(pool))
        if not ours and not self._none_found:
            log.warning("%s: is --pool-namespace right? The pool is used as soon as it exists", self._nothing())
        self._none_found = not ours
        return None if scope.pool and not ours and self._reported is None else ours

    def _nothing(self) -> str:
        """Return the sentence for a scope without pools. (A namespace that does not exist looks like an empty one.)"""
        scope = self.scope
        if scope.pool:
            return f"there is no InferencePool {scope.pool} of {scope.group} in namespace {scope.namespace}"
        return f"no InferencePool of {scope.group} in namespace {scope.namespace} names gateway {scope.gateway}"

    async def _follow_pods(self, pools: Sequence[Pool]) -> None:
        """Follow the pods of these pools. Until the pods of a new selector are known, the old ones stay in use."""
        selector = labels.POOL
        if self.scope.group != OWN_GROUP or self.scope.selector:
            if not pools or not pools[0].selector:
                return
            selector = selector_text(pools[0].selector)
        elif self.scope.pool:
            selector = f"{labels.POOL}={self.scope.pool}"
        newest = self._next_pods or self._pods
        if newest is None or newest.reflector.collection.selector != selector:
            if self._next_pods is not None:
                await self._next_pods.driver.stop()
            self._next_pods = self._follow(_PODS, read_pod, selector)
        if self._next_pods is not None and (self._pods is None or self._next_pods.reflector.usable):
            if self._pods is not None:
                await self._pods.driver.stop()
            self._pods, self._next_pods = self._next_pods, None

    def _follow(
        self,
        resource: Resource,
        read: Callable[[msgspec.Raw], T],
        selector: str = "",
        *,
        optional: bool = False,
    ) -> Followed[T]:
        collection = Collection(resource, self.scope.namespace, selector)
        objects = Objects(read)
        reflector = Reflector(collection, objects, optional=optional, advice=_advice(collection))
        driver = Driver(self._client, reflector, self._changed.set)
        driver.start()
        return Followed(reflector, objects, driver)

    # --- reports ------------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, object]:
        """Return the state of each kind, for the readiness page; `stale` names the kinds without an open watch.
        `missing` says which pool is missing, if there is none to serve.
        """
        now = time.monotonic()
        kinds = {one.reflector.label: one.reflector.health(now) for one in self._followed()}
        if self._pods is None:
            waiting = f"InferencePool {self.scope.pool}" if self.scope.pool else "the list of InferencePools"
            kinds["pods"] = Health(False, False, None, f"waiting for {waiting} of {self.scope.group}")
        stale = sorted(kind for kind, health in kinds.items() if not health.watching)
        missing = self._nothing() if self._none_found else None
        return {"namespace": self.scope.namespace, "kinds": kinds, "stale": stale, "missing": missing}

    def samples(self) -> Iterator[Sample]:
        """Gauges and counters for the metrics page."""
        now = time.monotonic()
        for followed in self._followed():
            reflector = followed.reflector
            kind = {"kind": reflector.label}
            health = reflector.health(now)
            yield "gauge", "kube_synced", "1 once all objects of a kind have been listed, else 0.", kind, health.synced
            yield "gauge", "kube_watching", "1 while a watch on a kind is open, else 0.", kind, health.watching
            if health.age_s is not None:
                text = "Seconds since the API server last sent anything about a kind."
                yield "gauge", "kube_watch_age_seconds", text, kind, health.age_s
            yield "gauge", "kube_objects", "Kubernetes objects in memory, by kind.", kind, len(followed.values())
            text = "Times that all objects of a kind were listed, by kind."
            yield "counter", "kube_lists", text, kind, reflector.lists
            text = "Watch events received, by kind of Kubernetes object."
            yield "counter", "kube_events", text, kind, reflector.events
            for reason, count in reflector.errors.items():
                text = "Errors while watching a kind of Kubernetes object, by kind and reason."
                yield "counter", "kube_errors", text, {**kind, "reason": reason}, count
        text = "Times that endpoints and models were worked out from Kubernetes objects."
        yield "counter", "kube_passes", text, {}, self.passes
        text = "Seconds spent on working out endpoints and models from Kubernetes objects."
        yield "counter", "kube_pass_seconds", text, {}, self.pass_seconds

    def _followed(self) -> list[Followed[Any]]:
        every = (self._pools, self._models, self._objectives, self._rewrites, self._pods)
        return [one for one in every if one is not None]


R = TypeVar("R", Objective, ModelRewrite)


def _of(pools: Mapping[tuple[str, str], str], found: Iterable[tuple[PoolRef, R] | None]) -> Iterator[R]:
    """Yield the objects that name one of these pools, by its group and name, each with our name of the pool."""
    for one in found:
        if one is not None and (pool := pools.get((one[0].group, one[0].name))) is not None:
            yield msgspec.structs.replace(one[1], pool=pool)


def _advice(collection: Collection) -> dict[str, str]:
    """Return advice by kind of error, for a person who has just started the picker."""
    label, namespace = collection.resource.label, collection.namespace
    flag = "--rules-group" if collection.resource.plural in _RULES else "--pool-group"
    return {
        "unreachable": "is that the API server's address (--kubeconfig), and can it be reached from here?",
        "unauthorized": "log in again, or choose other credentials with --kubeconfig",
        "forbidden": f"grant `list` and `watch` of {label} in namespace {namespace}",
        "not_found": f"its CustomResourceDefinition is not installed; {flag} says which API group is meant",
    }
