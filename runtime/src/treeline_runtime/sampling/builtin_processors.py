"""Logit processors for what SGLang 0.5 has as classes of its `custom_logit_processor`.

Their cost for a token does not grow with the output.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Meta

from treeline_runtime.sampling.processor import Factory
from treeline_runtime.transfer import upload

NOT: Final = float("-inf")

Id = Annotated[int, Meta(ge=0)]
T = TypeVar("T")


class DisallowedTokens:
    """These token ids are never sampled: SGLang's DisallowedTokensLogitsProcessor."""

    class Params(msgspec.Struct, forbid_unknown_fields=True):
        token_ids: list[Id]

    def __init__(self, params: dict[str, Any], vocab_size: int) -> None:
        self._ids = sorted(set(_read(params, self.Params).token_ids))
        _check(self._ids, vocab_size)
        self._there: torch.Tensor | None = None

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> None:
        if self._there is None:
            self._there = upload(np.array(self._ids, dtype=np.int64), logits.device)
        logits.index_fill_(0, self._there, NOT)


class ThinkingBudget:
    """After `thinking_budget` tokens of thinking comes its end: SGLang's ThinkingBudgetLogitProcessor, given the ids.

    Thinking begins after `start_token_id`, or, where that is not given because the prompt has it, with the output; it
    ends with `end_token_id`, and does not begin again.
    """

    class Params(msgspec.Struct, forbid_unknown_fields=True):
        thinking_budget: Id
        end_token_id: Id
        start_token_id: Id | None = None

    def __init__(self, params: dict[str, Any], vocab_size: int) -> None:
        read = _read(params, self.Params)
        self._left, self._end, self._start = read.thinking_budget, read.end_token_id, read.start_token_id
        _check([self._end], vocab_size)
        self._thinks = self._start is None
        self._done = False
        self._seen = 0

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> None:
        for token in output_ids[self._seen :]:
            if self._thinks:
                self._done |= token == self._end
                self._left -= 1
            else:
                self._thinks = token == self._start
        self._seen = len(output_ids)
        if self._thinks and self._left <= 0 and not self._done:
            logits.fill_(NOT)
            logits[self._end] = 0.0


BUILT_IN: Final[Mapping[str, Factory]] = {
    "disallowed_tokens": DisallowedTokens,
    "thinking_budget": ThinkingBudget,
}


def _read(params: dict[str, Any], type: type[T]) -> T:
    try:
        return msgspec.convert(params, type)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _check(ids: Collection[int], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        raise ValueError(f"token id {max(ids)} is not below {vocab_size}, the vocabulary's size")
