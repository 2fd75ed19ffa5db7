"""The ranks of a group as threads of this process, which are connected by gloo as processes are."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from treeline_runtime.collectives import Ranks, join
from treeline_runtime.models.shards import Rank

T = TypeVar("T")


@functools.cache
def _group(count: int) -> tuple[ThreadPoolExecutor, list[Ranks]]:
    threads = ThreadPoolExecutor(count)
    with tempfile.TemporaryDirectory() as folder:
        meet = functools.partial(join, folder=Path(folder), device=torch.device("cpu"))
        return threads, list(threads.map(lambda index: meet(Rank(index, count)), range(count)))


class Strict:
    """Keep only what `Ranks` promises: a sum until the next call, and logits on rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.rank = ranks.rank
        self._last: torch.Tensor | None = None

    def sum(self, x: torch.Tensor, /) -> torch.Tensor:
        self._forget()
        self._last = self._ranks.sum(x.clone())
        x.fill_(torch.nan)
        return self._last

    def gather(self, x: torch.Tensor, /) -> torch.Tensor:
        self._forget()
        parts = self._ranks.gather(x)
        return parts.fill_(torch.nan) if self.rank.index else parts

    def first(self, x: torch.Tensor, /) -> torch.Tensor:
        self._forget()
        return self._ranks.first(x)

    def all_gather(self, x: torch.Tensor, /) -> torch.Tensor:
        self._forget()
        return self._ranks.all_gather(x)

    def reduce_scatter(self, x: torch.Tensor, /) -> torch.Tensor:
        self._forget()
        self._last = self._ranks.reduce_scatter(x.clone())
        x.fill_(torch.nan)
        return self._last

    def _forget(self) -> None:
        if self._last is not None:
            self._last.fill_(torch.nan)
            self._last = None


def on_ranks(count: int, compute: Callable[[Ranks], T]) -> list[T]:
    """Call it on all ranks at once. Return each rank's result."""
    threads, ranks = _group(count)
    return list(threads.map(compute, map(Strict, ranks)))
