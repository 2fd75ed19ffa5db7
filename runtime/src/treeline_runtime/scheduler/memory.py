"""How many pages the KV pool gets."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from treeline_runtime.config import ConfigError, EngineConfig
from treeline_runtime.models.config import ModelConfig

CPU_POOL_LIMIT = 1 << 30
"""Bytes: on a CPU the pool shares the machine with everything else."""


def bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize


def num_pages(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """From `max_total_tokens`, else from memory. Raises ConfigError where not even a page fits."""
    if config.max_total_tokens is not None:
        pages = config.max_total_tokens // config.page_size
        if pages == 0:
            raise ConfigError(f"max_total_tokens {config.max_total_tokens} is less than one page")
        return pages
    budget = _cuda_budget(config, device) if device.type == "cuda" else _cpu_budget(config)
    pages = budget // (bytes_per_token(model, dtype) * config.page_size)
    if pages < 1:
        raise ConfigError("no memory is left for the KV pool: raise mem_fraction, or set max_total_tokens")
    return pages


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
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(int(text) - int(used.read_text()), 0))
    return available
