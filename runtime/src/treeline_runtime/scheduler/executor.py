"""Runs batches: builds the tensors of a step, calls the model, samples. Knows nothing of queues.

`launch` reads its input tokens from the table and writes the sampled ones there, so on a GPU the next launch can be
issued before this one's result is known on the CPU; nothing in it waits for the device. It changes no request: a launch
that raises can be tried again.

What a constrained row may become depends on its last token, which the CPU may not know yet, and so does what a logit
processor makes of it. `launch` computes their logits as those of every row, and `sample_delayed` samples them once the
results before are known.
"""

from __future__ import annotations

import logging
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
from treeline_runtime.sampling import Masks, Row, mask_words, needs_history, needs_more, sample
from treeline_runtime.sampling.logprobs import ROWS_AT_ONCE, Logprobs
from treeline_runtime.scheduler.forward import DecodeInputs, Forward, Tokens
from treeline_runtime.scheduler.graphs import DecodeGraphs
from treeline_runtime.scheduler.memory import bytes_per_token
from treeline_runtime.scheduler.pooled import Pooled
from treeline_runtime.scheduler.prompt_graphs import PromptGraphs
from treeline_runtime.scheduler.table import TableManager
from treeline_runtime.transfer import Readback, upload

logger = logging.getLogger(__name__)


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


_READ_AGAIN_BYTES = 4 << 30
"""Of keys and values: read in a millisecond, in half the time in which the host launches a step of prompts."""
NOT_FINITE = "the model computed NaN or infinity"
NOTHING_ALLOWED = (
    "no token is allowed: the request's constraint or logit processor, its logit_bias, allowed_token_ids, bad_words "
    "and min_tokens leave none, or the constraint takes too much work here: make it simpler"
)
NOTHING_SOUND = "logit processor {!r} left NaN, infinity, or no token that may be chosen"


@dataclass(slots=True)
class Step:
    """What a launch left on the device to choose tokens from. The next launch may overwrite it."""

    reqs: list[Req]
    """Those who sample, and how long they are then, without the sampled token."""
    ends: list[int]
    logits: torch.Tensor
    """(requests, vocabulary), the model's own."""
    tokens: Tokens
    kv_finite: torch.Tensor
    """(tokens of the batch,)"""
    allowed: torch.Tensor | None = None
    """(requests,) bool, where some are delayed or exclude tokens: whether there was one for them to choose."""
    processed: dict[int, torch.Tensor] = field(default_factory=dict)
    """Index among the requests → (vocabulary,) float32, what its logit processor made of its logits."""
    sound: torch.Tensor | None = None
    """(requests,) bool, where there are such: whether one can choose from them."""


class Launched:
    """A batch on the device. `result` waits for it."""

    def __init__(self, batch: Batch, sampling: list[int]) -> None:
        """sampling: indices into batch.reqs of those who sample."""
        self.batch = batch
        self.sampling = sampling
        self._copies: Readback | None = None
        self.delayed: Step | None = None
        """Of a batch with rows that are delayed, until they are sampled: the result is not on its way before."""
        self.unsampled: dict[int, str] = {}
        """Index among those who sample → why a delayed one could not."""
        self.error: Exception | None = None
        """What kept the result from being sent on its way; `result` raises it."""
        self.input_logprobs: list[tuple[int, Logprobs]] = []
        """Index into batch.reqs → logprobs of some of its prompt tokens, in order."""
        self.logprobs: tuple[list[int], Logprobs] | None = None
        """Indices into batch.reqs, and the logprobs of the tokens they sampled."""
        self.pooled: Pooled | None = None
        """Of a model that makes vectors."""
        self.hidden_states: list[tuple[int, Readback]] = []
        """Index into batch.reqs → hidden states of its tokens."""

    def read_back(self, kv_finite: torch.Tensor, *sampled: torch.Tensor) -> None:
        """Send the result on its way. kv_finite (tokens of the batch,); of those who sample, if any, tokens, whether
        logits are finite, and where some are delayed, whether there was a token to choose, and where some have logit
        processors, whether what these left is sound."""
        self._copies = Readback(kv_finite, *sampled)

    def result(self) -> list[Sampled]:
        """One per request of the batch."""
        if self.error is not None:
            raise self.error
        assert self._copies is not None, "delayed rows are not sampled yet"
        results = [Sampled() for _ in self.batch.reqs]
        kv_finite, *sampled = (copy.numpy() for copy in self._copies.get())
        if sampled:
            self._take_tokens(results, *(copy.tolist() for copy in sampled))
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

    def _take_tokens(
        self,
        results: list[Sampled],
        tokens: list[int],
        finite: list[bool],
        allowed: list[bool] | None = None,
        sound: list[bool] | None = None,
    ) -> None:
        for j, (i, token) in enumerate(zip(self.sampling, tokens, strict=True)):
            results[i].token = token
            if not finite[j]:
                results[i].failed = NOT_FINITE
            elif j in self.unsampled:
                results[i].failed = self.unsampled[j]
            elif sound is not None and not sound[j]:
                processor = self.batch.reqs[i].processor
                assert processor is not None
                results[i].failed = NOTHING_SOUND.format(processor.name)
            elif allowed is not None and not allowed[j]:
                results[i].failed = NOTHING_ALLOWED

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
        largest_prompt_graph: int = 0,
    ) -> None:
        """kv_dtype: of the KV cache; by default the model's. largest_graph: sequences of the largest decode batch that
        is captured, largest_prompt_graph: tokens of the largest step of prompts; 0: none is."""
        shape = model.config
        self._model = model
        self._table = table
        self._device = device
        self._masks = Masks(shape.vocab_size, device)
        self._token_bytes = bytes_per_token(shape, kv_dtype or dtype)
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
            scoring = shape.scoring.within(table.pages.shape[1] * config.page_size)
            self._attention = new_attention(
                config.attention_backend, self.pool, shape.num_heads, shape.num_kv_heads, shape.head_dim, scoring
            )
            self._forward = Forward(model, self._attention, table)
            self._graphs = DecodeGraphs(self._forward, self._attention, table, largest_graph, device)
            self._prompts = PromptGraphs(self._forward, self._attention, table, largest_prompt_graph, device)

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
        if batch.phase is Phase.DECODE and not wants_hidden and self._is_graph(batch):
            return self._replay(batch)
        q_lens = batch.q_lens
        on_host = self._table.on_host([req.row for req in batch.reqs])
        rows = np.array(on_host.rows, dtype=np.int64)
        positions = [np.arange(start, end) for start, end in zip(batch.starts, batch.ends, strict=True)]
        cells = np.stack((np.repeat(rows, q_lens), np.concatenate(positions))).astype(np.int32)
        rows_there = upload(rows, self._device)
        plan = self._attention.plan(Layout(q_lens, batch.ends, self._table.page_table, rows_there, on_host))
        hidden, kv_finite = self._prompts.hidden(cells, plan)
        if self._model.pooler is not None:
            launched = Launched(batch, [])
            launched.read_back(kv_finite)
            launched.pooled = Pooled(batch, hidden, self._model.pooler)
            return launched
        input_logprobs = self._input_logprobs(batch, hidden)
        hidden_states = _hidden_states(batch, hidden) if wants_hidden else []
        sampling = batch.sampling
        if not sampling:
            launched = Launched(batch, sampling)
            launched.read_back(kv_finite)
            launched.input_logprobs = input_logprobs
            launched.hidden_states = hidden_states
            return launched
        if len(sampling) < hidden.shape[0]:
            hidden = hidden[upload(np.array(batch.lasts), self._device)]
        inputs = DecodeInputs.of([batch.reqs[i] for i in sampling], [batch.ends[i] - 1 for i in sampling])
        logits, tokens = self._forward.choose(hidden, inputs.on(self._device))
        launched = self._finish(batch, sampling, logits, tokens, kv_finite, input_logprobs)
        launched.hidden_states = hidden_states
        return launched

    def _is_graph(self, batch: Batch) -> bool:
        """Whether a step of decoding replays a graph, in which every token is a sequence of its own. What came before
        it is read for each, so a long jump in a long sequence is faster computed as a prompt is."""
        if batch.num_tokens > self._graphs.largest or not any(batch.samples):
            return False
        again = sum((n - 1) * end for n, end in zip(batch.q_lens, batch.ends, strict=True))
        return again * self._token_bytes <= _READ_AGAIN_BYTES

    def _replay(self, batch: Batch) -> Launched:
        if all(batch.samples) and batch.num_tokens == len(batch.reqs):
            inputs = DecodeInputs.of(batch.reqs, batch.starts)
            return self._finish(batch, list(range(len(batch.reqs))), *self._graphs.replay(inputs, batch.ends), [])
        inputs = DecodeInputs.spread(batch, self._table.scratch_row)
        logits, tokens, kv_finite = self._graphs.replay(inputs, [at + 1 for at in inputs.positions])
        lasts = upload(np.array(batch.lasts), self._device)
        chosen = Tokens(tokens.ids[lasts], tokens.finite[lasts])
        return self._finish(batch, batch.sampling, logits[lasts], chosen, kv_finite, [])

    def warm_up(self, lengths: list[int]) -> None:
        """Compute prompts of these lengths for nobody, so that the first request does not pay for what is done once:
        kernels that are built or chosen, libraries that are loaded, memory that is taken."""
        with torch.inference_mode(), self._on_device():
            for length in lengths:
                self._compute_for_nobody(length)

    def _compute_for_nobody(self, length: int) -> None:
        row = np.array([self._table.scratch_row])
        layout = Layout([length], [length], self._table.page_table, upload(row, self._device))
        cells = np.stack((np.repeat(row, length), np.arange(length))).astype(np.int32)
        hidden, _ = self._prompts.hidden(cells, self._attention.plan(layout))
        if self._model.pooler is not None:
            Readback(self._model.pooler.select(hidden, [0], [length], [True])).get()
            return
        no_keys = np.zeros((1, 2), dtype=np.int32)
        nobody = [self._table.scratch_row]
        inputs = DecodeInputs(nobody, [length - 1], nobody, [1.0], no_keys)
        logits, tokens = self._forward.choose(hidden[-1:], inputs.on(self._device))
        masks = torch.zeros(1, mask_words(logits.shape[1]), dtype=torch.int32, device=self._device)
        self._model.ops.forbid(logits.float(), masks)
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
        """Sample free rows that take more than a temperature; without delayed ones, results start on their way."""
        ends = [batch.ends[i] for i in sampling]
        step = Step([batch.reqs[i] for i in sampling], ends, logits, tokens, kv_finite)
        launched = Launched(batch, sampling)
        launched.input_logprobs = input_logprobs
        free = [j for j, req in enumerate(step.reqs) if not req.delays]
        if more := [j for j in free if needs_more(step.reqs[j].sampling)]:
            if any(step.reqs[j].sampling.excludes for j in more):
                step.allowed = torch.ones(len(step.reqs), dtype=torch.bool, device=self._device)
            self._sample(step, more)
        if len(free) < len(step.reqs):
            launched.delayed = step
        else:
            self._read_back(launched, step)
        return launched

    def sample_delayed(self, launched: Launched) -> None:
        """Sample the delayed rows of the newest batch, whose requests know all results before it; then its results
        start on their way. What a constraint or a processor raises is the result of its request alone; raises nothing.
        """
        step, launched.delayed = launched.delayed, None
        assert step is not None
        try:
            with torch.inference_mode(), self._on_device():
                if step.allowed is None:
                    step.allowed = torch.ones(len(step.reqs), dtype=torch.bool, device=self._device)
                failed = self._process(step)
                launched.unsampled = self._sample_constrained(step) | self._sample_processed(step) | failed
                self._read_back(launched, step)
        except Exception as error:  # a device in trouble
            launched.error = error

    def _process(self, step: Step) -> dict[int, str]:
        """Have logit processors change copies of their rows, each once. → for which that failed, and why."""
        failed = dict[int, str]()
        live = [(j, req.processor) for j, req in enumerate(step.reqs) if req.finish is None]
        for j, processor in live:
            if processor is not None:
                req = step.reqs[j]
                logits = processor.apply(req.tokens[req.prompt_len + processor.seen :], step.logits[j])
                if isinstance(logits, str):
                    failed[j] = logits
                else:
                    step.processed[j] = logits
        if step.processed:
            step.sound = torch.ones(len(step.reqs), dtype=torch.bool, device=self._device)
            for j, logits in step.processed.items():
                step.sound[j] = logits.max().isfinite()  # NaN is a maximum, too
        return failed

    def _sample_processed(self, step: Step) -> dict[int, str]:
        """Those without a constraint. → which rows could not be sampled, and why."""
        rows = [j for j in step.processed if step.reqs[j].constraint is None]
        return self._sample_each(step, rows) if rows else {}

    def _sample_constrained(self, step: Step) -> dict[int, str]:
        """→ which rows could not be sampled, and why. Nobody will look at those of who has ended, or jumped."""
        waited_for = [(j, req) for j, req in enumerate(step.reqs) if req.finish is None and req.overtaken < 0]
        constrained = [(j, req.constraint) for j, req in waited_for]
        live = [(j, constraint) for j, constraint in constrained if constraint is not None]
        if not live:
            return {}
        rows, constraints = zip(*live, strict=True)
        masks, failed = self._masks.fill(constraints)
        return self._sample_each(step, list(rows), masks) | {rows[i]: message for i, message in failed.items()}

    def _sample_each(self, step: Step, rows: list[int], masks: torch.Tensor | None = None) -> dict[int, str]:
        """`_sample`; if that fails, row by row. → those for which it does, and why."""
        try:
            self._sample(step, rows, masks)
        except Exception as error:
            logger.exception("%d delayed rows could not be sampled", len(rows))
            if len(rows) == 1:
                return {rows[0]: f"internal error: {error!r}"}
            each = [masks] * len(rows) if masks is None else masks.split(1)
            alone = (self._sample_each(step, [row], mask) for row, mask in zip(rows, each, strict=True))
            return {row: message for failed in alone for row, message in failed.items()}
        return {}

    def _sample(self, step: Step, rows: list[int], masks: torch.Tensor | None = None) -> None:
        """Sample rows of a step by all of their parameters. masks: what they may choose, for `Ops.forbid`."""
        reqs, ends = [step.reqs[j] for j in rows], [step.ends[j] for j in rows]
        where = upload(np.array(rows), self._device)
        logits = step.logits[where].float()
        for i, j in enumerate(rows):
            if j in step.processed:
                logits[i] = step.processed[j]
        if masks is not None:
            self._model.ops.forbid(logits, masks)
        ids = sample(logits, [self._row(req, end) for req, end in zip(reqs, ends, strict=True)])
        step.tokens.ids[where] = ids
        cells = upload(np.array([[req.row for req in reqs], ends]), self._device)
        self._table.token_pool[cells[0], cells[1]] = ids
        if step.allowed is not None:
            step.allowed[where] = logits.gather(1, ids[:, None]).squeeze(1) > float("-inf")

    def _read_back(self, launched: Launched, step: Step) -> None:
        """Start the results on their way, with the logprobs of what was chosen."""
        checks = [check for check in (step.allowed, step.sound) if check is not None]
        launched.read_back(step.kv_finite, *step.tokens, *checks)
        wanted = [j for j, req in enumerate(step.reqs) if req.return_logprob]
        if wanted:
            where = upload(np.array(wanted), self._device)
            top = max(step.reqs[j].top_logprobs_num for j in wanted)
            logprobs = Logprobs(step.logits[where].float(), step.tokens.ids[where], top)
            launched.logprobs = [launched.sampling[j] for j in wanted], logprobs

    def _row(self, req: Req, end: int) -> Row:
        history = self._table.token_pool[req.row, :end] if needs_history(req.sampling) else None
        # a grammar knows itself where an output may end
        stop_ids = req.stop_ids if req.sampling.grammar is None else frozenset[int]()
        return Row(req.sampling, req.seed, end - req.prompt_len, stop_ids, req.prompt_len, history)

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
