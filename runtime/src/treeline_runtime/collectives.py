"""Sums and gathers over the ranks of a group, each of which computes its part of one model.

All ranks make the same calls in the same order. Between CPUs gloo moves the data; between GPUs of one machine torch's
symmetric memory, whose kernels read the other GPUs' memory directly, without NVLink multicast; where a GPU cannot read
another's memory, NCCL.
"""

from __future__ import annotations

from typing import Protocol

import torch

from treeline_runtime.models.shards import Rank


class Ranks(Protocol):
    """A rank's connection to its group."""

    rank: Rank

    def sum(self, x: torch.Tensor, /) -> torch.Tensor:
        """The sum of all ranks' x, the same bits on every rank. May overwrite x."""

    def gather(self, x: torch.Tensor, /) -> torch.Tensor:
        """x (rows, n) → (rows, ranks x n), a new tensor: the ranks' parts in order."""

    def close(self) -> None:
        """Leaves the group."""


class Alone:
    """The only rank."""

    rank = Rank(0, 1)

    def sum(self, x: torch.Tensor, /) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor, /) -> torch.Tensor:
        return x

    def close(self) -> None:
        """There is nothing to leave."""


ALONE = Alone()
