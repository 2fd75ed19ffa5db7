"""Attention backends behind one interface."""

from treeline_runtime.attention.base import ATTENTION_BACKENDS, AttentionBackend, Layout
from treeline_runtime.attention.torch_sdpa import TorchSDPA

__all__ = ["ATTENTION_BACKENDS", "AttentionBackend", "Layout"]

ATTENTION_BACKENDS.register("torch_sdpa", TorchSDPA)
