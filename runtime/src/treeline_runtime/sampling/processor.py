"""What code of others may do with logits: the interface of logit processors, one at work, and those that are built in,
which SGLang 0.5 has as classes of its `custom_logit_processor`; their cost for a token does not grow with the output.

The operator of the engine names them (`--logit-processor NAME=module:attribute`); code is never taken from requests.
What is named is a class, or any other `Factory`:

    class Below:
        def __init__(self, params, vocab_size):
            self.end = params.get("end")
            if not isinstance(self.end, int) or not 0 < self.end <= vocab_size:
                raise ValueError("end is the first token id that may not be, a whole number")

        def __call__(self, output_ids, logits):
            logits[self.end :] = float("-inf")

It runs in the engine's own process and its own loop: while it computes, everybody waits. Half a millisecond for each of
64 requests makes every step 32 ms longer. Logits are better not looked at on the CPU (`item`, `tolist`, an `if`): on a
GPU each look waits for it. An index beyond the vocabulary there ends the engine, and not the request alone, so ids that
come with requests are to be compared with `vocab_size` first.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Meta

from treeline_runtime.transfer import upload

logger = logging.getLogger(__name__)

MAX_ERROR_CHARS = 500


class LogitProcessor(Protocol):
    """One request's. May have state: it is called once for each output token, in order, also where the request is
    retracted in between, and never again once it has ended."""

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor, /) -> torch.Tensor | None:
        """output_ids: all sampled so far, not to be changed. logits: (vocabulary,) float32 of the next token on the
        model's device, to be changed in place, -inf where a token may not be. These are the model's own: constraints,
        penalties, biases and temperature come after. Returns nothing, or `logits`.

        What it raises ends the request, with status 500, and no other. So do NaN, +inf, and -inf everywhere.
        """


class Factory(Protocol):
    """Makes the processor of a request, when it arrives."""

    def __call__(self, params: dict[str, Any], vocab_size: int, /) -> LogitProcessor:
        """params: the request's `custom_params`, its own copy; {} where there are none. Raises ValueError where they
        are wrong: the request is refused with these words and status 400."""


class Processing:
    """A request's processor, and how far it has seen the output."""

    def __init__(self, name: str, processor: LogitProcessor) -> None:
        self.name = name
        self.seen = 0
        """Output tokens that it knows."""
        self._processor = processor
        self._output_ids: list[int] = []

    def apply(self, new_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor | str:
        """new_ids: of the output, after those `seen`. logits (vocabulary,), which stay. → what it makes of them,
        float32; or why it failed."""
        self._output_ids += new_ids
        self.seen += len(new_ids)
        mine = logits.to(torch.float32, copy=True)
        try:
            returned = self._processor(self._output_ids, mine)
            if returned is not None and returned is not mine:
                raise TypeError("it must change the logits in place, and return nothing else")
            if mine.shape != logits.shape or mine.dtype != torch.float32 or mine.device != logits.device:
                raise TypeError("it must leave the logits' shape, type and device")
        except (Exception, SystemExit) as error:
            logger.exception("logit processor %r failed", self.name)
            return told(f"logit processor {self.name!r} failed:", error)
        return mine


def told(what: str, error: BaseException) -> str:
    """What is said of an error in code of others: of bounded length, encodable, and whatever its own text does."""
    try:
        said = str(error) if isinstance(error, ValueError) else repr(error)
    except Exception:
        said = type(error).__name__
    return f"{what} {said}"[:MAX_ERROR_CHARS].encode(errors="replace").decode()


NOT: Final = float("-inf")

Id = Annotated[int, Meta(ge=0)]
T = TypeVar("T")


# ---- built in ---------------------------------------------------------------------------------------------


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
