"""Logit processors: their interface, a running one, and built-in ones, which SGLang 0.5 has as `custom_logit_processor`
classes. The built-in ones cost the same for any length of output.

The engine's operator names them (`--logit-processor NAME=module:attribute`); code never comes with requests. The name
is of a class or another `Factory`:

    class Below:
        def __init__(self, params, vocab_size):
            self.end = params.get("end")
            if not isinstance(self.end, int) or not 0 < self.end <= vocab_size:
                raise ValueError("end is the first token id that may not be, a whole number")

        def __call__(self, output_ids, logits):
            logits[self.end :] = float("-inf")

It runs in the engine's loop: while it computes, all requests wait. Half a millisecond for each of 64 requests makes
every step 32 ms longer. Avoid reading logits on the CPU (`item`, `tolist`, `if`), which waits for the GPU. An index
beyond the vocabulary ends the whole engine there, so compare ids from requests with `vocab_size`.
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
    """A request's processor. It may have state: it is called once per output token, in order, also across retractions,
    and never after the request's end."""

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor, /) -> torch.Tensor | None:
        """output_ids: all sampled so far, read-only. logits: (vocabulary,) float32 of the next token on the model's
        device, to be changed in place; -inf forbids a token. They are the model's own: constraints, penalties, biases
        and temperature come after. Returns nothing, or `logits`.

        An exception ends this request with status 500. So do NaN, +inf, and -inf everywhere.
        """


class Factory(Protocol):
    """Makes a request's processor when it arrives."""

    def __call__(self, params: dict[str, Any], vocab_size: int, /) -> LogitProcessor:
        """params: a copy of the request's `custom_params`; {} if there are none. Raises ValueError to refuse the
        request with these words and status 400."""


class Processing:
    """A request's processor, and how much output it has seen."""

    def __init__(self, name: str, processor: LogitProcessor) -> None:
        self.name = name
        self.seen = 0
        """Output tokens that it knows."""
        self._processor = processor
        self._output_ids: list[int] = []

    def apply(self, new_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor | str:
        """new_ids: output after those `seen`. Leaves logits (vocabulary,). Returns float32 ones, or why it failed."""
        self._output_ids += new_ids
        self.seen += len(new_ids)
        mine = logits.to(torch.float32, copy=True)
        try:
            returned = self._processor(self._output_ids, mine)
            if returned is not None and returned is not mine:
                raise TypeError("it must change the logits in place, and return nothing else")
            if mine.shape != logits.shape or mine.dtype != torch.float32 or mine.device != logits.device:
                raise TypeError("it must keep the logits' shape, type and device")
        except (Exception, SystemExit) as error:
            logger.exception("logit processor %r failed", self.name)
            return told(f"logit processor {self.name!r} failed:", error)
        return mine


def told(what: str, error: BaseException) -> str:
    """An error of foreign code as text: bounded, encodable, even if its own text fails."""
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
    """Never samples these token ids: SGLang's DisallowedTokensLogitsProcessor."""

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
    """Ends thinking after `thinking_budget` tokens: SGLang's ThinkingBudgetLogitProcessor, given the ids.

    Thinking begins after `start_token_id`, or with the output if the prompt has it; it ends with `end_token_id` and
    does not begin again.
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
