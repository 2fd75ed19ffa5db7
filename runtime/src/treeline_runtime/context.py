"""The context that a model gets with a step's input; it connects models, operations and attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from treeline_runtime.kvcache.pool import KVPool


class Attends(Protocol):
    """An attention backend, or its stand-in during capture."""

    pool: KVPool

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Any,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""


class Adapters(Protocol):
    """The LoRA adapters of a step's sequences, which add to its projections."""

    def delta(self, projection: str, x: torch.Tensor) -> torch.Tensor | None:
        """x (tokens, inputs) → (tokens, outputs) to be added; None if no adapter of the step changes it.

        `projection`: the name of its weights without `.weight`; stacked ones are joined with `+`.
        """


@dataclass(frozen=True, slots=True)
class Context:
    """A step besides its input: attention, angles, adapters."""

    attention: Attends
    plan: Any
    """The plan of `attention` for this step."""
    slots: torch.Tensor
    """(tokens,) int64: where each token's keys and values are stored."""
    cos: torch.Tensor
    """(ropes, tokens, 1, rotated elements of a head): one table per rope of the model"""
    sin: torch.Tensor
    unfinite: torch.Tensor | None = None
    """(tokens,) int32, zeros; fused operations write 1 where keys or values are not finite."""
    adapters: Adapters | None = None
