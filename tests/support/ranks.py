"""The ranks of a group as threads of this process, which are connected by gloo as processes are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import distributed
from treeline_runtime.collectives import Ranks
from treeline_runtime.models.shards import Rank

T = TypeVar("T")


class Connected:
    """A rank's connection."""

    def __init__(self, rank: Rank, store: distributed.Store) -> None:
        self.rank = rank
        self._group = distributed.ProcessGroupGloo(store, rank.index, rank.count)

    def sum(self, x: torch.Tensor, /) -> torch.Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def gather(self, x: torch.Tensor, /) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.rank.count)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=1)

    def close(self) -> None:
        """The connection lasts as long as the process."""


@functools.cache
def _group(count: int) -> tuple[ThreadPoolExecutor, list[Connected]]:
    threads, store = ThreadPoolExecutor(count), distributed.HashStore()
    return threads, list(threads.map(lambda index: Connected(Rank(index, count), store), range(count)))


def on_ranks(count: int, compute: Callable[[Ranks], T]) -> list[T]:
    """Call it on all ranks at once. Return each rank's result."""
    threads, ranks = _group(count)
    return list(threads.map(compute, ranks))
