"""Resources of a runtime pod: requests, scratch space with limits, a volume for compiled kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from treeline_operator.api.pool import InferencePool
from treeline_operator.api.source import Cache
from treeline_operator.plan.download import claim_name, files
from treeline_operator.plan.objects import manifest
from treeline_operator.quantity import quantity
from treeline_operator.world import Observed

CACHE_DIR: Final = "/cache"
_CACHE: Final = "cache"
_CACHE_LIMIT: Final = "20Gi"
_TMP_LIMIT: Final = "10Gi"
"""A pod that writes more than the limit of an emptyDir is evicted, and the node is not filled up by it."""
_CPU_RANK: Final = (100, 512)
"""Milli-CPUs and MiB of a process that computes on CPUs."""
_GPU_RANK: Final = (2, 4)
"""CPUs and GiB of one that computes on a GPU."""
_UNKNOWN_WEIGHTS_GIB: Final = 4
_SHARED_GIB: Final = 2
_LEAST_SHARED_GIB: Final = 4

_CACHES: Final = (
    ("HF_HOME", "hf"),
    ("XDG_CACHE_HOME", "xdg"),
    ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
    ("TORCH_EXTENSIONS_DIR", "torch-extensions"),
    ("TRITON_CACHE_DIR", "triton"),
    ("CUDA_CACHE_PATH", "cuda"),
    ("FLASHINFER_WORKSPACE_BASE", "flashinfer"),
)
"""Environment → folder in the cache, for every engine: what torch, Triton, CUDA and FlashInfer compile at run time."""


def gib(size: str | None) -> float:
    """A quantity of bytes in GiB; 0 if unknown."""
    return float(quantity(size) or 0) / 2**30


def requests(pool: InferencePool) -> dict[str, str]:
    """Default requests of a pod, which grow with its ranks. On GPUs: two CPUs per device (one for its process, one for
    the tokenizer), and memory for both, for their part of `/dev/shm`, and for the weights in transit. Weights pass in
    parts, so half of their size is enough, and pods fit on small nodes. The host cache comes on top."""
    ranks, size, kept = pool.spec.ranks, pool.spec.model.size, gib(pool.spec.engine.host_cache)
    if not pool.spec.accelerator.is_gpu:
        cpu, memory = _CPU_RANK
        return {"cpu": f"{cpu * ranks}m", "memory": f"{memory * ranks + int(kept * 1024)}Mi"}
    cpu, memory = _GPU_RANK
    weights = math.ceil(gib(size) / 2) if size else _UNKNOWN_WEIGHTS_GIB * ranks
    return {"cpu": str(cpu * ranks), "memory": f"{memory * ranks + weights + math.ceil(kept)}Gi"}


def cache_env(own: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Environment that makes an engine keep compiled kernels in the cache volume; `own` are its private folders."""
    for name, folder in (*_CACHES, *own):
        yield name, f"{CACHE_DIR}/{folder}"


def cache_claim_name(pool: str) -> str:
    """The claim that is made for what a pool's engine compiles."""
    return f"{pool}-cache"


def volumes(pool: InferencePool, *, shared_memory: bool) -> Iterator[dict[str, Any]]:
    """`/tmp`, the cache, and `/dev/shm` for engines of several processes."""
    yield {"name": "tmp", "emptyDir": {"sizeLimit": _TMP_LIMIT}}
    cache = pool.spec.engine.cache
    if cache is None:
        yield {"name": _CACHE, "emptyDir": {"sizeLimit": _CACHE_LIMIT}}
    else:
        claim = cache.claim_name or cache_claim_name(pool.name)
        yield {"name": _CACHE, "persistentVolumeClaim": {"claimName": claim}}
    if shared_memory:
        # Counts as the container's memory; without a limit it may use the whole node's.
        size = max(_LEAST_SHARED_GIB, _SHARED_GIB * pool.spec.ranks)
        yield {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Gi"}}


def mounts(*, shared_memory: bool) -> Iterator[dict[str, Any]]:
    """The mounts of these volumes."""
    yield {"name": "tmp", "mountPath": "/tmp"}
    yield {"name": _CACHE, "mountPath": CACHE_DIR}
    if shared_memory:
        yield {"name": "shm", "mountPath": "/dev/shm"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A claim of the pool: its name, its request, and the field of the spec."""

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
    """The claim. Parts that cannot change (class, access modes, a smaller size) stay as they are."""
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
    """Sentences about parts of the existing claim that differ from the spec and cannot change."""
    if observed is None:
        return
    cache, name, there = asked.cache, asked.name, observed.object["spec"]
    if sorted(there.get("accessModes", ())) != sorted(cache.access_modes or ("ReadWriteOnce",)):
        yield f"claim {name} keeps its access modes {there.get('accessModes')}; delete it to have it created again"
    if cache.storage_class_name and there.get("storageClassName") != cache.storage_class_name:
        yield f"claim {name} keeps its class {there.get('storageClassName')}; delete it to have it created again"
    held = there.get("resources", {}).get("requests", {}).get("storage", "0")
    if cache.size is not None and (quantity(held) or 0) > (quantity(cache.size) or 0):
        yield f"claim {name} keeps its size {held}: claims cannot shrink"


def unshareable(pool: InferencePool, asked: Wanted, observed: Observed | None) -> str:
    """Why pods would wait for the claim's volume for ever; empty if they would not.

    A ReadWriteOnce volume is attached to one node: pods on other nodes hang in ContainerCreating, and only the
    kubelet's Events say why.
    """
    modes = set(asked.cache.access_modes or ("ReadWriteOnce",))
    if observed is not None:
        modes = set(observed.object["spec"].get("accessModes", ())) or modes
    most = max(pool.spec.replicas, pool.spec.autoscaling.max_replicas or 0) * pool.spec.accelerator.nodes
    if (prompts := pool.spec.prefill) is not None:
        most += max(pool.prefill_replicas, prompts.max_replicas or 0)
    how = f"set {asked.field}.accessModes to [ReadWriteMany], of a storage class that has it"
    again = f" (delete claim {asked.name} to have it created again)" if observed is not None else ""
    if "ReadWriteMany" in modes:
        return ""
    if "ReadWriteOnce" not in modes and "ReadWriteOncePod" in modes:
        return (
            f"claim {asked.name} is ReadWriteOncePod: one pod at a time can have it, also while a rollout "
            f"starts a new one; {how}{again}"
        )
    if pool.spec.accelerator.nodes > 1:
        return (
            f"claim {asked.name} is {' and '.join(sorted(modes))}: a pod of a group that is on another node cannot "
            f"start, and then its group never serves; {how}{again}"
        )
    if most > 1:
        return (
            f"claim {asked.name} is {' and '.join(sorted(modes))}: all {most} pods must be on one node, and pods "
            f"on others do not start; {how}{again}"
        )
    return ""
