"""Logit processors for what SGLang 0.5 has as classes of its `custom_logit_processor`, and vLLM 0.32 for DeepSeek-OCR.

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
Size = Annotated[int, Meta(ge=1)]
Ngram = Annotated[int, Meta(ge=1, le=64)]
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


class NoRepeatNgram:
    """No run of `ngram_size` tokens comes twice within the last `window_size` tokens of the output, but for what ends
    in one of `whitelist_token_ids`: SGLang's and vLLM's for DeepSeek-OCR. Prompts are not looked at, as by vLLM's."""

    class Params(msgspec.Struct, forbid_unknown_fields=True):
        ngram_size: Ngram
        window_size: Size = 1 << 62
        whitelist_token_ids: list[Id] = []

    def __init__(self, params: dict[str, Any], vocab_size: int) -> None:
        read = _read(params, self.Params)
        self._prefix_len, self._window = read.ngram_size - 1, read.window_size
        self._whitelist = frozenset(read.whitelist_token_ids)
        _check(self._whitelist, vocab_size)
        self._seen = 0
        self._starts: dict[tuple[int, ...], dict[int, int]] = {}
        """All but the last token of a run → its last one → where such a run began last."""

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> None:
        for last in range(max(self._seen, self._prefix_len), len(output_ids)):
            start = last - self._prefix_len
            self._starts.setdefault(tuple(output_ids[start:last]), {})[output_ids[last]] = start
        self._seen = len(output_ids)
        prefix = tuple(output_ids[len(output_ids) - self._prefix_len :]) if self._prefix_len else ()
        oldest = len(output_ids) - self._window
        found = self._starts.get(prefix, {})
        if banned := [token for token, start in found.items() if start >= oldest and token not in self._whitelist]:
            logits.index_fill_(0, upload(np.array(banned), logits.device), NOT)


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
    "no_repeat_ngram": NoRepeatNgram,
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
