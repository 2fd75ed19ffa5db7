"""Logit processors as users write them, for engines and servers under test."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

logging.getLogger(__name__).warning("test processors imported")

CALLS: dict[str, list[list[int]]] = defaultdict(list)
"""The calls of `Follows`, by its `key`: the output before each token."""


class Follows:
    """Allow five tokens by the last one alone, so that a token too late or too early breaks the rule."""

    def __init__(self, params: dict[str, Any], vocab_size: int) -> None:
        self._key = params["key"]
        self._vocab_size = vocab_size
        self._last = 0

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> None:
        CALLS[self._key].append(list(output_ids))
        self._last = output_ids[-1] if output_ids else 0
        kept = torch.tensor(sorted(follow(self._last, self._vocab_size)))
        others = torch.ones_like(logits, dtype=torch.bool).index_fill_(0, kept.to(logits.device), False)
        logits.masked_fill_(others, float("-inf"))


def follow(last: int, vocab_size: int) -> set[int]:
    return {(last * 5 + k) % vocab_size for k in (1, 7, 32, 33, 64)}


class Favours:
    """Make one token far likelier than all others."""

    def __init__(self, params: dict[str, Any], vocab_size: int) -> None:
        self._token = params.get("token")
        if not isinstance(self._token, int) or not 0 <= self._token < vocab_size:
            raise ValueError(f"token is an id below {vocab_size}")

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        logits[self._token] = 1e4
        return logits


class Fails:
    """A processor that fails as `how` says once the output has `after` tokens."""

    def __init__(self, params: dict[str, Any], vocab_size: int) -> None:
        self._how, self._after = params["how"], params["after"]
        if self._how == "begins":
            raise ArithmeticError("as told")

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> Any:
        if len(output_ids) < self._after:
            return None
        match self._how:
            case "raises":
                logits[3] = 7.0
                raise RuntimeError("as told")
            case "exits":
                raise SystemExit(3)
            case "nan":
                logits[5] = torch.nan
            case "infinite":
                logits[5] = torch.inf
            case "nothing":
                logits.fill_(-torch.inf)
            case "another":
                return logits + 1
            case "grown":
                logits.resize_(2 * len(logits))
        return None
