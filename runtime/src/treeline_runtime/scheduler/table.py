"""Rows of running requests: their tokens and page numbers, where the device finds them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from treeline_runtime.attention import HostPages
from treeline_runtime.kvcache import Pages
from treeline_runtime.transfer import upload


class TableManager:
    """`token_pool[row, position]` relays tokens between steps: a launch reads its input there and writes what it
    samples, so the next launch need not wait for it. `pages[row, i]` is the page of tokens i x page_size …

    What is written here reaches the device with `flush`, which every launch begins with. The row after the last is
    nobody's: sequences that pad a batch use it, and all its pages are `scratch_page`.
    """

    def __init__(
        self, num_rows: int, context_length: int, page_size: int, device: torch.device, *, scratch_page: int = 0
    ) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._is_free = [True] * num_rows
        # zeros of numpy are not touched until written: the tables cost what is used of them
        self.pages = np.zeros((num_rows + 1, -(-context_length // page_size)), dtype=np.int64)
        self.pages[num_rows] = scratch_page
        self._version = 0
        self._device = device
        self._token_cells = (num_rows + 1, context_length + 1)
        self.enter_device()
        self._mirrored = device.type != "cpu"
        self._new_tokens: dict[int, tuple[int, list[int]]] = {}  # row → where they begin, tokens
        self._new_pages: list[tuple[int, int, int]] = []  # (row, start, end)

    def enter_device(self) -> None:
        """Make the tables on the device, without tokens."""
        self.page_table = torch.from_numpy(self.pages).to(self._device)
        self.token_pool = torch.from_numpy(np.zeros(self._token_cells, dtype=np.int64)).to(self._device)

    def leave_device(self) -> None:
        """Give their memory back; no row may be in use until `enter_device`."""
        assert self.num_free == self.num_rows, "rows are in use"
        self.page_table = self.token_pool = torch.empty(0, dtype=torch.int64)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def scratch_row(self) -> int:
        return self.num_rows

    def alloc(self, tokens: list[int]) -> int:
        """A row that begins with these tokens."""
        row = self._free.pop()
        self._is_free[row] = False
        self._new_tokens.pop(row, None)  # of who had it before
        self.write_tokens(row, 0, tokens)
        return row

    def write_tokens(self, row: int, start: int, tokens: list[int]) -> None:
        """From position `start` on, whatever is there; behind what launched batches write."""
        if not self._mirrored:
            self.token_pool[row, start : start + len(tokens)] = torch.tensor(tokens)
            return
        before, known = self._new_tokens.get(row, (start, []))
        if before < start:
            start, tokens = before, known[: start - before] + tokens
        self._new_tokens[row] = start, tokens[:]

    def free(self, row: int) -> None:
        assert not self._is_free[row], f"row {row} is freed twice"
        self._is_free[row] = True
        self._free.append(row)

    def write_pages(self, row: int, start: int, pages: Pages) -> None:
        """Behind those that the row has, or from 0: its first ones, or others in their place."""
        if start == 0:
            self._version += 1
        end = start + len(pages)
        self.pages[row, start:end] = pages
        if self._mirrored:
            self._new_pages.append((row, start, end))

    def on_host(self, rows: list[int]) -> HostPages:
        return HostPages(self.pages, rows, self._version)

    def flush(self) -> None:
        """Everything written since the last time, in one copy and one kernel for each table."""
        if self._new_tokens:
            rows = self._new_tokens
            width = self.token_pool.shape[1]
            where = [np.arange(len(tokens)) + row * width + start for row, (start, tokens) in rows.items()]
            _scatter(self.token_pool, where, np.concatenate([np.array(tokens) for _, tokens in rows.values()]))
            self._new_tokens = {}
        if self._new_pages:
            width = self.pages.shape[1]
            where = [np.arange(row * width + start, row * width + end) for row, start, end in self._new_pages]
            # as they are now: a page that was written twice gets the same number twice
            _scatter(self.page_table, where, self.pages.reshape(-1)[np.concatenate(where)])
            self._new_pages = []


def _scatter(table: torch.Tensor, where: list[npt.NDArray[np.int64]], values: npt.NDArray[np.int64]) -> None:
    both = upload(np.stack((np.concatenate(where), values)), table.device)
    table.view(-1).index_copy_(0, both[0], both[1])
