"""Runs batches: builds the tensors of a step, calls the model, samples. Knows nothing of queues.

`launch` reads its input tokens from the table and writes the sampled ones there, so on a GPU the next launch can be
issued before this one's result is known on the CPU. It changes no request: a launch that raises can be tried again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from treeline_runtime.attention import ATTENTION_BACKENDS, Layout
from treeline_runtime.config import EngineConfig
from treeline_runtime.core import Batch, Context, Req
from treeline_runtime.kvcache import KVPool, Pages
from treeline_runtime.messages import TokenLogprob
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.sampling import Row, is_plain_greedy, needs_history, sample
from treeline_runtime.sampling.logprobs import ROWS_AT_ONCE, chosen_and_top
from treeline_runtime.scheduler.table import TableManager


@dataclass(slots=True)
class Sampled:
    """What one request got from one batch."""

    token: int | None = None
    """None: nothing was sampled."""
    logprob: TokenLogprob | None = None
    top_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_top_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    failed: str | None = None


NOT_FINITE = "the model computed NaN or infinity"


@dataclass(slots=True, eq=False)
class Launched:
    """A batch on the device. `result` waits for it."""

    batch: Batch
    _sampling: list[int]
    """Indices into batch.reqs of those who sample."""
    _tokens: torch.Tensor | None
    """(sampling,)"""
    _logits_finite: torch.Tensor | None
    """(sampling,)"""
    _kv_finite: torch.Tensor
    """(tokens of the batch,)"""
    _partial: list[Sampled]

    def result(self) -> list[Sampled]:
        """One per request of the batch."""
        if self._tokens is not None and self._logits_finite is not None:
            tokens, finite = self._tokens.tolist(), self._logits_finite.tolist()
            for i, token, is_finite in zip(self._sampling, tokens, finite, strict=True):
                self._partial[i].token = token
                if not is_finite:
                    self._partial[i].failed = NOT_FINITE
        firsts = np.cumsum([0, *self.batch.q_lens[:-1]])
        for partial, is_finite in zip(
            self._partial, np.logical_and.reduceat(self._kv_finite.cpu().numpy(), firsts), strict=True
        ):
            if not is_finite:
                partial.failed = NOT_FINITE
        return self._partial


class Executor:
    """The model with its KV pool, attention backend and sampler."""

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        table: TableManager,
        *,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = model.config
        self._model = model
        self._table = table
        self._page_size = config.page_size
        self._device = device
        self.pool = KVPool(
            num_layers=shape.num_layers,
            num_pages=num_pages,
            page_size=config.page_size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            device=device,
        )
        name = "torch_sdpa" if config.attention_backend == "auto" else config.attention_backend
        backend = ATTENTION_BACKENDS.get(name)
        self._attention = backend(self.pool, shape.num_heads, shape.num_kv_heads, shape.head_dim)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Compute the batch; pages for all of it are in the table."""
        q_lens = batch.q_lens
        rows = np.array([req.row for req in batch.reqs], dtype=np.int64)
        positions_np = np.concatenate(
            [np.arange(s, e, dtype=np.int64) for s, e in zip(batch.starts, batch.ends, strict=True)]
        )
        token_rows = torch.from_numpy(np.repeat(rows, q_lens)).to(self._device)
        positions = torch.from_numpy(positions_np).to(self._device)
        table = self._table
        pages = table.page_table[token_rows, positions // self._page_size]
        longest = -(-max(batch.ends) // self._page_size)
        layout = Layout(
            q_lens=q_lens,
            kv_lens=batch.ends,
            page_table=table.page_table[torch.from_numpy(rows).to(self._device), :longest],
            slots=pages * self._page_size + positions % self._page_size,
        )
        cos, sin = self._model.rope(positions)
        context = Context(self._attention, self._attention.plan(layout), cos, sin)
        hidden = self._model.forward(table.token_pool[token_rows, positions], context)
        return self._finish(batch, hidden, self.pool.are_finite(layout.slots))

    @torch.inference_mode()
    def clear(self, pages: Pages) -> None:
        """Zero pages whose contents are not to be trusted."""
        self.pool.clear(pages)

    def _finish(self, batch: Batch, hidden: torch.Tensor, kv_finite: torch.Tensor) -> Launched:
        q_lens = batch.q_lens
        partial = [Sampled() for _ in batch.reqs]
        lasts = [n - 1 for n in accumulate(q_lens)]
        for i, req in enumerate(batch.reqs):
            if req.wants_input_logprobs:
                first = lasts[i] + 1 - q_lens[i]
                self._input_logprobs(req, batch.starts[i], hidden[first : lasts[i] + 1], partial[i])
        sampling = [i for i, samples in enumerate(batch.samples) if samples]
        if not sampling:
            return Launched(batch, sampling, None, None, kv_finite, partial)
        if len(sampling) < hidden.shape[0]:
            hidden = hidden[torch.tensor([lasts[i] for i in sampling], device=self._device)]
        logits = self._model.logits(hidden)
        tokens, finite = self._sample(batch, sampling, logits, partial)
        rows = torch.tensor([batch.reqs[i].row for i in sampling], device=self._device)
        ends = torch.tensor([batch.ends[i] for i in sampling], device=self._device)
        self._table.token_pool[rows, ends] = tokens
        return Launched(batch, sampling, tokens, finite, kv_finite, partial)

    def _sample(
        self, batch: Batch, sampling: list[int], logits: torch.Tensor, partial: list[Sampled]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        reqs = [batch.reqs[i] for i in sampling]
        best, tokens = logits.max(-1)
        finite = best.isfinite()  # NaN anywhere in a row is its maximum
        wanted = [j for j, req in enumerate(reqs) if req.return_logprob]
        raw = logits[wanted].clone() if wanted else None
        if not all(is_plain_greedy(req.sampling) for req in reqs):
            tokens = sample(logits, [self._row(req, batch.ends[i]) for i, req in zip(sampling, reqs, strict=True)])
        if raw is not None:
            top = max(reqs[j].top_logprobs_num for j in wanted)
            chosen, best_of = chosen_and_top(raw, tokens[wanted], top)
            for j, logprob, tops in zip(wanted, chosen, best_of, strict=True):
                entry = partial[sampling[j]]
                entry.logprob, entry.top_logprobs = logprob, tops[: reqs[j].top_logprobs_num]
        return tokens, finite

    def _row(self, req: Req, end: int) -> Row:
        history = self._table.token_pool[req.row, :end] if needs_history(req.sampling) else None
        return Row(req.sampling, req.seed, end - req.prompt_len, req.stop_ids, req.prompt_len, history)

    def _input_logprobs(self, req: Req, start: int, hidden: torch.Tensor, out: Sampled) -> None:
        """Logprobs of the prompt tokens that follow positions start …, as far as they were asked for."""
        low = max(req.logprob_start_len - 1, start)
        high = min(req.prompt_len - 1, start + hidden.shape[0])
        for begin in range(low, high, ROWS_AT_ONCE):
            end = min(begin + ROWS_AT_ONCE, high)
            logits = self._model.logits(hidden[begin - start : end - start])
            targets = self._table.token_pool[req.row, begin + 1 : end + 1]
            chosen, top = chosen_and_top(logits, targets, req.top_logprobs_num)
            if any(math.isnan(logprob) for logprob, _ in chosen if logprob is not None):
                out.failed = NOT_FINITE
            out.input_logprobs += chosen
            out.input_top_logprobs += top
