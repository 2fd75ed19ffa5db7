"""The claims that are made for a pool: one for what it downloads, one for what its engine compiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from treeline_operator.api.pool import InferencePool
from treeline_operator.api.source import Cache
from treeline_operator.plan.download import claim_name, files
from treeline_operator.plan.objects import manifest
from treeline_operator.plan.provision import cache_claim_name
from treeline_operator.quantity import quantity
from treeline_operator.world import Observed


@dataclass(frozen=True, slots=True)
class Wanted:
    """A claim that the pool is to have: its name, what asks for it, and which field of the spec that is."""

    name: str
    cache: Cache
    field: str
    keeps: str


def wanted(pool: InferencePool) -> Iterator[Wanted]:
    """The claims to make. A claim that exists already (`claimName`) is not ours."""
    model, engine = pool.spec.model.cache, pool.spec.engine.cache
    if model is not None and model.claim_name is None and files(pool).fetches:
        yield Wanted(claim_name(pool.name), model, "model.cache", "the downloaded model")
    if engine is not None and engine.claim_name is None:
        yield Wanted(cache_claim_name(pool.name), engine, "engine.cache", "what the engine compiles")


def claim(asked: Wanted, observed: Observed | None, meta: dict[str, Any]) -> dict[str, Any]:
    """The claim itself. What it cannot change any more (class, access modes, a smaller size) stays as it is."""
    cache = asked.cache
    size, modes, storage_class = cache.size or "0", list(cache.access_modes), cache.storage_class_name
    if observed is not None:
        there = observed.object["spec"]
        held = there.get("resources", {}).get("requests", {}).get("storage", "0")
        size = max(size, held, key=lambda text: quantity(text) or 0)
        modes = list(there.get("accessModes", ()))
        storage_class = there.get("storageClassName") if storage_class else None
    spec: dict[str, Any] = {
        "accessModes": modes or ["ReadWriteOnce"],
        "resources": {"requests": {"storage": size}},
    }
    if storage_class:
        spec["storageClassName"] = storage_class
    return manifest("v1", "PersistentVolumeClaim", meta, spec=spec)


def kept(asked: Wanted, observed: Observed | None) -> Iterator[str]:
    """What of the claim that is there stays otherwise than the spec asks for, since claims cannot change it."""
    if observed is None:
        return
    cache, name, there = asked.cache, asked.name, observed.object["spec"]
    if sorted(there.get("accessModes", ())) != sorted(cache.access_modes or ("ReadWriteOnce",)):
        yield f"claim {name} keeps its access modes {there.get('accessModes')}; delete it to have it made anew"
    if cache.storage_class_name and there.get("storageClassName") != cache.storage_class_name:
        yield f"claim {name} keeps its class {there.get('storageClassName')}; delete it to have it made anew"
    held = there.get("resources", {}).get("requests", {}).get("storage", "0")
    if cache.size is not None and (quantity(held) or 0) > (quantity(cache.size) or 0):
        yield f"claim {name} keeps its size {held}: claims cannot shrink"


def unshareable(pool: InferencePool, asked: Wanted, observed: Observed | None) -> str:
    """Why pods of the pool would wait for the claim's volume for ever; empty where they would not.

    A volume that is ReadWriteOnce is attached to one node: pods that the scheduler puts on another one hang in
    ContainerCreating, and only the kubelet's Events tell why.
    """
    modes = set(asked.cache.access_modes or ("ReadWriteOnce",))
    if observed is not None:
        modes = set(observed.object["spec"].get("accessModes", ())) or modes
    most = max(pool.spec.replicas, pool.spec.autoscaling.max_replicas or 0)
    how = f"set {asked.field}.accessModes to [ReadWriteMany], of a storage class that has it"
    again = f" (delete claim {asked.name} to have it made anew)" if observed is not None else ""
    if "ReadWriteMany" in modes:
        return ""
    if "ReadWriteOnce" not in modes and "ReadWriteOncePod" in modes:
        return (
            f"claim {asked.name} is ReadWriteOncePod: one pod at a time can have it, also while a rollout "
            f"starts a new one; {how}{again}"
        )
    if most > 1:
        return (
            f"claim {asked.name} is {' and '.join(sorted(modes))}: all {most} pods must be on one node, and pods "
            f"on others do not start; {how}{again}"
        )
    return ""
