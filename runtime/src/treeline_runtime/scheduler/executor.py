"""Runs steps: makes a plan's tensors, calls the model, samples. Knows no requests.

`launch` reads input tokens from the table and writes sampled ones there, so on a GPU the next launch can start before
this result is known on the CPU; it never waits for the device. A launch that raises can be repeated.

What a constrained row may become, or what a logit processor does, depends on the last token, which the CPU may not know
yet. `launch` computes those logits too, and `sample_delayed` samples them once earlier results are known.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import numpy as np
import torch

from treeline_runtime.attention import Layout, new_attention
from treeline_runtime.config import SchedulerConfig
from treeline_runtime.kvcache import KVPool, Pages
from treeline_runtime.models.adapters import Adapter
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.lora import AdapterPool
from treeline_runtime.sampling import Constraint, Masks, Row, mask_words, needs_history, sample
from treeline_runtime.sampling.sampler import ROWS_AT_ONCE, Logprobs
from treeline_runtime.scheduler.chains import Chains
from treeline_runtime.scheduler.embeddings import Embeddings, StepMedia
from treeline_runtime.scheduler.forward import DecodeInputs, DeviceTables, Forward, Tokens
from treeline_runtime.scheduler.graphs import DecodeGraphs
from treeline_runtime.scheduler.launched import Choices, Launched, Pooled, Step
from treeline_runtime.scheduler.peers import EAGER, Peers
from treeline_runtime.scheduler.plan import StepPlan
from treeline_runtime.scheduler.prompt_graphs import PromptGraphs
from treeline_runtime.scheduler.ranks.protocol import Clear, Delayed, Group, Launch, as_one
from treeline_runtime.scheduler.resolve import Resolved
from treeline_runtime.transfer import Readback, upload

logger = logging.getLogger(__name__)

NO_ADAPTERS: Mapping[str, Adapter] = {}
_READ_AGAIN_BYTES = 4 << 30
"""Bytes of keys and values that are read in a millisecond, half the time of launching a prompt step."""


class Executor:
    """The model with its KV pool, attention backend and sampler."""

    def __init__(
        self,
        config: SchedulerConfig,
        model: Decoder,
        limits: Resolved,
        group: Group | None = None,
        peers: Peers | None = None,
        adapters: Mapping[str, Adapter] = NO_ADAPTERS,
    ) -> None:
        """group: other ranks, with parts of the same steps. peers: with steps of their own; they share experts.
        adapters: those on the host, by digest."""
        shape, device = model.own, limits.device
        self._model = model
        self._group = group
        self._peers = peers
        self._leads = group is None or group.ranks.rank.number == 0
        """Whether it samples, and returns results; the other ranks take its tokens."""
        self._device = device
        self._masks = Masks(shape.vocab_size, device)
        self._token_bytes = limits.kv_bytes_per_token
        with self._on_device():
            table = self._table = DeviceTables(
                limits.max_running_requests,
                limits.context_length,
                limits.page_size,
                device,
                scratch_page=limits.num_pages,
                has_deltas=model.mrope is not None,
            )
            self.embeddings = None if model.media is None else Embeddings(model, device)
            self.pool = KVPool(
                num_layers=shape.num_layers,
                num_pages=limits.num_pages,
                page_size=limits.page_size,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                dtype=limits.dtype,
                device=device,
                stored=limits.kv_dtype,
                scales=model.kv_scales,
            )
            self._adapters, self._slots = adapters, None
            if config.serves_adapters:
                room = config.max_loras, config.max_lora_rank
                self._slots = AdapterPool(model.sites, *room, limits.dtype, device, limits.max_graph_batch)
            scoring = shape.scoring.within(table.page_table.shape[1] * limits.page_size)
            self._attention = new_attention(config.attention_backend, self.pool, shape.num_heads, scoring)
            self._chains: Chains | None = None
            if model.drafter is not None:
                self._chains = Chains(model.drafter, model.ops, table, self.pool, limits, config.most_guesses)
            self._forward = Forward(model, self._attention, table, self._chains)
            graph_batch = limits.max_graph_batch
            self._graphs = DecodeGraphs(self._forward, self._attention, table, graph_batch, device, self._slots)
            self._prompts = PromptGraphs(self._forward, self._attention, table, limits.max_graph_tokens, device)

    def launch(self, plan: StepPlan) -> Launched:
        """Computes the step; this executor owns its pages until it is done. Raises GroupFailed for any failure if it is
        one of several."""
        launch = self._how(plan)
        if self._peers is not None:
            return self._with_peers(plan, plan.num_tokens, launch, self._peers)
        if self._group is None:
            return self._compute(plan, launch)
        self._group.begin(plan, launch)
        with as_one(self._group):
            return self._compute(plan, launch)

    def has_embeddings(self, digest: bytes) -> bool:
        """Whether the item need not be encoded."""
        return self.embeddings is not None and digest in self.embeddings

    def idle(self) -> None:
        """Computes the experts that are here for the peers' tokens, with one token of nobody."""
        assert self._peers is not None
        self._with_peers(self._of_nobody(1), 0, EAGER, self._peers)

    def _with_peers(self, plan: StepPlan, tokens: int, launch: Launch, peers: Peers) -> Launched:
        with as_one(peers):
            step = peers.agree(tokens, launch)
            if step is None:
                return Launched(plan)
            peers.exchange.rows = step.tokens
            try:
                return self._compute(plan, step.launch)
            finally:
                peers.exchange.rows = 0

    def _compute(self, plan: StepPlan, launch: Launch) -> Launched:
        with torch.inference_mode(), self._on_device():
            self._table.write(plan)
            for slot, digest in plan.slots.items():
                assert self._slots is not None
                self._slots.write(slot, self._adapters[digest])
            return self._launch(plan, launch)

    def _how(self, plan: StepPlan) -> Launch:
        """Graphs are captured without items, those of prompts without adapters, too."""
        if plan.media is not None:
            return EAGER
        tokens = plan.num_tokens
        if self._is_decode_graph(plan, tokens):
            # peers replay the largest size of theirs, with adapters or without
            adapts = bool(plan.adapters) or (self._peers is not None and self._slots is not None)
            return Launch("decode graph", self._graphs.size_for(tokens, adapts=adapts))
        if plan.adapters:
            return EAGER
        size = self._prompts.size_for(tokens)
        return Launch("prompt graph", size) if size else EAGER

    def _on_device(self) -> AbstractContextManager[Any]:
        """Triton and FlashInfer kernels, events and captures use the current device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _launch(self, plan: StepPlan, launch: Launch) -> Launched:
        if self._chains is not None:
            self._chains.follow(plan)
        if launch.mode == "decode graph":
            return self._replay(plan, launch.bucket)
        launched, media = Launched(plan), None
        if plan.media is not None and self.embeddings is not None:
            parts, launched.encoded = self.embeddings.step(plan.media)
            media = StepMedia(parts, self._table.positions(plan))
        hidden, kv_finite = self._hidden(plan, launch.bucket, media)
        if self._group is not None and (plan.hidden or self._model.pooler is not None):
            hidden = self._group.ranks.home(hidden)
        if self._model.pooler is not None:
            launched.read_back(kv_finite)
            launched.pooled = Pooled(plan, hidden, self._model.pooler)
            return launched
        launched.input_logprobs = self._input_logprobs(plan, hidden)
        launched.hidden_states = _hidden_states(plan, hidden) if plan.hidden and self._leads else []
        if not plan.sampling:
            launched.read_back(kv_finite)
            return launched
        if len(plan.sampling) < hidden.shape[0]:
            hidden = hidden[upload(np.array(plan.lasts), self._device)]
        logits, tokens = self._forward.choose(hidden, DecodeInputs.of(plan, self._table.scratch_row).on(self._device))
        return self._finish(launched, logits, tokens, kv_finite)

    def _hidden(self, plan: StepPlan, size: int, media: StepMedia | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """`Forward.hidden` of the step. size: of its graph, 0: none. In a pipeline, which has no graphs, a stage
        computes a micro-batch while the next stage computes the one before."""
        ranks, cells, table, parts, spans = self._model.ranks, plan.cells(), self._table, [], list[tuple[int, int]]()
        if plan.media is not None and self._model.config.both_ways:
            spans = [(part.at, part.at + part.end - part.begin) for part in plan.media.parts]
        for begin, end in plan.micro_batches(1 if ranks is None else ranks.rank.stages):
            rows = plan.rows[begin:end]
            layout = Layout(
                plan.q_lens[begin:end],
                plan.ends[begin:end],
                table.page_table,
                upload(np.array(rows, dtype=np.int64), self._device),
                table.on_host(rows),
                spans,
            )
            of_tokens = cells[:, plan.bounds[begin] : plan.bounds[end]]
            adapters = None
            if plan.adapters and self._slots is not None:
                adapters = self._slots.step(plan.adapters[begin:end], plan.q_lens[begin:end])
            parts.append(self._prompts.hidden(of_tokens, self._attention.plan(layout), size, adapters, media))
        hidden, finite = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        return hidden, finite if ranks is None else ranks.everywhere(finite)

    def _is_decode_graph(self, plan: StepPlan, tokens: int) -> bool:
        """Whether a step replays a graph in which every token is a sequence of its own and reads everything before it,
        several of them at once. A long jump in a long sequence is faster as a prompt."""
        if not plan.decodes or plan.hidden:  # graphs give no hidden states
            return False
        if tokens > self._graphs.largest or not plan.sampling:
            return False
        if tokens == len(plan.rows):
            return True
        together = self._attention.sharers
        again = sum((n - 1) // together * end for n, end in zip(plan.q_lens, plan.ends, strict=True))
        return again * self._token_bytes <= _READ_AGAIN_BYTES

    def _replay(self, plan: StepPlan, size: int) -> Launched:
        launched, scratch_row, adapts = Launched(plan), self._table.scratch_row, bool(plan.adapters)
        if adapts and self._slots is not None:
            self._slots.choose(plan.adapters, plan.q_lens, size)
        if len(plan.sampling) == len(plan.rows) == plan.num_tokens:
            inputs = DecodeInputs.of(plan, scratch_row)
            return self._finish(launched, *self._graphs.replay(inputs, plan.ends, size, adapts=adapts))
        inputs = DecodeInputs.spread(plan, scratch_row)
        ends = [at + 1 for at in inputs.positions]
        logits, tokens, kv_finite = self._graphs.replay(inputs, ends, size, adapts=adapts)
        lasts = upload(np.array(plan.lasts), self._device)
        chosen = Tokens(tokens.ids[lasts], tokens.finite[lasts])
        return self._finish(launched, logits[lasts], chosen, kv_finite)

    def warm_up(self, lengths: list[int]) -> None:
        """Computes prompts of these lengths for no request: builds kernels, loads libraries, takes memory."""
        with torch.inference_mode(), self._on_device():
            for plan in map(self._of_nobody, lengths):
                launched = self._launch(plan, self._how(plan))
                if self._leads:
                    launched.result()
            if self._leads and self._model.pooler is None:
                vocab = self._model.config.vocab_size
                masks = torch.zeros(1, mask_words(vocab), dtype=torch.int32, device=self._device)
                self._model.ops.forbid(torch.zeros(1, vocab, device=self._device), masks)

    def _of_nobody(self, length: int) -> StepPlan:
        one = StepPlan([self._table.scratch_row], [0], [length])
        if self._model.pooler is not None:
            return msgspec.structs.replace(one, whole=[True])
        chain = int(self._chains is not None)
        return msgspec.structs.replace(one, sampling=[0], temperatures=[1.0], seeds=[0], indices=[0], chain=chain)

    @torch.inference_mode()
    def clear(self, pages: Pages) -> None:
        if self._group is not None:
            self._group.tell(Clear(pages.tolist()))
        self.pool.clear(pages)

    def _finish(self, launched: Launched, logits: torch.Tensor, tokens: Tokens, kv_finite: torch.Tensor) -> Launched:
        """Samples undelayed rows that need more than a temperature; without delayed ones, starts copying results."""
        plan = launched.plan
        step = Step(plan, logits, tokens, kv_finite)
        if more := [j for j in plan.rows_sampling if j not in plan.delayed]:
            if self._leads:
                if any(plan.rows_sampling[j].params.excludes for j in more):
                    step.allowed = torch.ones(len(step.plan.sampling), dtype=torch.bool, device=self._device)
                self._sample(step, more)
            self._take_first(step, more)
        if plan.delayed:
            launched.delayed = step
        elif self._leads:
            self._read_back(launched, step)
        return launched

    def _take_first(self, step: Step, rows: list[int]) -> None:
        if self._group is not None:
            where = upload(np.array(rows), self._device)
            ids = self._group.ranks.first(step.tokens.ids[where])
            if not self._leads:
                self._keep(step, rows, where, ids)

    def _keep(self, step: Step, rows: list[int], where: torch.Tensor, ids: torch.Tensor) -> None:
        """Makes these the tokens of rows, in the result and for the next step."""
        step.tokens.ids[where] = ids
        places = np.array((step.plan.targets(self._table.scratch_row), step.plan.sampled_at))
        cells = upload(places[:, rows], self._device)
        self._table.token_pool[cells[0], cells[1]] = ids

    def follow_delayed(self, launched: Launched) -> None:
        """`sample_delayed` of a rank that does not sample."""
        step, launched.delayed = launched.delayed, None
        assert step is not None
        with as_one(self._group), torch.inference_mode(), self._on_device():
            self._take_first(step, step.plan.delayed)

    def fill_masks(
        self, constraints: Sequence[Constraint], drafts: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """`Masks.fill`, for `Choices`."""
        with torch.inference_mode(), self._on_device():
            return self._masks.fill(constraints, drafts)

    def sample_delayed(self, launched: Launched, choices: Choices) -> None:
        """Samples the newest step's delayed rows, then starts copying its results. A failure of a row is its result."""
        step, launched.delayed = launched.delayed, None
        assert step is not None
        if self._group is not None:
            self._group.tell(Delayed())
        with as_one(self._group), torch.inference_mode(), self._on_device():
            if step.allowed is None:
                step.allowed = torch.ones(len(step.plan.sampling), dtype=torch.bool, device=self._device)
            failed = self._process(step, choices)
            unsampled = choices.failed
            if choices.masks is not None:
                masks = self._masks.on_device(choices.masks)
                unsampled = self._sample_each(step, choices.masked, masks) | unsampled
            if free := [j for j in step.processed if j not in choices.masked]:
                unsampled = unsampled | self._sample_each(step, free)
            launched.unsampled = unsampled | failed
            launched.processors = {j: name for j, (name, _) in choices.processors.items()}
            self._take_first(step, step.plan.delayed)
            self._read_back(launched, step)

    def _process(self, step: Step, choices: Choices) -> dict[int, str]:
        """Runs each logit processor on a copy of its row. Returns the rows that failed and why."""
        failed = dict[int, str]()
        for j, (_, change) in choices.processors.items():
            logits = change(step.logits[j])
            if isinstance(logits, str):
                failed[j] = logits
            else:
                step.processed[j] = logits
        if step.processed:
            step.sound = torch.ones(len(step.plan.sampling), dtype=torch.bool, device=self._device)
            for j, logits in step.processed.items():
                step.sound[j] = logits.max().isfinite()  # NaN is a maximum, too
        return failed

    def _sample_each(self, step: Step, rows: list[int], masks: torch.Tensor | None = None) -> dict[int, str]:
        """`_sample`; if that fails, row by row. Returns the failing rows and why."""
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
        """Samples rows by all their parameters. masks: allowed tokens, for `Ops.forbid`."""
        where = upload(np.array(rows), self._device)
        logits = step.logits[where].float()
        for i, j in enumerate(rows):
            if j in step.processed:
                logits[i] = step.processed[j]
        if masks is not None:
            self._model.ops.forbid(logits, masks)
        ids = sample(logits, [self._row(step, j) for j in rows])
        self._keep(step, rows, where, ids)
        if step.allowed is not None:
            step.allowed[where] = logits.gather(1, ids[:, None]).squeeze(1) > float("-inf")

    def _read_back(self, launched: Launched, step: Step) -> None:
        checks = [check for check in (step.allowed, step.sound) if check is not None]
        launched.read_back(step.kv_finite, *step.tokens, *checks)
        if self._chains is not None and step.plan.chain:
            launched.guesses = self._chains.guess(step.plan, step.tokens.ids)
        if wanted := step.plan.logprobs:
            where = upload(np.array(list(wanted)), self._device)
            launched.logprobs = Logprobs(step.logits[where].float(), step.tokens.ids[where], max(wanted.values()))

    def _row(self, step: Step, j: int) -> Row:
        plan = step.plan
        params, stop_ids, prompt_len = msgspec.structs.astuple(plan.rows_sampling[j])
        row, end = plan.rows[plan.sampling[j]], prompt_len + plan.indices[j]
        history = self._table.token_pool[row, :end] if needs_history(params) else None
        return Row(params, plan.seeds[j], plan.indices[j], stop_ids, prompt_len, history)

    def _input_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> list[tuple[int, Logprobs]]:
        found: list[tuple[int, Logprobs]] = []
        for one in plan.input_logprobs:
            offset = plan.bounds[one.sequence] - plan.starts[one.sequence]
            for begin in range(one.low, one.high, ROWS_AT_ONCE):
                end = min(begin + ROWS_AT_ONCE, one.high)
                logits = self._model.logits(hidden[offset + begin : offset + end]).float()
                if not self._leads:
                    continue
                targets = self._table.token_pool[plan.rows[one.sequence], begin + 1 : end + 1]
                found.append((one.sequence, Logprobs(logits, targets, one.top)))
        return found


def _hidden_states(plan: StepPlan, hidden: torch.Tensor) -> list[tuple[int, Readback]]:
    """hidden (tokens of the step, hidden) → the parts of requesting sequences, being copied to the host."""
    return [(i, Readback(hidden[plan.bounds[i] : plan.bounds[i + 1]].float())) for i in plan.hidden]
