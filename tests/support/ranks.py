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


def on_ranks(count: int, compute: Callable[[Ranks], T]) -> list[T]:
    """Call it on all ranks at once. Return each rank's result."""
    threads, ranks = _group(count)
    return list(threads.map(compute, ranks))
