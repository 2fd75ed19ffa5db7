"""The context that a model gets with a step's input; it connects models, operations and attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from treeline_runtime.kvcache.pool import KVPool

if TYPE_CHECKING:
    from treeline_runtime.models.lora import AdapterStep


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


@dataclass(slots=True)
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
    adapters: AdapterStep | None = None
    """None: no row has one."""
    entering: list[torch.Tensor] = field(default_factory=list)
    """What entered the layers of `Decoder.watched`, each (tokens, hidden)."""
    room: torch.Tensor | None = None
    """(tokens, hidden): if given, the next sublayer's result is best put here, where other ranks read it."""
    deep: torch.Tensor | None = None
    """(`Decoder.media.depth`, tokens, hidden): what is added behind each of the first layers, zeros at text. None: no
    token is of an image."""
