"""What a decoder asks of an encoder of images and videos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from treeline_runtime.messages import MediaItem


class MediaEncoder(Protocol):
    """Makes embeddings of items, which take the place of those of their tokens."""

    depth: int
    """How many further features a token has, each `hidden` wide: `Context.deep`. 0: none."""

    def encode(self, items: Sequence[tuple[MediaItem, torch.Tensor]]) -> list[torch.Tensor]:
        """Encodes items together, each with the processor's output, of `item.shape` on any device.

        Returns for each item (count, (1 + depth) * hidden): the embedding, then the features of layer 0, 1, …"""
