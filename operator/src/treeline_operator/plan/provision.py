"""What a runtime pod is provided with: requests, scratch space with limits, a place for what the engine compiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

from treeline_operator.api.pool import InferencePool
from treeline_operator.quantity import quantity

CACHE_DIR: Final = "/cache"
_CACHE: Final = "cache"
_CACHE_LIMIT: Final = "20Gi"
_TMP_LIMIT: Final = "10Gi"
"""A pod that writes more than the limit of an emptyDir is evicted, and the node is not filled up by it."""
_CPUS_PER_DEVICE: Final = 2
_MEMORY_GIB: Final = 4
_UNKNOWN_MEMORY_GIB: Final = 8
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
    """A quantity of bytes in GiB; 0 where it is not known."""
    return float(quantity(size) or 0) / 2**30


def requests(pool: InferencePool) -> dict[str, str]:
    """What a pod requests by default.

    On GPUs: two CPUs for each device (a process that feeds it, and the tokenizer beside it), and memory for that and
    for the weights on their way to the device. They pass through in parts, so half of their size is enough, and a pod
    fits on small nodes too.
    """
    accelerator, size = pool.spec.accelerator, pool.spec.model.size
    if not accelerator.is_gpu:
        return {"cpu": "100m", "memory": "512Mi"}
    memory = _MEMORY_GIB + math.ceil(gib(size) / 2) if size else _UNKNOWN_MEMORY_GIB * accelerator.count
    return {"cpu": str(_CPUS_PER_DEVICE * accelerator.count), "memory": f"{memory}Gi"}


def cache_env(own: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Environment that makes an engine keep what it compiles in the cache; `own` are the folders of it alone."""
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
        # Counts as the container's memory; without a limit it may take all that the node has.
        size = max(_LEAST_SHARED_GIB, _SHARED_GIB * pool.spec.accelerator.count)
        yield {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Gi"}}


def mounts(*, shared_memory: bool) -> Iterator[dict[str, Any]]:
    """Where these volumes are."""
    yield {"name": "tmp", "mountPath": "/tmp"}
    yield {"name": _CACHE, "mountPath": CACHE_DIR}
    if shared_memory:
        yield {"name": "shm", "mountPath": "/dev/shm"}
