"""Resolves "auto": limits from configuration, model and machine; the KV pool's size; errors where memory is short."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENOMEM
from pathlib import Path
from typing import Any

import torch

from treeline_runtime.config import ConfigError, EngineConfig, SchedulerConfig
from treeline_runtime.memory import (
    CHAIN_BYTES,
    DEFAULT_FRACTION,
    bytes_per_token,
    draft_bytes_per_token,
    kv_budget,
    kv_heads_of_ranks,
    reserved_bytes,
    resolve_context_length,
    step_limits,
)
from treeline_runtime.models.config import ModelConfig
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.loader import resolve_device, resolve_dtype, resolve_kv_dtype
from treeline_runtime.models.lora import pool_bytes
from treeline_runtime.models.model_config import TowerConfig
from treeline_runtime.scheduler.ranks.protocol import Group, together

CPU_POOL_LIMIT = 1 << 30
"""Bytes kept free on a CPU, where the pool shares the machine."""


def num_pages(config: EngineConfig, token_bytes: int, device: torch.device, reserved: int = 0) -> int:
    """From `max_total_tokens`, else from memory. Raises ConfigError if not even a page fits, or not all of them.

    token_bytes: of a token in the pool. reserved: device memory taken besides the pool: tables, workspaces, graphs.
    """
    page_bytes = token_bytes * config.page_size
    if config.max_total_tokens is None:
        if device.type == "cuda":
            budget = kv_budget(config, *torch.cuda.mem_get_info(device)) - reserved
        else:
            budget = _cpu_budget(config)
        if budget < page_bytes:
            raise ConfigError(_no_pool(config, device, reserved, page_bytes))
        return budget // page_bytes
    pages = config.max_total_tokens // config.page_size
    if pages == 0:
        raise ConfigError(f"max_total_tokens {config.max_total_tokens} is less than one page")
    on_cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] - reserved if on_cuda else _available_memory() // config.ranks_here
    if pages * page_bytes > free:
        raise ConfigError(
            f"max_total_tokens {config.max_total_tokens} needs {_gib(pages * page_bytes)} of KV pool, but "
            f"{_gib(free)} are free on {device}: at most {free // page_bytes * config.page_size} tokens fit "
            f"({page_bytes // config.page_size} bytes each)"
        )
    return pages


def num_host_pages(
    config: SchedulerConfig, model: ModelConfig, dtype: torch.dtype, draft_bytes: int, taken: int
) -> int:
    """Pages of `host_cache`, each with the parts of all ranks. draft_bytes: of a token, by a drafter. taken: bytes of
    host memory for other things. Raises ConfigError if none fits, or host memory lacks room."""
    if config.host_cache is None:
        return 0
    whole = dataclasses.replace(model, num_kv_heads=kv_heads_of_ranks(config, model))
    token_bytes = bytes_per_token(whole, dtype.itemsize) + draft_bytes
    page_bytes = token_bytes * config.page_size
    pages, free = config.host_cache // page_bytes, max(_available_memory() - taken, 0)
    if pages == 0:
        raise ConfigError(f"host_cache {config.host_cache} is less than a page, which takes {page_bytes} bytes")
    if pages * page_bytes > free:
        raise ConfigError(
            f"host_cache needs {_gib(config.host_cache)}, but {_gib(free)} of host memory are free: make it smaller"
        )
    return pages


def _no_pool(config: EngineConfig, device: torch.device, reserved: int, page_bytes: int) -> str:
    page = f"a page of {config.page_size} tokens takes {page_bytes / (1 << 20):.2f} MiB"
    if device.type != "cuda":
        share = "a tenth" if config.mem_fraction is None else f"mem_fraction {config.mem_fraction}"
        return (
            f"no memory left for the KV pool: {_gib(_available_memory())} are free, of which {share} is for it, and "
            f"{page}: raise mem_fraction, or set max_total_tokens"
        )
    sizes = {"weights": torch.cuda.memory_allocated(device), "reserved for tables, workspaces and graphs": reserved}
    return (
        f"no memory left for the KV pool at mem_fraction {config.mem_fraction or DEFAULT_FRACTION}: "
        f"{_numbers(device, sizes)}; {page}: raise mem_fraction, lower max_running_requests, context_length, "
        "max_graph_batch or max_graph_tokens, or use a larger GPU or a smaller dtype"
    )


TO_SET = "lower mem_fraction (or max_total_tokens), chunked_prefill_size, max_graph_batch or max_graph_tokens"
TO_LOAD = "stop other programs that use it, or use a larger device, a smaller dtype or a smaller model"


@contextmanager
def told_as_settings(
    what: str, device: torch.device, sizes: Mapping[str, int] | None = None, hint: str = TO_SET
) -> Iterator[None]:
    """A context manager: lack of memory for `what` becomes a ConfigError with the numbers and what to set.

    sizes: bytes by name.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or getattr(error, "errno", 0) == ENOMEM
        # nor has torch a type for it on a CPU, and where CUDA itself has no memory, for a graph say
        if not of_memory and not any(words in str(error) for words in ("can't allocate memory", "out of memory")):
            raise
        raise ConfigError(f"no memory for {what}: {_numbers(device, sizes or {})}: {hint} ({error})") from None


def _numbers(device: torch.device, sizes: Mapping[str, int]) -> str:
    said = [f"{name} {_gib(size)}" for name, size in sizes.items()]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        said.append(f"{_gib(free)} of {_gib(total)} free on {device}")
    else:
        said.append(f"{_gib(_available_memory())} free")
    return ", ".join(said)


def let_go(error: BaseException) -> None:
    """Clears an error's frames, so that keeping it keeps no models or pools."""
    at: BaseException | None = error
    while at is not None:
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__


def give_back(device: torch.device) -> None:
    """Returns unreferenced memory to the device, and spare heap to the system."""
    gc.unfreeze()  # circles among objects that were frozen would stay
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def _cpu_budget(config: EngineConfig) -> int:
    """Of the machine's memory each rank has the same share."""
    free = _available_memory()
    pool = int(free * config.mem_fraction) if config.mem_fraction is not None else min(int(free * 0.1), CPU_POOL_LIMIT)
    return pool // config.ranks_here


def _available_memory() -> int:
    """Bytes that this process may still take: the machine's, or its control group's if that is less."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    return min(available, _available_in_group(Path("/sys/fs/cgroup")))


def _available_in_group(group: Path) -> int:
    """Bytes that a control group may still allocate. File pages count as free, since they can be dropped."""
    limit, used, stat = (group / f"memory.{name}" for name in ("max", "current", "stat"))
    if not (limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max"):
        return sys.maxsize
    counts = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    files = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
    return max(int(text) - int(used.read_text()) + files, 0)


@dataclass(frozen=True)
class Resolved:
    """Limits in force."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    context_length: int
    page_size: int
    num_pages: int
    host_pages: int
    """Pages of the host's tier of the cache; 0: it has none."""
    adapter_bytes: int
    """Host memory of a rank for adapters."""
    kv_bytes_per_token: int
    draft_bytes_per_token: int
    """Of these, what a drafter keeps."""
    max_running_requests: int
    chunked_prefill_size: int
    longest_span: int
    """Tokens that a chunk may not cut; 0: it may be cut anywhere."""
    overlap_depth: int
    max_graph_batch: int
    max_graph_tokens: int
    reserved_bytes: int
    """Bytes reserved on a CUDA device, besides weights and KV pool."""

    @property
    def max_total_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def longest_request(self) -> int:
        """Tokens of prompt and output of a request: bounded by context and pool."""
        return min(self.context_length, self.max_total_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the info endpoint."""
        derived = {"max_total_tokens": self.max_total_tokens, "longest_request": self.longest_request}
        dtypes = {name: str(getattr(self, name)).removeprefix("torch.") for name in ("dtype", "kv_dtype")}
        return dataclasses.asdict(self) | derived | dtypes | {"device": str(self.device)}


def resolve(config: SchedulerConfig, model: Decoder, group: Group | None = None) -> Resolved:
    """The limits of all ranks of a group, which have as many pages as the one with the least memory. Raises ConfigError
    if settings and machine do not fit."""
    limits, pages = together(group, lambda: _resolve(config, model), lambda limits: limits.num_pages)
    return dataclasses.replace(limits, num_pages=pages)


def _resolve(config: SchedulerConfig, model: Decoder) -> Resolved:
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, device)
    on_cpu = device.type == "cpu"
    total = None if on_cpu else torch.cuda.get_device_properties(device).total_memory
    limits = step_limits(config, model.own, total)
    if model.pooler is not None:
        limits = dataclasses.replace(limits, graph_batch=0)  # nothing is decoded
    context_length = resolve_context_length(config, model.config)
    chunk = -(-limits.chunk // config.page_size) * config.page_size  # chunks end at page boundaries
    vision = model.config.vision if model.config.both_ways else None
    span = vision.count if isinstance(vision, TowerConfig) else 0
    if span > chunk:
        raise ConfigError(
            f"chunked_prefill_size {chunk} is less than the {span} tokens of an image, which are computed together"
        )
    ranks = max(config.ep_size // config.tp_size, 1)
    reserved = 0 if on_cpu else reserved_bytes(limits, context_length, model.own, dtype.itemsize, ranks)
    if config.serves_adapters and not on_cpu:
        reserved += pool_bytes(model.sites, config.max_loras, config.max_lora_rank, dtype.itemsize)
    if model.drafter is not None and not on_cpu:
        reserved += CHAIN_BYTES
    # on all ranks, so that they have the same pages, though only rank 0 has the drafter
    draft_bytes = draft_bytes_per_token(config, model.config, dtype.itemsize)
    token_bytes = bytes_per_token(model.own, kv_dtype.itemsize) + draft_bytes
    pages = num_pages(config, token_bytes, device, reserved)
    taken = pages * token_bytes * config.page_size * config.ranks_here if on_cpu else 0
    return Resolved(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        context_length=context_length,
        page_size=config.page_size,
        num_pages=pages,
        host_pages=num_host_pages(config, model.config, kv_dtype, draft_bytes, taken),
        adapter_bytes=config.max_lora_memory or _available_memory() // 10 // config.ranks_here,
        kv_bytes_per_token=token_bytes,
        draft_bytes_per_token=draft_bytes,
        max_running_requests=limits.running,
        chunked_prefill_size=chunk,
        longest_span=span,
        overlap_depth=(0 if on_cpu else 1) if config.overlap_depth is None else config.overlap_depth,
        max_graph_batch=0 if on_cpu else limits.graph_batch,
        max_graph_tokens=0 if on_cpu else limits.graph_tokens,
        reserved_bytes=reserved,
    )
