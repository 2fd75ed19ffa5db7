"""A launched step's results, on the device and on their way to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from treeline_runtime.messages import TokenLogprob
from treeline_runtime.models.pooler import Pooler, Vector
from treeline_runtime.sampling.sampler import Logprobs
from treeline_runtime.scheduler.embeddings import Encoded
from treeline_runtime.scheduler.forward import Tokens
from treeline_runtime.scheduler.plan import StepPlan
from treeline_runtime.transfer import Readback


@dataclass(slots=True)
class Sampled:
    """One sequence's result of a step."""

    tokens: list[int] = field(default_factory=list)
    """New tokens after the known ones: the right guesses, and the one after them."""
    wrong: int = 0
    """Guesses, the last of the sequence's tokens in this step, that do not count."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log probabilities of these tokens, with `top_logprobs`, if requested."""
    top_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_top_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    pooled: Vector | None = None
    """The step's contribution to its vector."""
    hidden_states: npt.NDArray[np.float32] | None = None
    """(tokens of the sequence in this step but for wrong guesses, hidden), if requested."""
    guesses: list[int] = field(default_factory=list)
    """What the drafter on the device says follows these tokens, if it was asked."""
    failed: str | None = None


NOT_FINITE = "the model computed NaN or infinity"
NOTHING_ALLOWED = (
    "no token is allowed: the request's constraint or logit processor, its logit_bias, allowed_token_ids, bad_words "
    "and min_tokens leave none, or the constraint takes too much work here: make it simpler"
)
NOTHING_SOUND = "logit processor {!r} left NaN, infinity, or no token that may be chosen"


class Choices(NamedTuple):
    """The data for choosing the tokens of a step's delayed rows, numbered among sampled rows; others are skipped."""

    masked: list[int]
    masks: torch.Tensor | None
    """(masked, words) int32 on the host, from `fill_masks`: the allowed tokens."""
    failed: dict[int, str]
    """Row → why it has no token to choose."""
    processors: Mapping[int, tuple[str, Callable[[torch.Tensor], torch.Tensor | str]]]
    """Names, and functions that change a copy of the row's logits or say why they failed. They are code of this
    process, so only one executor computes such plans."""


@dataclass(slots=True)
class Step:
    """The results of a launch on the device, for sampling. The next launch may overwrite them."""

    plan: StepPlan
    logits: torch.Tensor
    """(rows that sample, vocabulary), the model's own."""
    tokens: Tokens
    kv_finite: torch.Tensor
    """(tokens of the step,)"""
    allowed: torch.Tensor | None = None
    """(rows,) bool, if some are delayed or exclude tokens: whether any token was allowed."""
    processed: dict[int, torch.Tensor] = field(default_factory=dict)
    """Row → (vocabulary,) float32: its logits after its logit processor."""
    sound: torch.Tensor | None = None
    """(rows,) bool, if there are such: whether one can choose from them."""


class Pooled:
    """A prefill step's contributions to requested vectors, copied from the device.

    Nothing waits for it until it is asked for, and no state stays on the device: parts of a prompt are added on the
    host, so a failed step can be repeated, and a retracted request starts over."""

    def __init__(self, plan: StepPlan, hidden: torch.Tensor, pooler: Pooler) -> None:
        """hidden (tokens of the step, hidden)"""
        self._sequences = [i for i, is_whole in enumerate(plan.whole) if is_whole or pooler.pooling.needs_all]
        self._readback: Readback | None = None
        if self._sequences:
            self._readback = Readback(pooler.select(hidden, plan.bounds[:-1], plan.bounds[1:], plan.whole))

    def get(self) -> Iterator[tuple[int, Vector, bool]]:
        """Returns the sequences' numbers, each one's contribution, and whether all are finite."""
        if self._readback is not None:
            rows = self._readback.get()[0].numpy()
            yield from zip(self._sequences, rows, np.isfinite(rows).all(1).tolist(), strict=True)


class Launched:
    """A launched step. `result` waits for it."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self._copies: Readback | None = None
        self.delayed: Step | None = None
        """The step, until its delayed rows are sampled; only then the result is copied. None: no delayed rows."""
        self.unsampled: dict[int, str] = {}
        """Number among sampled rows → why a delayed row could not be sampled."""
        self.processors: dict[int, str] = {}
        """Number among sampled rows → the name of the row's logit processor."""
        self.error: Exception | None = None
        """The error that kept the result from being copied; `result` raises it."""
        self.input_logprobs: list[tuple[int, Logprobs]] = []
        """Sequence → logprobs of some of its prompt tokens, in order."""
        self.logprobs: Logprobs | None = None
        """Log probabilities of the sampled tokens, for the rows in `StepPlan.logprobs`."""
        self.guesses: tuple[list[int], Readback] | None = None
        """Sequences; for each the number of right guesses in the step, and guesses for the next one."""
        self.pooled: Pooled | None = None
        self.encoded: Encoded | None = None
        """None: it needed no items."""
        self.hidden_states: list[tuple[int, Readback]] = []
        """Sequence → hidden states of its tokens."""

    def read_back(self, kv_finite: torch.Tensor, *sampled: torch.Tensor) -> None:
        """Starts copying the result. kv_finite (tokens of the step,); for sampled rows, if any: tokens, finiteness
        of logits; with delayed ones, whether a token was allowed; with logit processors, whether their result is
        usable."""
        self._copies = Readback(kv_finite, *sampled)

    @property
    def is_done(self) -> bool:
        """Whether `result` would not wait for tokens."""
        return self._copies is None or self._copies.is_done

    def result(self) -> list[Sampled]:
        if self.error is not None:
            raise self.error
        assert self._copies is not None, "delayed rows are not sampled yet"
        results = [Sampled() for _ in self.plan.rows]
        kv_finite, *sampled = (copy.numpy() for copy in self._copies.get())
        if sampled:
            self._take_tokens(results, *(copy.tolist() for copy in sampled))
        if not kv_finite.all():
            for result, (start, end) in zip(results, pairwise(self.plan.bounds), strict=True):
                if not kv_finite[start : end - result.wrong].all():
                    result.failed = NOT_FINITE
        self._take_logprobs(results)
        if self.guesses is not None:
            sequences, copies = self.guesses
            for i, (right, *guesses) in zip(sequences, copies.get()[0].tolist(), strict=True):
                if len(results[i].tokens) == 1 + right:  # else a right guess does not count, as the next one failed
                    results[i].guesses = guesses
        for i, vector, is_finite in self.pooled.get() if self.pooled is not None else ():
            results[i].pooled = vector
            if not is_finite:
                results[i].failed = NOT_FINITE
        for i, copy in self.hidden_states:
            rows = copy.get()[0].numpy()[: self.plan.q_lens[i] - results[i].wrong]
            results[i].hidden_states = rows.copy()  # the step's whole tensor need not stay
        return results

    def _take_tokens(
        self,
        results: list[Sampled],
        tokens: list[int],
        finite: list[bool],
        allowed: list[bool] | None = None,
        sound: list[bool] | None = None,
    ) -> None:
        plan = self.plan
        positions = plan.sampled_at if plan.drafts else []
        for j, (i, token) in enumerate(zip(plan.sampling, tokens, strict=True)):
            taken, failed = results[i].tokens, None
            if not finite[j]:
                failed = NOT_FINITE
            elif j in self.unsampled:
                failed = self.unsampled[j]
            elif sound is not None and not sound[j]:
                failed = NOTHING_SOUND.format(self.processors[j])
            elif allowed is not None and not allowed[j]:
                failed = NOTHING_ALLOWED
            if draft := plan.drafts.get(i):
                guesses = positions[j] - plan.ends[i] + len(draft)
                if results[i].failed is not None or len(taken) != guesses or taken != draft[:guesses]:
                    continue  # one of the guesses before it is wrong
                if guesses < plan.right.get(i, 0):
                    token = draft[guesses]
                if failed is not None and guesses:
                    continue  # after right guesses; the next step fails before any
            taken.append(token)
            results[i].failed = failed
        for i, draft in plan.drafts.items():
            results[i].wrong = len(draft) + 1 - len(results[i].tokens)

    def _take_logprobs(self, results: list[Sampled]) -> None:
        for i, logprobs in self.input_logprobs:
            chosen, top = logprobs.get()
            if any(math.isnan(logprob) for logprob, _ in chosen if logprob is not None):
                results[i].failed = NOT_FINITE
            results[i].input_logprobs += chosen
            results[i].input_top_logprobs += top
        if self.logprobs is not None:
            for (j, num_top), chosen_one, tops in zip(self.plan.logprobs.items(), *self.logprobs.get(), strict=True):
                result = results[self.plan.sampling[j]]
                if len(result.logprobs) < len(result.tokens):
                    result.logprobs.append(chosen_one)
                    result.top_logprobs.append(tops[:num_top])
