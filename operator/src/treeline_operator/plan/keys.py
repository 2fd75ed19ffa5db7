"""Secrets that are made once, never read, and made again when pods wait for them in vain: the key pair of a gateway's
KV sockets, and the key to the administration of a pool's engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from treeline_operator import names
from treeline_operator.actions import CreateKeys
from treeline_operator.plan.facts import condition_of, container_statuses, find, since, state_of
from treeline_operator.plan.gateway_common import GatewayContext
from treeline_operator.plan.objects import manifest
from treeline_operator.world import GatewayWorld, Observed

STUCK_S: Final = 30.0
"""How long a pod may wait for its volumes before the key pair is made again, should it be missing; and when to look
again while pods wait: no watch reports that time has passed."""


def has_keys(world: GatewayWorld) -> bool:
    """Whether the key pair was made, as far as can be known: the Secret is never read.

    The picker's Deployment is the evidence. It is written after the keys, and not before they were asked for.
    """
    return find(world.children, "Deployment", names.epp(world.name)) is not None


def keys(context: GatewayContext) -> dict[str, Any]:
    """The Secret with the key pair, without its data."""
    meta = context.meta(names.kv_keys(context.gateway))
    return manifest("v1", "Secret", meta, type="Opaque", immutable=True)


def keys_again(context: GatewayContext) -> CreateKeys:
    """Make the key pair once more for pods that mount it and do not start; if it is there, that changes nothing."""
    return CreateKeys(keys(context), "a pod waits for its volumes; should the keys be missing, they are made again")


def admin_key(pool: str, meta: dict[str, Any]) -> CreateKeys:
    """The key to the administration of a pool's engines. `meta` has its owner; its name is ours."""
    secret = manifest("v1", "Secret", {**meta, "name": names.admin_key(pool)}, type="Opaque", immutable=True)
    return CreateKeys(secret, "a key to the engines' administration", fresh="word")


def hands_admin_key(deployment: Mapping[str, Any], pool: str) -> bool:
    """Whether the pods of a Deployment are handed that key: then it was made before."""
    containers = deployment["spec"]["template"]["spec"].get("containers", ())
    given = (env.get("valueFrom") or {} for one in containers for env in one.get("env") or ())
    return any((source.get("secretKeyRef") or {}).get("name") == names.admin_key(pool) for source in given)


def misses_admin_key(pod: Mapping[str, Any], pool: str) -> bool:
    """Whether the kubelet cannot start a pod's containers for want of that key."""
    waiting = (state_of(status, "waiting") for status in container_statuses(pod, init=False))
    return any(
        one.get("reason") == "CreateContainerConfigError" and names.admin_key(pool) in str(one.get("message"))
        for one in waiting
    )


def longest_wait(pods: Iterable[Observed], now: datetime) -> float | None:
    """For how many seconds the first of the pods that wait for their volumes has waited; None if none does."""
    waits = (volumes_awaited(pod.object, now) for pod in pods)
    return max((waited for waited in waits if waited is not None), default=None)


def volumes_awaited(pod: dict[str, Any], now: datetime) -> float | None:
    """For how many seconds a pod that has its node has waited to have its volumes; None if it does not wait."""
    placed, begun = condition_of(pod, "PodScheduled"), condition_of(pod, "PodReadyToStartContainers")
    if placed.get("status") != "True" or begun.get("status") != "False":
        return None
    return max(0.0, (now - (since(pod, "PodScheduled") or now)).total_seconds())
