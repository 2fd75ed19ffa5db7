"""Models: configuration, weights, and the decoder."""

from __future__ import annotations

from treeline_runtime.models.config import ModelConfig, ModelError, read_config

__all__ = ["ModelConfig", "ModelError", "read_config"]
