"""Rows of running requests: which are free, and what of their tokens and pages the executor has to be sent."""

from __future__ import annotations

import numpy as np

from treeline_runtime.kvcache import Pages
from treeline_runtime.scheduler.plan import Writes


class TableManager:
    """`pages[row, i]` is the page of tokens i x page_size … What is written here goes into the next plan."""

    def __init__(self, num_rows: int, context_length: int, page_size: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._is_free = [True] * num_rows
        # zeros of numpy are not touched until written: the table costs what is used of it
        self.pages = np.zeros((num_rows, -(-context_length // page_size)), dtype=np.int64)
        self._new_tokens: dict[int, tuple[int, list[int]]] = {}  # row → where they begin, tokens
        self._new_pages: list[tuple[int, int, int]] = []  # (row, start, end)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self, tokens: list[int]) -> int:
        """A row that begins with these tokens."""
        row = self._free.pop()
        self._is_free[row] = False
        self._new_tokens.pop(row, None)  # of who had it before
        self.write_tokens(row, 0, tokens)
        return row

    def write_tokens(self, row: int, start: int, tokens: list[int]) -> None:
        """From position `start` on, whatever is there; behind what launched batches write."""
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
        end = start + len(pages)
        self.pages[row, start:end] = pages
        self._new_pages.append((row, start, end))

    def news(self) -> tuple[Writes, Writes]:
        """→ tokens and pages that were written since `told`, the pages as they are now."""
        tokens, pages = self._new_tokens, self._new_pages
        return (
            Writes(
                list(tokens),
                [start for start, _ in tokens.values()],
                [len(known) for _, known in tokens.values()],
                [token for _, known in tokens.values() for token in known],
            ) if tokens else NOTHING,
            Writes(
                [row for row, _, _ in pages],
                [start for _, start, _ in pages],
                [end - start for _, start, end in pages],
                np.concatenate([self.pages[row, start:end] for row, start, end in pages]).tolist(),
            ) if pages else NOTHING,
        )  # fmt: skip

    def told(self) -> None:
        """A step with these news is launched."""
        if self._new_tokens:
            self._new_tokens = {}
        if self._new_pages:
            self._new_pages = []


NOTHING = Writes()
