"""Attention backends behind one interface."""

from treeline_runtime.attention import torch_sdpa as _torch_sdpa  # registers itself
from treeline_runtime.attention.base import ATTENTION_BACKENDS, AttentionBackend, Layout

__all__ = ["ATTENTION_BACKENDS", "AttentionBackend", "Layout"]

del _torch_sdpa
