"""The executor's tables: the tokens and page numbers of rows, where the device finds them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from treeline_runtime.attention import HostPages
from treeline_runtime.scheduler.plan import StepPlan
from treeline_runtime.transfer import upload


class DeviceTables:
    """`token_pool[row, position]` relays tokens between steps: a launch reads its input there and writes what it
    samples, so the next launch need not wait for it. `page_table[row, i]` is the page of tokens i x page_size …

    What else is in them plans have brought. The row after the last belongs to no request: sequences that pad a batch
    use it, and all its pages are `scratch_page`.
    """

    def __init__(
        self, num_rows: int, context_length: int, page_size: int, device: torch.device, *, scratch_page: int = 0
    ) -> None:
        self.scratch_row = num_rows
        # zeros of numpy are not touched until written: the tables cost what is used of them
        self._pages = np.zeros((num_rows + 1, -(-context_length // page_size)), dtype=np.int64)
        self._pages[num_rows] = scratch_page
        self._version = 0
        self._mirrored = device.type != "cpu"
        self.page_table = torch.from_numpy(self._pages).to(device)
        self.token_pool = torch.from_numpy(np.zeros((num_rows + 1, context_length + 1), dtype=np.int64)).to(device)

    def on_host(self, rows: list[int]) -> HostPages:
        return HostPages(self._pages, rows, self._version)

    def write(self, plan: StepPlan) -> None:
        """What the plan brings, in one copy and one kernel for each table."""
        if plan.tokens.values:
            where = plan.tokens.cells(self.token_pool.shape[1])
            _scatter(self.token_pool, where, np.array(plan.tokens.values))
        if plan.pages.values:
            if 0 in plan.pages.starts:  # rows begin with other pages
                self._version += 1
            where, flat = plan.pages.cells(self._pages.shape[1]), self._pages.reshape(-1)
            flat[where] = plan.pages.values
            if self._mirrored:
                # as they are now: a page that is written twice gets the same number twice
                _scatter(self.page_table, where, flat[where])


def _scatter(table: torch.Tensor, where: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> None:
    both = upload(np.stack((where, values)), table.device)
    table.view(-1).index_copy_(0, both[0], both[1])
