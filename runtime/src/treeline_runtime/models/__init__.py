"""Models: configuration, weights, and the decoder they make."""

from treeline_runtime.models.config import ModelConfig, ModelError

__all__ = ["ModelConfig", "ModelError"]
