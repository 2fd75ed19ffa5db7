"""Rows of running requests: their tokens and page numbers, where the device finds them."""

from __future__ import annotations

import numpy as np
import torch

from treeline_runtime.kvcache import Pages


class TableManager:
    """`token_pool[row, position]` relays tokens between steps: a launch reads its input there and writes what it
    samples, so the next launch need not wait for it. `pages[row, i]` is the page of tokens i x page_size …
    """

    def __init__(self, num_rows: int, context_length: int, page_size: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        # zeros of numpy are not touched until written: the tables cost what is used of them
        self.pages = np.zeros((num_rows, -(-context_length // page_size)), dtype=np.int64)
        tokens = np.zeros((num_rows, context_length + 1), dtype=np.int64)
        self.page_table = torch.from_numpy(self.pages).to(device)
        self.token_pool = torch.from_numpy(tokens).to(device)
        self._mirrored = device.type != "cpu"

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self, tokens: list[int]) -> int:
        """A row that begins with these tokens."""
        row = self._free.pop()
        self.token_pool[row, : len(tokens)] = torch.tensor(tokens)
        return row

    def free(self, row: int) -> None:
        assert row not in self._free
        self._free.append(row)

    def write_pages(self, row: int, start: int, pages: Pages) -> None:
        end = start + len(pages)
        self.pages[row, start:end] = pages
        if self._mirrored:
            self.page_table[row, start:end] = torch.from_numpy(self.pages[row, start:end])
