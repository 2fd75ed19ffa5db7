"""What a model is given of a step besides its input: the seam between models, operations and attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from treeline_runtime.kvcache.pool import KVPool


class Attends(Protocol):
    """An attention backend, or what stands in its place while a step is captured."""

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
    """What the adapters (LoRA) of a step's sequences add to its projections."""

    def delta(self, projection: str, x: torch.Tensor) -> torch.Tensor | None:
        """x (tokens, inputs) → (tokens, outputs) to be added; None where no adapter of the step changes it.

        `projection`: the name of its weights, without `.weight`; of several that are stacked, joined with `+`.
        """


@dataclass(frozen=True, slots=True)
class Context:
    """What a model needs of the step besides its input: where to attend, at which angles, and with which adapters."""

    attention: Attends
    plan: Any
    """What `attention` made for this step."""
    slots: torch.Tensor
    """(tokens,) int64: where each token's keys and values go."""
    cos: torch.Tensor
    """(ropes, tokens, 1, rotated elements of a head): a table for each rope that the model's layers have"""
    sin: torch.Tensor
    unfinite: torch.Tensor | None = None
    """(tokens,) int32, zeros; fused operations write 1 where a token's keys or values are not finite."""
    adapters: Adapters | None = None
