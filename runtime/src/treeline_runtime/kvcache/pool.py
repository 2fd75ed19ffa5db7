"""The paged KV pool: which pages are free, and the tensors behind them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

Pages = npt.NDArray[np.int64]
"""Page numbers, one-dimensional."""

NO_PAGES: Pages = np.empty(0, dtype=np.int64)


class PagePool:
    """Free list of pages 0 … num_pages - 1: a stack, so that recently freed pages are used first.

    alloc and free are O(pages asked for).
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack: Pages = np.arange(num_pages - 1, -1, -1, dtype=np.int64)
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self.num_free = num_pages

    def alloc(self, n: int) -> Pages:
        """n free pages. The caller checked `num_free`."""
        assert 0 <= n <= self.num_free, f"{n} pages asked for, {self.num_free} free"
        self.num_free -= n
        pages = self._stack[self.num_free : self.num_free + n][
            ::-1
        ].copy()  # fresh ones ascend: gathers run on
        self._is_free[pages] = False
        return pages

    def free(self, pages: Pages) -> None:
        assert not self._is_free[pages].any(), f"pages freed twice: {pages[self._is_free[pages]]}"
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)

    def check_integrity(self) -> None:
        free = self._stack[: self.num_free]
        assert len(np.unique(free)) == self.num_free, "a page is in the free list twice"
        assert self._is_free[free].all(), "a page in the free list is not marked free"
        assert int(self._is_free.sum()) == self.num_free, "a page is marked free but not in the free list"


class KVPool:
    """Keys and values of every layer: each a tensor (pages, page_size, kv_heads, head_dim).

    A token's slot is page x page_size + offset. Memory is zeroed: attention over padding must not meet NaN. On a CPU it
    costs nothing until it is written.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        self.page_size = page_size
        self.num_pages = num_pages
        self.keys = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.values = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self._flat = [
            (k.view(-1, num_kv_heads, head_dim), v.view(-1, num_kv_heads, head_dim))
            for k, v in zip(self.keys, self.values, strict=True)
        ]

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write new tokens. slots (tokens,), k and v (tokens, kv_heads, head_dim)."""
        keys, values = self._flat[layer]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zeroed memory; torch.zeros would write, and so take, all of it now
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
    )
