"""Limits per request and for all requests together: bytes, tokens, seconds."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from treeline_runtime.server.errors import ApiError, invalid, wrong

MAX_BODY_BYTES = 32 << 20
MAX_CONTROL_BYTES = 64 << 10
"""Bodies of endpoints without a prompt."""
INLINE_BYTES = 8 << 10
"""Smaller bodies are read in the event loop, in at most about 5 ms; larger ones in another process (`reader_pool`)."""
INLINE_TEXTS_BYTES = 2 << 10
"""The same for bodies with lists of texts, each costing some 30 µs however short."""
INLINE_PAIRS_BYTES = 1 << 10
"""The same for texts paired with a query, which may be rendered each time: some 45 µs."""
MAX_ANSWER_BYTES = 32 << 20
"""The largest answer of `/detokenize`."""
MAX_PROMPT_TOKENS = 1 << 19
"""Prompt tokens of an HTTP request, all prompts together; a model's context may be longer."""
MAX_GENERATIONS = 1024
"""Generations of an HTTP request (prompts x n), and lists to detokenize."""
MAX_INPUTS = 2048
"""Texts of a vector request: OpenAI's limit."""
MAX_COPIED_BYTES = 16 << 20
"""The most bytes that a request's generations carry besides prompts."""
GENERATION_BYTES = 4 << 10
"""Bytes that every generation takes in all processes, besides its message."""
BYTES_PER_TOKEN = 16
"""Bytes counted per prompt token in flight: list entries here and in the scheduler."""


class TooMuchInFlight(Exception):
    """No room for more bytes now."""


class ByteBudget:
    """Bytes that all requests in flight may hold: bodies being read and prompts being answered.

    The first `INLINE_BYTES` of a body are free, so ordinary requests pass while large ones wait. A client may hold at
    most as much as stays free (dynamic thresholds with a factor of one: Choudhury and Hahne, 1998). Requests without a
    client (None) may hold everything.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._held: Counter[str] = Counter()

    def most(self, client: str | None) -> int:
        """Bytes that a client may hold while no other client holds any."""
        return self.limit if client is None else self.limit // 2

    def reserve(self, size: int, client: str | None) -> None:
        """Raises TooMuchInFlight; then nothing has been reserved."""
        free = self.limit - self.used - size
        if free < (0 if client is None else self._held[client] + size):
            raise TooMuchInFlight
        self.used += size
        if client is not None:
            self._held[client] += size

    def release(self, size: int, client: str | None) -> None:
        self.used -= size
        if client is not None:
            self._held[client] -= size
            if not self._held[client]:
                del self._held[client]


class Reservation:
    """A request's share of a budget: grows with its body, released once."""

    def __init__(self, budget: ByteBudget, client: str | None, free: int = INLINE_BYTES) -> None:
        self._budget = budget
        self._client = client
        self._free = free
        self._held = 0

    def grow(self, size: int) -> None:
        """Raises TooMuchInFlight, or ApiError as `check`; its size is then unchanged."""
        self.check(size)
        free = min(size, self._free)
        self._budget.reserve(size - free, self._client)
        self._free -= free
        self._held += size - free

    def check(self, size: int) -> None:
        """Raises ApiError 413 if so much more would not fit even alone."""
        needed, limit = self._held + size - self._free, self._budget.most(self._client)
        if needed > limit:
            raise ApiError(
                413,
                f"The request takes {needed} bytes of memory, more than the {limit} that all requests together may "
                "take here (--max-bytes-in-flight: a client has half of it)",
                code="request_too_large",
            )

    def release(self) -> None:
        """Idempotent."""
        self._budget.release(self._held, self._client)
        self._held = 0


@dataclass(frozen=True)
class Limits:
    """Token limits that decide whether a prompt fits."""

    context_length: int
    """Prompt + output."""
    max_request_tokens: int
    """The most tokens of one request that the KV pool can hold; at most `context_length`."""
    dp_size: int = 1

    def max_new_tokens(self, prompt_len: int, asked: int | None, default: int | None, param: str) -> int:
        """Output tokens for a prompt: the requested number, `default`, or the rest of the context (None).

        Raises ApiError 400 for an empty prompt, and `context_length_exceeded` if it cannot fit.
        """
        if prompt_len == 0:
            raise wrong(param, "The prompt is empty")
        room = self.max_request_tokens - prompt_len
        if room < (0 if asked == 0 else 1):
            raise self.too_long(f"your prompt has {prompt_len} tokens. Please shorten it.", param)
        if asked is not None and asked > room:
            raise self.too_long(
                f"you requested {prompt_len + asked} tokens ({prompt_len} in the prompt, {asked} for the output).",
                param,
            )
        if asked is not None:
            return asked
        return room if default is None else min(default, room)

    def rank(self, value: Any, name: str) -> int:
        """The data-parallel rank that a field of the request names. Raises ApiError 400."""
        if type(value) is int and 0 <= value < self.dp_size:
            return value
        there = "there is one rank, 0" if self.dp_size == 1 else f"expected a rank from 0 to {self.dp_size - 1}"
        raise invalid(name, f"{there} (--dp-size)")

    def rank_in(self, text: str, name: str) -> int:
        return self.rank(int(text) if re.fullmatch("[0-9]{1,4}", text) else text, name)

    def too_long(self, what: str, param: str) -> ApiError:
        longest = self.max_request_tokens
        return wrong(
            param,
            f"This model's maximum context length is {longest} tokens. However, {what}",
            code="context_length_exceeded",
        )
