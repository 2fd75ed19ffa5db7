"""The paged KV pool: which pages are free, and the tensors behind them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treeline_runtime.models.quantization.fp8 import E4M3, to_e4m3
from treeline_runtime.transfer import upload

Pages = npt.NDArray[np.int64]
"""One-dimensional page numbers."""

NO_PAGES: Pages = np.empty(0, dtype=np.int64)


class PagePool:
    """Free list of pages 0 … num_pages - 1: a stack, so that recently freed pages are used first.

    alloc and free are O(pages).
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
        pages = self._stack[self.num_free : self.num_free + n][::-1].copy()  # fresh ones ascend: gathers run on
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


CHECKED_BYTES = 64 << 20
"""Bytes that `are_finite` copies at once."""


class KVPool:
    """Keys and values of every layer, each a tensor (pages, page_size, kv_heads, head_dim).

    A token's slot is page x page_size + offset. Unused slots may contain anything, NaN included; backends never use
    them. Page `num_pages` belongs to no request; padding is stored there. On a CPU memory is used only once written.

    The tensors may be e4m3; values are then divided by their layer's scale (`key_scales`, `value_scales`).
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
        stored: torch.dtype | None = None,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        """dtype: the model's; stored: the tensors', e4m3 or by default the model's; scales: (keys, values) of each
        layer, default 1, for e4m3 only."""
        self.page_size = page_size
        self.num_pages = num_pages
        self.dtype = dtype
        self.is_fp8 = stored == E4M3
        scales = scales if scales is not None and self.is_fp8 else [(1.0, 1.0)] * num_layers
        self.key_scales, self.value_scales = ([pair[kind] for pair in scales] for kind in (0, 1))
        # one tensor, so that what concerns a token in all layers is one operation; few are there for e4m3, so its
        # bytes are moved
        shape = (num_layers, 2, num_pages + 1, page_size, num_kv_heads, head_dim)
        self._all = zeros(shape, torch.uint8 if self.is_fp8 else dtype, device)
        self._slots = self._all.view(num_layers, 2, (num_pages + 1) * page_size, num_kv_heads, head_dim)
        told = self._all.view(E4M3) if self.is_fp8 else self._all
        self.keys = [layer[0] for layer in told]
        self.values = [layer[1] for layer in told]
        self.numbers = self._all.view(2 * num_layers, num_pages + 1, -1)
        """For `take_along` of another pool."""
        self._parts = [_words(self.numbers)]
        """Of each page, what is moved: each (parts, pages, words)."""
        self._paged = [(layer[0], layer[1]) for layer in self._all]
        self._flat = [(layer[0], layer[1]) for layer in self._slots]

    def take_along(self, *others: torch.Tensor) -> None:
        """Lets others (parts, pages, numbers) with the same pages move with them: a page is whole or not there."""
        self._parts = [*map(_words, others), *self._parts]

    @property
    def page_bytes(self) -> int:
        """Of a page, with what is taken along."""
        return sum(map(_page_bytes, self._parts))

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores new tokens. slots (tokens,), k and v (tokens, kv_heads, head_dim)."""
        keys, values = self._flat[layer]
        if self.is_fp8:
            k, v = (
                to_e4m3(x.float() / scale).view(torch.uint8)
                for x, scale in zip((k, v), self._scales(layer), strict=True)
            )
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """pages (n,) → copies of keys and values (n, page_size, kv_heads, head_dim) in the model's dtype."""
        keys, values = self._paged[layer]
        keys, values = keys.index_select(0, pages), values.index_select(0, pages)
        if self.is_fp8:
            taken = zip((keys, values), self._scales(layer), strict=True)
            keys, values = (x.view(E4M3).to(self.dtype) * scale for x, scale in taken)
        return keys, values

    def _scales(self, layer: int) -> tuple[float, float]:
        return self.key_scales[layer], self.value_scales[layer]

    def are_finite(self, slots: torch.Tensor) -> torch.Tensor:
        """slots (tokens,) → (tokens,) bool: whether a token's keys and values are finite in every layer."""
        total = torch.zeros(len(slots), dtype=torch.float32, device=slots.device)
        layer_bytes = len(slots) * self._slots[0, :, 0].numel() * self._slots.element_size()
        step = max(1, CHECKED_BYTES // max(1, layer_bytes))
        for first in range(0, len(self._slots), step):
            stored = self._slots[first : first + step].index_select(2, slots)
            if self.is_fp8:  # e4m3 has no infinity, and NaN is where all bits but the sign are set
                stored = torch.where(stored & 0x7F == 0x7F, torch.nan, 0.0)
            # a sum is NaN or infinite if anything in it is; one pass, where isfinite() and all() need three
            total += stored.sum((0, 1, 3, 4), dtype=torch.float32)
        return total.isfinite()

    def copy_out(self, pages: Sequence[int], to: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Copies pages of all layers to host memory, in parts (pages, bytes of a page), each page with what is
        taken along, then [layers, 2, page_size, kv_heads, head_dim]. On CUDA the copies are in stream order."""
        if not self._all.is_cuda:  # numpy's copies start no threads of their own beside those that compute
            for page, there in zip(pages, chain.from_iterable(to), strict=True):
                for part, place in zip(self._parts, self._places(there), strict=True):
                    np.copyto(place, part[:, page].numpy())
            return
        numbers = self._numbers(pages)
        taken = [part.index_select(1, numbers).transpose(0, 1).flatten(1).view(torch.uint8) for part in self._parts]
        gathered = taken[0] if len(taken) == 1 else torch.cat(taken, 1)
        for some, there in zip(gathered.split([len(one) for one in to]), to, strict=True):
            torch.from_numpy(there).copy_(some, non_blocking=True)

    def copy_in(self, pages: Sequence[int], of: Sequence[npt.NDArray[np.uint8]]) -> None:
        """The reverse of `copy_out`."""
        if not self._all.is_cuda:
            for page, there in zip(pages, chain.from_iterable(of), strict=True):
                for part, place in zip(self._parts, self._places(there), strict=True):
                    np.copyto(part[:, page].numpy(), place)
            return
        sizes = [_page_bytes(part) for part in self._parts]
        gathered = torch.empty(len(pages), sum(sizes), dtype=torch.uint8, device=self._all.device)
        for some, there in zip(gathered.split([len(one) for one in of]), of, strict=True):
            some.copy_(torch.from_numpy(there), non_blocking=True)
        numbers = self._numbers(pages)
        for part, taken in zip(self._parts, gathered.split(sizes, 1), strict=True):
            words = taken.contiguous().view(part.dtype).view(len(pages), len(part), -1)
            part.index_copy_(1, numbers, words.transpose(0, 1))

    def _places(self, page: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[Any]]:
        """The place of each part in a page on the host."""
        begin = 0
        for part in self._parts:
            end = begin + _page_bytes(part)
            yield torch.from_numpy(page[begin:end]).view(part.dtype).view(len(part), -1).numpy()
            begin = end

    def _numbers(self, pages: Sequence[int]) -> torch.Tensor:
        return upload(np.array(pages, dtype=np.int64), self._all.device)

    def clear(self, pages: Pages) -> None:
        """Zeroes whole pages in every layer, and what is taken along."""
        numbers = torch.from_numpy(pages).to(self._all.device)
        for part in self._parts:
            part.index_fill_(1, numbers, 0)


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """(…, numbers) → the same memory in words: a kernel that copies these is faster than one that copies bytes."""
    as_bytes = numbers.view(torch.uint8)
    return as_bytes.view(torch.int64) if as_bytes.shape[-1] % 8 == 0 else as_bytes


def _page_bytes(part: torch.Tensor) -> int:
    return len(part) * part.shape[-1] * part.element_size()


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU memory is used only once written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zeroed memory; torch.zeros would write, and so take, all of it now
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
