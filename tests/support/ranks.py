"""The ranks of a group as threads of this process, which are connected by gloo as processes are."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from treeline_runtime.collectives import LOOPBACK, Ranks, join, open_store
from treeline_runtime.models.shards import Rank

T = TypeVar("T")


@functools.cache
def _group(tp_size: int, pp_size: int) -> tuple[ThreadPoolExecutor, list[Ranks]]:
    count = tp_size * pp_size
    threads = ThreadPoolExecutor(count)
    with tempfile.TemporaryDirectory() as folder:

        def meet(number: int) -> Ranks:
            rank, store = Rank.of(number, tp_size, pp_size), open_store(f"{folder}/ranks", count)
            return join(rank, store, folder, torch.device("cpu"), LOOPBACK, count)

        return threads, list(threads.map(meet, range(count)))


class Strict(Ranks):
    """Keep only what `Ranks` promises: a sum until the next call, logits on rank 0, what comes home there."""

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

    def receive(self, x: torch.Tensor, /) -> torch.Tensor:
        self._forget()
        return self._ranks.receive(x)

    def send(self, x: torch.Tensor, /) -> None:
        self._ranks.send(x)
        self._forget()

    def home(self, x: torch.Tensor, /) -> torch.Tensor:
        x = self._ranks.home(x)
        return x.clone().fill_(torch.nan) if self.rank.number else x

    def everywhere(self, x: torch.Tensor, /) -> torch.Tensor:
        return self._ranks.everywhere(x)

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


def on_ranks(count: int, compute: Callable[[Ranks], T], stages: int = 1) -> list[T]:
    """Call it on all ranks of all stages at once. Return each rank's result."""
    threads, ranks = _group(count, stages)
    return list(threads.map(compute, map(Strict, ranks)))
