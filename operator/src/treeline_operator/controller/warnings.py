"""Warning Events about pools' objects: listed while pods are missing, never watched.

Only Events say why a volume cannot be mounted or a pod cannot be created. A namespace may have thousands of them, so
they are listed only while a pool waits, once for all its pools.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from treeline_kube.client import Client
from treeline_kube.errors import Forbidden, KubeError

from treeline_operator.controller.queue import Outcome, Queue
from treeline_operator.plan.facts import is_leaving, is_ready
from treeline_operator.world import Event, Key, PoolWorld

log = logging.getLogger(__name__)

_EVERY_S: Final = 10.0
_REFUSED_S: Final = 300.0
_PATIENCE_S: Final = 5.0
_MOST: Final = 2000
_KINDS: Final = frozenset(("Pod", "ReplicaSet", "Deployment", "StatefulSet", "LeaderWorkerSet"))
"""A LeaderWorkerSet's StatefulSets have its name, and those of its leaders."""


_Named = dict[str, list[Event]]
"""Events by the name of their object; a ReplicaSet's Events by its Deployment's name."""


@dataclass(slots=True)
class Warnings:
    """Lists the Events of each namespace with a waiting pool, periodically, and reports pools whose Events changed
    (`changed`)."""

    source: Client
    changed: Callable[[Key], None]
    _waiting: dict[str, dict[Key, list[str]]] = field(default_factory=dict)
    """Namespace → the pools that wait there, each with the names of what Events may be about."""
    _listed: dict[str, _Named] = field(default_factory=dict)
    _queue: Queue = field(init=False)

    def __post_init__(self) -> None:
        self._queue = Queue(self._look, concurrency=4)

    def about(self, world: PoolWorld) -> tuple[Event, ...]:
        """The known Events about the pods and Deployments of a pool and its gateway."""
        listed = self._listed.get(world.pool.namespace)
        return _of(_names(world), listed) if listed else ()

    def see(self, key: Key, world: PoolWorld | None) -> None:
        """The pool waits for something of its world; None: it does not."""
        namespace = key.namespace
        if world is None:
            self._waiting.get(namespace, {}).pop(key, None)
            return
        waiting = self._waiting.setdefault(namespace, {})
        if not waiting:
            self._queue.add_after(Key("pool", namespace), _EVERY_S if namespace in self._listed else 0.0)
        waiting[key] = _names(world)

    async def run(self) -> None:
        """Until `stop`."""
        await self._queue.run()

    async def stop(self) -> None:
        """List no more."""
        await self._queue.stop(0.0)

    async def _look(self, key: Key) -> Outcome:
        namespace, waiting = key.namespace, self._waiting.get(key.namespace)
        if not waiting:
            self._waiting.pop(namespace, None)
            self._listed.pop(namespace, None)
            return Outcome("none")
        before = self._listed.setdefault(namespace, {})
        try:
            async with asyncio.timeout(_PATIENCE_S):
                found = await self._list(namespace)
        except Forbidden as exc:
            log.warning("causes from Events are unknown: %s", exc)
            return Outcome("forbidden", after_s=_REFUSED_S)
        except (KubeError, TimeoutError) as exc:
            log.info("no Events listed: %s", str(exc) or "no answer in time")
            return Outcome("unavailable", after_s=_EVERY_S)
        self._listed[namespace] = found
        for pool, names in list(waiting.items()):
            if _said(names, found) != _said(names, before):
                self.changed(pool)
        return Outcome(after_s=_EVERY_S)

    async def _list(self, namespace: str) -> _Named:
        found: _Named = {}
        count = 0
        async for event in self.source.list("v1", "Event", namespace, field_selector="type=Warning"):
            about = event.get("involvedObject") or {}
            kind, name = about.get("kind"), str(about.get("name", ""))
            if kind in _KINDS:
                owner = name.rpartition("-")[0] if kind == "ReplicaSet" else name
                found.setdefault(owner, []).append(Event.of(event))
            count += 1
            if count >= _MOST:
                log.info("more than %d Warning Events in %s; the rest is ignored", _MOST, namespace)
                break
        return found


def _names(world: PoolWorld) -> list[str]:
    things = (*world.pods, *world.gateway.pods, *world.children, *world.gateway.children)
    return sorted({one.ref.name for one in things if one.ref.kind in _KINDS})


def _of(names: list[str], listed: _Named) -> tuple[Event, ...]:
    return tuple(event for name in names for event in listed.get(name, ()))


def _said(names: list[str], listed: _Named) -> list[Event]:
    """The Events without times: a repetition is no change."""
    return [event._replace(at="") for event in _of(names, listed)]


def is_stuck(world: PoolWorld) -> bool:
    """Whether an Event may explain a problem: a pod is not ready, or cannot be created."""
    pods = (one.object for one in (*world.pods, *world.gateway.pods))
    if any(not is_ready(pod) and not is_leaving(pod) for pod in pods):
        return True
    children = (*world.children, *world.gateway.children)
    return any(_lacks_pods(child.object) for child in children if child.ref.kind in ("Deployment", "LeaderWorkerSet"))


def _lacks_pods(workload: dict[str, Any]) -> bool:
    status = workload.get("status") or {}
    wanted: int = (workload.get("spec") or {}).get("replicas", 1)
    return bool(status) and status.get("replicas", 0) < wanted
