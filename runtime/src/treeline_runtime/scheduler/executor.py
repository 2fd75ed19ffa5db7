"""Runs batches: builds the tensors of a step, calls the model, samples. Knows nothing of queues.

`launch` reads its input tokens from the table and writes the sampled ones there, so on a GPU the next launch can be
issued before this one's result is known on the CPU; nothing in it waits for the device. It changes no request: a launch
that raises can be tried again.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treeline_runtime.attention import Layout, new_attention
from treeline_runtime.config import EngineConfig
from treeline_runtime.core import Batch, Phase, Req
from treeline_runtime.kvcache import KVPool, Pages
from treeline_runtime.messages import TokenLogprob
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.pooler import Vector
from treeline_runtime.sampling import Row, needs_history, needs_more, sample
from treeline_runtime.sampling.logprobs import ROWS_AT_ONCE, Logprobs
from treeline_runtime.scheduler.forward import DecodeInputs, Forward, Tokens
from treeline_runtime.scheduler.graphs import DecodeGraphs
from treeline_runtime.scheduler.pooled import Pooled
from treeline_runtime.scheduler.table import TableManager
from treeline_runtime.transfer import Readback, upload


@dataclass(slots=True)
class Sampled:
    """What one request got from one batch."""

    token: int | None = None
    """None: nothing was sampled."""
    logprob: TokenLogprob | None = None
    top_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_top_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    pooled: Vector | None = None
    """What the batch adds to the request's vector."""
    hidden_states: npt.NDArray[np.float32] | None = None
    """(tokens of the request in this batch, hidden), where they were asked for."""
    failed: str | None = None


NOT_FINITE = "the model computed NaN or infinity"


class Launched:
    """A batch on the device. `result` waits for it."""

    def __init__(self, batch: Batch, sampling: list[int], kv_finite: torch.Tensor, tokens: Tokens | None) -> None:
        """sampling: indices into batch.reqs of those who sample; kv_finite (tokens of the batch,)."""
        self.batch = batch
        self._sampling = sampling
        self._copies = Readback(kv_finite, *((tokens.ids, tokens.finite) if tokens is not None else ()))
        self.input_logprobs: list[tuple[int, Logprobs]] = []
        """Index into batch.reqs → logprobs of some of its prompt tokens, in order."""
        self.logprobs: tuple[list[int], Logprobs] | None = None
        """Indices into batch.reqs, and the logprobs of the tokens they sampled."""
        self.pooled: Pooled | None = None
        """Of a model that makes vectors."""
        self.hidden_states: list[tuple[int, Readback]] = []
        """Index into batch.reqs → hidden states of its tokens."""

    def result(self) -> list[Sampled]:
        """One per request of the batch."""
        results = [Sampled() for _ in self.batch.reqs]
        kv_finite, *sampled = (copy.numpy() for copy in self._copies.get())
        if sampled:
            tokens, finite = sampled
            for i, token, is_finite in zip(self._sampling, tokens.tolist(), finite.tolist(), strict=True):
                results[i].token = token
                if not is_finite:
                    results[i].failed = NOT_FINITE
        if not kv_finite.all():
            firsts = np.cumsum([0, *self.batch.q_lens[:-1]])
            for result, is_finite in zip(results, np.logical_and.reduceat(kv_finite, firsts), strict=True):
                if not is_finite:
                    result.failed = NOT_FINITE
        self._take_logprobs(results)
        for i, vector, is_finite in self.pooled.get() if self.pooled is not None else ():
            results[i].pooled = vector
            if not is_finite:
                results[i].failed = NOT_FINITE
        for i, copy in self.hidden_states:
            results[i].hidden_states = copy.get()[0].numpy().copy()  # the batch's whole tensor need not stay
        return results

    def _take_logprobs(self, results: list[Sampled]) -> None:
        for i, logprobs in self.input_logprobs:
            chosen, top = logprobs.get()
            if any(math.isnan(logprob) for logprob, _ in chosen if logprob is not None):
                results[i].failed = NOT_FINITE
            results[i].input_logprobs += chosen
            results[i].input_top_logprobs += top
        if self.logprobs is not None:
            indices, logprobs = self.logprobs
            for i, chosen_one, tops in zip(indices, *logprobs.get(), strict=True):
                results[i].logprob = chosen_one
                results[i].top_logprobs = tops[: self.batch.reqs[i].top_logprobs_num]


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
        kv_dtype: torch.dtype | None = None,
        largest_graph: int = 0,
    ) -> None:
        """kv_dtype: of the KV cache; by default the model's. largest_graph: sequences of the largest decode batch that
        is captured; 0: none is."""
        shape = model.config
        self._model = model
        self._table = table
        self._device = device
        with self._on_device():
            self.pool = KVPool(
                num_layers=shape.num_layers,
                num_pages=num_pages,
                page_size=config.page_size,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                dtype=dtype,
                device=device,
                stored=kv_dtype,
                scales=model.kv_scales,
            )
            self._attention = new_attention(
                config.attention_backend, self.pool, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.scoring
            )
            self._forward = Forward(model, self._attention, table)
            self._graphs = DecodeGraphs(self._forward, self._attention, table, largest_graph, device)

    def launch(self, batch: Batch) -> Launched:
        """Compute the batch; pages for all of it are in the table."""
        with torch.inference_mode(), self._on_device():
            self._table.flush()
            return self._launch(batch)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Kernels of Triton and FlashInfer, events and captures go to the current device, whatever they are given."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _launch(self, batch: Batch) -> Launched:
        wants_hidden = any(req.return_hidden_states for req in batch.reqs)  # which graphs do not keep
        if batch.phase is Phase.DECODE and len(batch.reqs) <= self._graphs.largest and not wants_hidden:
            inputs = DecodeInputs.of(batch.reqs, batch.starts)
            logits, tokens, kv_finite = self._graphs.replay(inputs, batch.ends)
            return self._finish(batch, list(range(len(batch.reqs))), logits, tokens, kv_finite, [])
        on_host = self._table.on_host([req.row for req in batch.reqs])
        rows = np.array(on_host.rows, dtype=np.int64)
        positions = np.concatenate(
            [np.arange(start, end, dtype=np.int64) for start, end in zip(batch.starts, batch.ends, strict=True)]
        )
        rows_there = upload(rows, self._device)
        plan = self._attention.plan(Layout(batch.q_lens, batch.ends, self._table.page_table, rows_there, on_host))
        token_rows = upload(np.repeat(rows, batch.q_lens), self._device)
        hidden, kv_finite = self._forward.hidden(token_rows, upload(positions, self._device), plan)
        if self._model.pooler is not None:
            launched = Launched(batch, [], kv_finite, None)
            launched.pooled = Pooled(batch, hidden, self._model.pooler)
            return launched
        input_logprobs = self._input_logprobs(batch, hidden)
        hidden_states = _hidden_states(batch, hidden) if wants_hidden else []
        sampling = [i for i, samples in enumerate(batch.samples) if samples]
        if not sampling:
            launched = Launched(batch, sampling, kv_finite, None)
            launched.input_logprobs = input_logprobs
            launched.hidden_states = hidden_states
            return launched
        if len(sampling) < hidden.shape[0]:
            lasts = [n - 1 for n in accumulate(batch.q_lens)]
            hidden = hidden[upload(np.array([lasts[i] for i in sampling]), self._device)]
        inputs = DecodeInputs.of([batch.reqs[i] for i in sampling], [batch.ends[i] - 1 for i in sampling])
        logits, tokens = self._forward.choose(hidden, inputs.on(self._device))
        launched = self._finish(batch, sampling, logits, tokens, kv_finite, input_logprobs)
        launched.hidden_states = hidden_states
        return launched

    def warm_up(self, lengths: list[int]) -> None:
        """Compute prompts of these lengths for nobody, so that the first request does not pay for what is done once:
        kernels that are built or chosen, libraries that are loaded, memory that is taken."""
        with torch.inference_mode(), self._on_device():
            for length in lengths:
                self._compute_for_nobody(length)

    def _compute_for_nobody(self, length: int) -> None:
        row = np.array([self._table.scratch_row])
        layout = Layout([length], [length], self._table.page_table, upload(row, self._device))
        token_rows = upload(np.repeat(row, length), self._device)
        plan = self._attention.plan(layout)
        hidden, _ = self._forward.hidden(token_rows, upload(np.arange(length), self._device), plan)
        if self._model.pooler is not None:
            Readback(self._model.pooler.select(hidden, [0], [length], [True])).get()
            return
        no_keys = np.zeros((1, 2), dtype=np.int32)
        inputs = DecodeInputs([self._table.scratch_row], [length - 1], [1.0], no_keys)
        _, tokens = self._forward.choose(hidden[-1:], inputs.on(self._device))
        Readback(tokens.ids).get()

    @torch.inference_mode()
    def clear(self, pages: Pages) -> None:
        """Zero pages whose contents are not to be trusted."""
        self.pool.clear(pages)

    def _finish(
        self,
        batch: Batch,
        sampling: list[int],
        logits: torch.Tensor,
        tokens: Tokens,
        kv_finite: torch.Tensor,
        input_logprobs: list[tuple[int, Logprobs]],
    ) -> Launched:
        """Sample what takes more than a temperature, and start the results on their way."""
        reqs = [batch.reqs[i] for i in sampling]
        wanted = [j for j, req in enumerate(reqs) if req.return_logprob]
        more = [j for j, req in enumerate(reqs) if needs_more(req.sampling)]
        if more:
            ends = [batch.ends[sampling[j]] for j in more]
            sampled = [self._row(reqs[j], end) for j, end in zip(more, ends, strict=True)]
            where = upload(np.array(more), self._device)
            ids = sample(logits[where].float(), sampled)
            tokens.ids[where] = ids
            cells = upload(np.array([[reqs[j].row for j in more], ends]), self._device)
            self._table.token_pool[cells[0], cells[1]] = ids
        launched = Launched(batch, sampling, kv_finite, tokens)
        launched.input_logprobs = input_logprobs
        if wanted:
            where = upload(np.array(wanted), self._device)
            top = max(reqs[j].top_logprobs_num for j in wanted)
            logprobs = Logprobs(logits[where].float(), tokens.ids[where], top)
            launched.logprobs = [sampling[j] for j in wanted], logprobs
        return launched

    def _row(self, req: Req, end: int) -> Row:
        history = self._table.token_pool[req.row, :end] if needs_history(req.sampling) else None
        return Row(req.sampling, req.seed, end - req.prompt_len, req.stop_ids, req.prompt_len, history)

    def _input_logprobs(self, batch: Batch, hidden: torch.Tensor) -> list[tuple[int, Logprobs]]:
        """Of the prompt tokens that follow the batch's positions, as far as they were asked for."""
        found: list[tuple[int, Logprobs]] = []
        firsts = [end - q_len for end, q_len in zip(accumulate(batch.q_lens), batch.q_lens, strict=True)]
        for i, req in enumerate(batch.reqs):
            if not req.wants_input_logprobs:
                continue
            offset = firsts[i] - batch.starts[i]
            low, high = max(req.logprob_start_len - 1, batch.starts[i]), min(req.prompt_len - 1, batch.ends[i])
            for begin in range(low, high, ROWS_AT_ONCE):
                end = min(begin + ROWS_AT_ONCE, high)
                logits = self._model.logits(hidden[offset + begin : offset + end]).float()
                targets = self._table.token_pool[req.row, begin + 1 : end + 1]
                found.append((i, Logprobs(logits, targets, req.top_logprobs_num)))
        return found


def _hidden_states(batch: Batch, hidden: torch.Tensor) -> list[tuple[int, Readback]]:
    """hidden (tokens of the batch, hidden) → those of the requests that want them, on their way to the host."""
    ends = list(accumulate(batch.q_lens))
    return [
        (i, Readback(hidden[end - q_len : end].float()))
        for i, (req, q_len, end) in enumerate(zip(batch.reqs, batch.q_lens, ends, strict=True))
        if req.return_hidden_states
    ]
