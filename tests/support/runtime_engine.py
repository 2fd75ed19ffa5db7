"""Small models, an in-memory scheduler that checks itself after every step, a reference attention backend."""

from __future__ import annotations

import json
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from treeline_runtime.attention import ATTENTION_BACKENDS, AttentionBackend, Layout
from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Batch, Phase
from treeline_runtime.messages import (
    AbortReq,
    BatchTokenOut,
    FinishReason,
    FromScheduler,
    GenerateReq,
    Reply,
    SamplingParams,
    TokenLogprob,
    TokenOut,
    ToScheduler,
)
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.loader import load_model
from treeline_runtime.published import CacheUpdate, LoadUpdate, ToPublisher
from treeline_runtime.sampling import Factory
from treeline_runtime.scheduler import Scheduler
from treeline_runtime.scheduler.launched import Launched
from treeline_runtime.scheduler.processors import Processors

from support.runtime_models import IDS

VOCAB = 96

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": None,
}


def write_config(directory: Path, **changes: Any) -> Path:
    """Write a model directory for `load_format="dummy"`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(TINY_CONFIG | changes))
    return directory


_MODELS: dict[str, Decoder] = {}


def dummy_model(config: SchedulerConfig) -> Decoder:
    """Return random weights for `config.model`, made once per directory and context length."""
    head = config.speculative_draft_model_path
    key = f"{config.model} {config.context_length} {config.seed} {config.quantization} {head}"
    if key not in _MODELS:
        _MODELS[key] = load_model(config)
    return _MODELS[key]


class Memory:
    """A transport in memory that checks the messages it sends."""

    def __init__(self) -> None:
        self.inbox: deque[ToScheduler] = deque()
        self.outs: dict[str, list[TokenOut]] = {}
        self.replies: list[Reply] = []
        self.updates: list[CacheUpdate] = []
        self.loads: list[LoadUpdate] = []
        self.woken = threading.Event()

    def receive(self) -> list[ToScheduler]:
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, messages: list[FromScheduler]) -> None:
        for message in messages:
            if isinstance(message, BatchTokenOut):
                for out in message.outs:
                    history = self.outs.setdefault(out.rid, [])
                    assert not (history and history[-1].finish), f"a message after the terminal one: {out}"
                    history.append(out)
            else:
                self.replies.append(message)

    def publish(self, update: ToPublisher) -> bool:
        if isinstance(update, CacheUpdate):
            self.updates.append(update)
        else:
            self.loads.append(update)
        return True

    def wait(self) -> None:
        raise AssertionError("nobody would ever end this")

    def wake(self) -> None:
        self.woken.set()


class Harness(Scheduler):
    """A scheduler that checks its own accounts after every step."""

    def __init__(
        self,
        model: Path,
        *,
        clock: Callable[[], float] = lambda: 0.0,
        processors: Mapping[str, Factory] | None = None,
        **settings: Any,
    ) -> None:
        """clock: for waiting times; it stands still unless a test sets it, so a slow machine causes no timeouts."""
        defaults: dict[str, Any] = {
            "load_format": "dummy",
            "page_size": 4,
            "max_total_tokens": 1024,
            "threads": 1,
        }
        config = SchedulerConfig(model=str(model), **(defaults | settings))
        memory = Memory()
        theirs = Processors(processors or {})
        super().__init__(config, dummy_model(config), memory, clock=clock, processors=theirs)
        self.inbox, self.outs, self.replies = memory.inbox, memory.outs, memory.replies
        self.updates, self.loads = memory.updates, memory.loads
        self.woken = memory.woken
        self.steps = 0

    def step(self) -> bool:
        worked = super().step()
        self.steps += 1
        self.check_integrity()
        self._check_in_flight()
        return worked

    def _check_in_flight(self) -> None:
        """Check that no page of a launched batch is free."""
        for batch, _, _ in self._pending:
            for req in batch.reqs:
                assert req.in_flight > 0
                assert req.row >= 0, f"released while in flight: {req}"
                pages = self.table.pages[req.row, : req.num_pages]
                assert not self.cache.pool._is_free[pages].any(), f"pages freed while in flight: {req}"

    # ---- the test's side ----------------------------------------------------------------------------------

    def submit(self, rid: str, ids: list[int], *, namespace: str | None = None, **options: Any) -> None:
        """Submit a request. `options`: fields of GenerateReq or of SamplingParams; greedy by default."""
        fields = {
            "client",
            "return_logprob",
            "logprob_start_len",
            "top_logprobs_num",
            "priority",
            "pools",
            "return_hidden_states",
            "pages_from",
        }
        request = {k: options.pop(k) for k in list(options) if k in fields}
        sampling = SamplingParams(**({"temperature": 0.0, "max_new_tokens": 8} | options))
        self.inbox.append(GenerateReq(rid, ids, sampling, namespace=namespace, **request))

    def abort(self, rid: str = "") -> None:
        self.inbox.append(AbortReq(rid))

    def retract_one(self, rng: random.Random) -> None:
        """Move a running request back to the queue when nothing is in flight, as if memory had run out."""
        self._process_all_but(0)
        if self.decode.running:
            self._retract(rng.choice(list(self.decode.running.values())))

    def run(self, max_steps: int = 5000) -> None:
        """Run until nothing is left to do; then check that nothing is held."""
        for _ in range(max_steps):
            if not self.step() and not self._woken():
                break
        else:
            raise AssertionError(f"not idle after {max_steps} steps: {self._everything()}")
        self.assert_clean()

    def run_with_failing_launches(self) -> None:
        """Run while each third launch of several requests fails, so that they are launched one by one."""
        launch, sizes = self._compute, list[int]()

        def flaky(batch: Batch) -> Launched:
            sizes.append(len(batch.reqs))
            if len(batch.reqs) > 1 and len(sizes) % 3 == 0:
                raise RuntimeError("not all of them at once")
            return launch(batch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "_compute", flaky)
            self.run()
        assert sizes.count(1) > 5

    def fail_launches_of(self, rid: str) -> None:
        """Make the model raise whenever the request is in the batch."""
        launch = self._compute

        def broken(batch: Batch) -> Launched:
            if any(req.rid == rid for req in batch.reqs):
                raise RuntimeError("bad luck")
            return launch(batch)

        self._compute = broken  # type: ignore[method-assign]

    def spoil_logits(self, monkeypatch: pytest.MonkeyPatch, rows: slice, value: float = torch.nan) -> None:
        """Replace the logits of the model (which other tests use, too) for a token of these rows from now on."""
        logits = self.executor._model.logits

        def broken(hidden: torch.Tensor, out: None = None) -> torch.Tensor:
            result = logits(hidden).clone()
            result[rows, 5] = value
            return result

        monkeypatch.setattr(self.executor._model, "logits", broken)

    def _woken(self) -> bool:
        """Wait for grammars that are being compiled, and pages that are copied. Return whether there were any."""
        if not self.grammars.waiting and (self.cache.tiers is None or not self.cache.tiers.is_copying):
            return False
        assert self.woken.wait(60.0), f"nothing came of {self.grammars.reqs()} or of copies"
        self.woken.clear()
        return True

    def assert_clean(self) -> None:
        """Check that it is idle, every page free or cached, no lock held, every rid ended."""
        assert self.is_idle
        assert self.cache.tree.locked_pages == 0
        assert self.table.num_free == self.table.num_rows
        assert self.cache.is_balanced()
        for rid, outs in self.outs.items():
            assert outs[-1].finish is not None, f"{rid} has no terminal message"

    def generate(self, rid: str, ids: list[int], **options: Any) -> list[int]:
        """Submit, run to the end, and return the output ids."""
        self.submit(rid, ids, **options)
        self.run()
        return self.tokens(rid)

    def pool(self, rid: str, ids: list[int], **options: Any) -> npt.NDArray[np.float32]:
        """Submit, run to the end, and return the vector."""
        self.submit(rid, ids, pools=True, max_new_tokens=0, **options)
        self.run()
        return self.vector(rid)

    def vector(self, rid: str) -> npt.NDArray[np.float32]:
        vector = self.last(rid).vector
        assert vector is not None, self.last(rid)
        return np.frombuffer(vector, "<f4")

    def tokens(self, rid: str) -> list[int]:
        """Return the tokens that messages delivered, without the withdrawn ones."""
        found = list[int]()
        for out in self.outs[rid]:
            assert out.withdrawn <= len(found)
            del found[len(found) - out.withdrawn :]
            found += out.token_ids
        return found

    def last(self, rid: str) -> TokenOut:
        return self.outs[rid][-1]

    def finish(self, rid: str) -> FinishReason:
        """Return the finish reason of a request that has ended."""
        found = self.last(rid).finish
        assert found is not None, f"{rid} has not ended"
        return found

    def logprobs(self, rid: str) -> list[TokenLogprob]:
        return [pair for out in self.outs[rid] for pair in out.output_token_logprobs or ()]


class Recorder(Harness):
    """Records every launch: prefilled, decoding, tokens."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self.batches: list[tuple[list[str], list[str], int]] = []
        super().__init__(model, **settings)

    def _launch(self, batch: Batch) -> None:
        rids: dict[Phase, list[str]] = {Phase.PREFILL: [], Phase.DECODE: []}
        for i, req in enumerate(batch.reqs):
            rids[batch.phase_of(i)].append(req.rid)
        self.batches.append((rids[Phase.PREFILL], rids[Phase.DECODE], batch.num_tokens))
        super()._launch(batch)

    @property
    def prefills(self) -> list[list[str]]:
        return [prefilled for prefilled, _, _ in self.batches if prefilled]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


class DenseAttention(AttentionBackend):
    """Textbook attention, one sequence, one head, one token at a time: slow and plainly right."""

    def capture_buffers(self, sequences: int) -> torch.Tensor:
        return torch.zeros(sequences, dtype=torch.int64)

    def plan(self, layout: Layout, buffers: torch.Tensor | None = None) -> Layout:
        if buffers is None:
            return layout
        buffers.copy_(layout.rows)
        return replace(layout, rows=buffers)

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Layout,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found = torch.zeros_like(q)
        token = 0
        for i, (q_len, kv_len) in enumerate(zip(plan.q_lens, plan.kv_lens, strict=True)):
            pages = plan.page_table[plan.rows[i], : -(-kv_len // self.pool.page_size)]
            keys = self.pool.keys[layer][pages].flatten(0, 1)[:kv_len]
            values = self.pool.values[layer][pages].flatten(0, 1)[:kv_len]
            for position in range(kv_len - q_len, kv_len):
                window = self.scoring.window(layer) or kv_len
                oldest = max(position + 1 - window, 0)
                seen = slice(oldest, position + 1)
                for head in range(self.num_heads):
                    group = head * self.num_kv_heads // self.num_heads
                    scores = keys[seen, group] @ q[token, head] * self.scale
                    if cap := self.scoring.softcap:
                        scores = cap * torch.tanh(scores / cap)
                    if sinks is not None:
                        scores = torch.cat((scores, sinks[head : head + 1]))
                    weights = torch.softmax(scores, dim=0)[: len(values[seen])]
                    found[token, head] = weights @ values[seen, group]
                token += 1
        return found.flatten(1) if out is None else out.copy_(found.flatten(1))


ATTENTION_BACKENDS._things["dense"] = DenseAttention


def assert_generates_the_same(engine: Harness, theirs: Any) -> None:
    """Check that prompts of several lengths at once get the greedy answers of transformers' model `theirs`, one by
    one."""
    prompts = [IDS[:n] for n in (1, 7, 16, 33, 50)]
    for rid, ids in enumerate(prompts):
        engine.submit(str(rid), ids, max_new_tokens=12)
    engine.run()
    for rid, ids in enumerate(prompts):
        with torch.inference_mode():
            answer = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        assert engine.tokens(str(rid)) == answer
