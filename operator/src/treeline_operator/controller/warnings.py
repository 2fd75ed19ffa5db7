"""Warning Events about what is made for pools: listed while pods are missing, and never watched.

Kubelets and controllers tell in Events alone why a volume cannot be mounted or a pod cannot be made. A namespace may
have thousands, most of them about others: nothing is asked while all is well, and one list serves all its pools.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from treeline_kube.client import Client
from treeline_kube.clock import now
from treeline_kube.errors import Forbidden, KubeError

from treeline_operator.plan.facts import is_leaving, is_ready
from treeline_operator.world import Event, Key, PoolWorld

log = logging.getLogger(__name__)

_EVERY_S: Final = 10.0
_REFUSED_S: Final = 300.0
_LONGEST_S: Final = 120.0
_KEPT_S: Final = 600.0
_PATIENCE_S: Final = 5.0
_MOST: Final = 2000
_KINDS: Final = frozenset(("Pod", "ReplicaSet", "Deployment"))


@dataclass(slots=True)
class _Listed:
    """The Events of a namespace, by the name of what it is about; of ReplicaSets, by that of their Deployment."""

    next_s: float
    events: dict[str, list[Event]] = field(default_factory=dict)


@dataclass(slots=True)
class Warnings:
    """What was listed last of each namespace in which somebody waits."""

    source: Client
    clock: Callable[[], float] = now
    _spaces: dict[str, _Listed] = field(default_factory=dict)

    def about(self, world: PoolWorld) -> tuple[Event, ...]:
        """The known Events about the pods and Deployments of a pool and its gateway."""
        listed = self._spaces.get(world.pool.namespace)
        if listed is None or not listed.events:
            return ()
        things = (*world.pods, *world.gateway.pods, *world.children, *world.gateway.children)
        wanted = sorted({one.ref.name for one in things if one.ref.kind in _KINDS})
        return tuple(event for name in wanted for event in listed.events.get(name, ()))

    async def look(self, key: Key) -> bool:
        """List those of the key's namespace, unless that was done a moment ago; whether it was done now."""
        known = self._spaces.setdefault(key.namespace, _Listed(0.0))
        if self.clock() < known.next_s:
            return False
        known.next_s = self.clock() + _EVERY_S
        self._spaces = {k: v for k, v in self._spaces.items() if v.next_s > self.clock() - _KEPT_S}
        try:
            async with asyncio.timeout(_PATIENCE_S):
                found = await self._list(key.namespace)
        except Forbidden as exc:
            known.next_s = self.clock() + _REFUSED_S
            log.warning("causes that only Events tell stay unknown: %s", exc)
            return False
        except (KubeError, TimeoutError) as exc:
            log.info("no list of Events: %s", str(exc) or "no answer in time")
            return False
        changed = found != known.events
        known.events = found
        return changed

    async def _list(self, namespace: str) -> dict[str, list[Event]]:
        found: dict[str, list[Event]] = {}
        count = 0
        async for event in self.source.list("v1", "Event", namespace, field_selector="type=Warning"):
            about = event.get("involvedObject") or {}
            kind, name = about.get("kind"), str(about.get("name", ""))
            if kind in _KINDS:
                owner = name.rpartition("-")[0] if kind == "ReplicaSet" else name
                found.setdefault(owner, []).append(Event.of(event))
            count += 1
            if count >= _MOST:
                log.info("more than %d Warning Events in %s; the rest is not looked at", _MOST, namespace)
                break
        return found


def again_s(waited_s: float) -> float:
    """When a pool that has lacked pods for so long is to be looked at again: less and less often."""
    return min(_LONGEST_S, max(_EVERY_S, waited_s))


def is_stuck(world: PoolWorld) -> bool:
    """Whether something does not come up that an Event may tell of: a pod is not ready, or cannot be made."""
    pods = (one.object for one in (*world.pods, *world.gateway.pods))
    if any(not is_ready(pod) and not is_leaving(pod) for pod in pods):
        return True
    children = (*world.children, *world.gateway.children)
    return any(_lacks_pods(child.object) for child in children if child.ref.kind == "Deployment")


def _lacks_pods(deployment: dict[str, Any]) -> bool:
    status = deployment.get("status") or {}
    wanted: int = (deployment.get("spec") or {}).get("replicas", 1)
    return "observedGeneration" in status and status.get("replicas", 0) < wanted
