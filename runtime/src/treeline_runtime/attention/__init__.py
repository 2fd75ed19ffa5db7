"""Attention backends behind one interface."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from treeline_runtime.attention.base import ATTENTION_BACKENDS, AttentionBackend, Layout
from treeline_runtime.attention.torch_sdpa import TorchSDPA
from treeline_runtime.config import ConfigError
from treeline_runtime.kvcache.pool import KVPool

__all__ = ["ATTENTION_BACKENDS", "AttentionBackend", "Layout", "new_attention", "obstacle_to_flashinfer"]


def _flashinfer(pool: KVPool, num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionBackend:
    if reason := obstacle_to_flashinfer(pool.keys[0].device, pool.keys[0].dtype, head_dim):
        raise ConfigError(f"attention_backend flashinfer: {reason}")
    from treeline_runtime.attention.flashinfer import FlashInfer

    return FlashInfer(pool, num_heads, num_kv_heads, head_dim)


def obstacle_to_flashinfer(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashInfer cannot serve such a model here; None if it can."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if find_spec("flashinfer") is None:
        return "it is not installed: pip install 'treeline-runtime[cuda]'"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it has no kernels for {str(dtype).removeprefix('torch.')}"
    if head_dim not in (64, 128, 256):
        return f"it has no kernels for heads of {head_dim}"
    return None


def new_attention(name: str, pool: KVPool, num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionBackend:
    """The backend of that name; "auto" is the fastest that can serve the model."""
    if name == "auto":
        obstacle = obstacle_to_flashinfer(pool.keys[0].device, pool.keys[0].dtype, head_dim)
        name = "torch_sdpa" if obstacle else "flashinfer"
    return ATTENTION_BACKENDS.get(name)(pool, num_heads, num_kv_heads, head_dim)


ATTENTION_BACKENDS.register("torch_sdpa", TorchSDPA)
ATTENTION_BACKENDS.register("flashinfer", _flashinfer)
