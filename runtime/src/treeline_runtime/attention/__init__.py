"""Attention backends behind one interface."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec

import torch

from treeline_runtime.attention.base import AttentionBackend, HostPages, Layout
from treeline_runtime.attention.torch_sdpa import TorchSDPA
from treeline_runtime.config import ConfigError
from treeline_runtime.kvcache.pool import KVPool
from treeline_runtime.models.model_config import Scoring
from treeline_runtime.ops import obstacle_to_triton
from treeline_runtime.registry import Registry

__all__ = ["ATTENTION_BACKENDS", "AttentionBackend", "HostPages", "Layout", "new_attention"]

logger = logging.getLogger(__name__)


def _triton(pool: KVPool, num_heads: int, scoring: Scoring) -> AttentionBackend:
    """Decode and prompts in our own kernels."""
    if obstacle := _obstacle_to_our_kernels(pool.keys[0].device):
        raise ConfigError(f"attention_backend triton: {obstacle}")
    from treeline_runtime.attention.decode import Decode
    from treeline_runtime.attention.extend import Extend

    return Decode(Extend(pool, num_heads, scoring))


def _flashinfer(pool: KVPool, num_heads: int, scoring: Scoring) -> AttentionBackend:
    """Decode in our own kernel, prompts in FlashInfer's."""
    if obstacle := _obstacle(pool, scoring):
        raise ConfigError(f"attention_backend flashinfer: {obstacle}")
    from treeline_runtime.attention.decode import Decode
    from treeline_runtime.attention.flashinfer import FlashInfer

    return Decode(FlashInfer(pool, num_heads, scoring))


def _obstacle_to_our_kernels(device: torch.device) -> str | None:
    return obstacle_to_triton(device) if device.type == "cuda" else "it needs a CUDA device"


def _obstacle(pool: KVPool, scoring: Scoring) -> str | None:
    """Why FlashInfer cannot serve this model here; None if it can."""
    if obstacle := _obstacle_to_our_kernels(pool.keys[0].device):
        return obstacle
    if find_spec("flashinfer") is None:
        return "it is not installed: pip install 'treeline-llm[cuda]'"
    if pool.dtype not in (torch.bfloat16, torch.float16):
        return f"it has no kernels for {str(pool.dtype).removeprefix('torch.')}"
    if scoring.sinks:
        return "it has no attention sinks"
    if (head_dim := pool.keys[0].shape[-1]) not in (64, 128, 256):
        return f"it has no kernels for heads of {head_dim}"
    return None


def new_attention(name: str, pool: KVPool, num_heads: int, scoring: Scoring) -> AttentionBackend:
    """The backend of that name; "auto" is the fastest that works for the model here. Raises ConfigError."""
    if name != "auto":
        return ATTENTION_BACKENDS.get(name)(pool, num_heads, scoring)
    if _obstacle_to_our_kernels(pool.keys[0].device):
        return TorchSDPA(pool, num_heads, scoring)
    try:
        return _flashinfer(pool, num_heads, scoring)
    except ConfigError as error:
        obstacle = str(error)
    except Exception as error:  # its import, or a compiler that is missing or fails: there is another way
        logger.debug("FlashInfer", exc_info=True)
        obstacle = f"FlashInfer cannot be used here: {error!r:.500}"
    logger.info("prompts use our own kernel, which is slower for long prompts than FlashInfer: %s", obstacle)
    return _triton(pool, num_heads, scoring)


ATTENTION_BACKENDS: Registry[Callable[[KVPool, int, Scoring], AttentionBackend]] = Registry(
    "attention backend", {"torch_sdpa": TorchSDPA, "triton": _triton, "flashinfer": _flashinfer}
)
