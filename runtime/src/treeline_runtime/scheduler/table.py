"""Requests → plans: rows of running requests, their new tokens and pages, and a step's plan. Everything that depends on
requests is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from treeline_runtime.core import Batch, Phase
from treeline_runtime.kvcache import Pages
from treeline_runtime.sampling import needs_more
from treeline_runtime.scheduler.media import media_plan
from treeline_runtime.scheduler.plan import InputLogprobs, RowSampling, StepPlan, Writes

News = tuple[Writes, Writes, dict[int, int]]
"""Tokens, pages and deltas for the next plan; see `StepPlan`."""


class TableManager:
    """`pages[row, i]` is the page of tokens i x page_size …; writes here go into the next plan."""

    def __init__(self, num_rows: int, context_length: int, page_size: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._is_free = [True] * num_rows
        # numpy zeros use memory only once written
        self.pages = np.zeros((num_rows, -(-context_length // page_size)), dtype=np.int64)
        self._new_tokens: dict[int, tuple[int, list[int]]] = {}  # row → where they begin, tokens
        self._new_pages: list[tuple[int, int, int]] = []  # (row, start, end)
        self._turned: set[int] = set()
        """Rows with a delta."""
        self._new_deltas: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self, tokens: list[int], delta: int = 0) -> int:
        """delta: see `StepPlan.deltas`."""
        row = self._free.pop()
        self._is_free[row] = False
        self._new_tokens.pop(row, None)  # of who had it before
        self.write_tokens(row, 0, tokens)
        if delta:
            self._turned.add(row)
            self._new_deltas[row] = delta
        return row

    def write_tokens(self, row: int, start: int, tokens: list[int]) -> None:
        """Writes tokens from position `start` on; launched batches write only before it."""
        before, known = self._new_tokens.get(row, (start, []))
        if before < start:
            start, tokens = before, known[: start - before] + tokens
        self._new_tokens[row] = start, tokens[:]

    def free(self, row: int) -> None:
        assert not self._is_free[row], f"row {row} is freed twice"
        self._is_free[row] = True
        self._free.append(row)
        if row in self._turned:
            self._turned.remove(row)
            self._new_deltas[row] = 0

    def write_pages(self, row: int, start: int, pages: Pages) -> None:
        """Writes pages at index `start`: after the row's pages, or at 0 its first ones or replacements."""
        end = start + len(pages)
        self.pages[row, start:end] = pages
        self._new_pages.append((row, start, end))

    def news(self) -> News:
        """Returns the writes that no launch has got yet; pages as they are now."""
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
            self._new_deltas,
        )  # fmt: skip

    def told(self) -> None:
        """Forgets the writes in `news`: a step with them was launched."""
        if self._new_tokens:
            self._new_tokens = {}
        if self._new_pages:
            self._new_pages = []
        if self._new_deltas:
            self._new_deltas = {}


NOTHING = Writes()


def _input_logprobs(batch: Batch) -> Iterator[InputLogprobs]:
    for i, (req, start, end) in enumerate(zip(batch.reqs, batch.starts, batch.ends, strict=True)):
        low, high = max(req.logprob_start_len - 1, start), min(req.prompt_len - 1, end)
        if req.wants_input_logprobs and low < high:
            yield InputLogprobs(i, low, high, req.top_logprobs_num)


def plan_of(batch: Batch, news: News, slots: dict[int, str], *, pools: bool, chain: int = 0) -> StepPlan:
    """slots, chain: see `StepPlan`. pools: the model makes vectors."""
    reqs, starts, ends = batch.reqs, batch.starts, batch.ends
    (tokens, pages, deltas), sampling = news, batch.sampling
    those = [
        (reqs[i], end)
        for i, samples in enumerate(batch.samples)
        if samples
        for end in range(ends[i] - len(reqs[i].draft), ends[i] + 1)
    ]
    temperatures = [0.0] * len(those)
    extra: dict[str, Any] = {}
    rows_sampling: dict[int, RowSampling] = {}
    drafts: dict[int, list[int]] = {}
    for j, (req, _) in enumerate(those):
        params = req.sampling
        if req.draft:
            drafts[sampling[j]] = req.draft
        if req.delays or needs_more(params):
            # a grammar knows itself where an output may end
            stop_ids = req.stop_ids if params.grammar is None else frozenset[int]()
            rows_sampling[j] = RowSampling(params, stop_ids, req.prompt_len)
        elif not params.greedy:
            temperatures[j] = params.temperature
    if rows_sampling:
        extra["rows_sampling"] = rows_sampling
        extra["delayed"] = [j for j in rows_sampling if those[j][0].delays]
    if drafts:
        extra["drafts"] = drafts
        known_right = {i: state.right for i in drafts if (state := reqs[i].drafting) is not None}
        extra["right"] = {i: min(right, len(drafts[i])) for i, right in known_right.items() if right}
    logprobs = {j: req.top_logprobs_num for j, (req, _) in enumerate(those) if req.return_logprob}
    if batch.phase is Phase.PREFILL:
        extra["input_logprobs"] = list(_input_logprobs(batch))
    if max(of_reqs := [req.slot for req in reqs]) >= 0:
        extra["adapters"] = of_reqs
    if batch.has_items:
        extra["media"] = media_plan(batch)
    if pools:
        extra["whole"] = [end == len(req.tokens) for req, end in zip(reqs, ends, strict=True)]
    return StepPlan(
        rows=[req.row for req in reqs],
        starts=starts,
        ends=ends,
        decodes=batch.phase is Phase.DECODE,
        tokens=tokens,
        pages=pages,
        slots=slots,
        deltas=deltas,
        chain=chain,
        sampling=sampling,
        temperatures=temperatures,
        seeds=[req.seed for req, _ in those],
        indices=[end - req.prompt_len for req, end in those],
        logprobs=logprobs,
        hidden=[i for i, req in enumerate(reqs) if req.return_hidden_states],
        **extra,
    )
