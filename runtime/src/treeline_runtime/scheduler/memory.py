"""How many pages the KV pool gets."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from treeline_runtime.config import ConfigError, EngineConfig
from treeline_runtime.models.config import ModelConfig

CPU_POOL_LIMIT = 1 << 30
"""Bytes: on a CPU the pool shares the machine with everything else."""


def bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """dtype: of the KV cache"""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize


def num_pages(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, reserved: int = 0
) -> int:
    """From `max_total_tokens`, else from memory. Raises ConfigError where not even a page fits, or not all of them.

    reserved: bytes of device memory that will be taken besides the pool: tables, workspaces, graphs.
    """
    page_bytes = bytes_per_token(model, dtype) * config.page_size
    if config.max_total_tokens is None:
        budget = _cuda_budget(config, device) - reserved if device.type == "cuda" else _cpu_budget(config)
        if budget < page_bytes:
            raise ConfigError("no memory is left for the KV pool: raise mem_fraction, or set max_total_tokens")
        return budget // page_bytes
    pages = config.max_total_tokens // config.page_size
    if pages == 0:
        raise ConfigError(f"max_total_tokens {config.max_total_tokens} is less than one page")
    free = torch.cuda.mem_get_info(device)[0] - reserved if device.type == "cuda" else _available_memory()
    if pages * page_bytes > free:
        raise ConfigError(
            f"max_total_tokens {config.max_total_tokens} needs {_gib(pages * page_bytes)} of KV pool, but "
            f"{_gib(free)} are free on {device}: at most {free // page_bytes * config.page_size} tokens fit "
            f"({page_bytes // config.page_size} bytes each)"
        )
    return pages


@contextmanager
def told_as_settings(what: str) -> Iterator[None]:
    """Where there is no memory for `what` on the device: ConfigError, which says what to set."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"no memory for {what}: lower mem_fraction (or max_total_tokens), chunked_prefill_size or max_graph_batch "
            f"({error})"
        ) from None


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def _cuda_budget(config: EngineConfig, device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(free - total * (1 - (config.mem_fraction or 0.85)))


def _cpu_budget(config: EngineConfig) -> int:
    free = _available_memory()
    if config.mem_fraction is not None:
        return int(free * config.mem_fraction)
    return min(int(free * 0.1), CPU_POOL_LIMIT)


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
    """What a control group's limit leaves; file pages do not count as used, since they give way (weights are some)."""
    limit, used, stat = (group / f"memory.{name}" for name in ("max", "current", "stat"))
    if not (limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max"):
        return sys.maxsize
    counts = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    files = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
    return max(int(text) - int(used.read_text()) + files, 0)
