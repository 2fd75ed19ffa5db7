"""Constraints that a test can predict, and a scheduler that adds them to requests and checks the tokens they get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from treeline_runtime.core import Req
from treeline_runtime.messages import FinishReason, GenerateReq

from support.runtime_engine import VOCAB, Harness

Rule = Callable[[list[int]], Collection[int]]
"""Output so far → tokens that may follow."""


def anything(_: list[int]) -> Collection[int]:
    return range(VOCAB)


def alternating(output: list[int]) -> Collection[int]:
    """Allow even and odd tokens in turn."""
    return range(len(output) % 2, VOCAB, 2)


def follows(output: list[int]) -> Collection[int]:
    """Allow tokens by the last one alone, so that a token too late or too early breaks the rule."""
    last = output[-1] if output else 0
    return {(last * 5 + k) % VOCAB for k in (1, 7, 32, 33, 64)}


def only(*tokens: int) -> Rule:
    """Allow these tokens, one after another."""
    return lambda output: tokens[len(output) : len(output) + 1]


class ToyFiller:
    def fill(self, toys: Sequence[Any], masks: torch.Tensor, rows: Sequence[int]) -> None:
        for toy, row in zip(toys, rows, strict=True):
            toy.fill(masks[row].numpy())


class Toy:
    """A constraint by a rule; it is finished where the rule allows nothing."""

    def __init__(self, rule: Rule, *, fails: str = "", after: int = 0, ends: bool = True) -> None:
        """fails: the method that raises once the output has `after` tokens. ends: whether it reports that it is
        finished."""
        self.filler = ToyFiller()
        self.allows_guesses = True
        self._rule = rule
        self._fails = fails
        self._after = after
        self._ends = ends
        self.output: list[int] = []
        self.filled: list[int] = []
        """The length of the output at each call of `fill`."""

    def accept(self, token: int) -> None:
        self._may_fail("accept")
        if token not in self._rule(self.output):
            raise ValueError(f"token {token} may not follow {self.output}")
        self.output.append(token)

    def forced(self) -> str:
        return ""

    @property
    def reversible(self) -> int:
        return 0

    def rollback(self, count: int) -> None:
        assert count <= len(self.output)
        del self.output[len(self.output) - count :]

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        self._may_fail("fill")
        self.filled.append(len(self.output))
        words = row.view(np.uint32)
        for token in self._rule(self.output):
            words[token // 32] |= np.uint32(1 << token % 32)

    @property
    def finished(self) -> bool:
        return self._ends and not self._rule(self.output)

    def _may_fail(self, name: str) -> None:
        if name == self._fails and len(self.output) >= self._after:
            raise RuntimeError(f"{name} fails as told")


class Constrained(Harness):
    """Adds the constraints in `toys` to requests, by their rid."""

    def __init__(self, model: Path, *, overlap_depth: int = 0, **settings: Any) -> None:
        """overlap_depth: may be larger than a server's."""
        super().__init__(model, overlap_depth=min(overlap_depth, 1), **settings)
        self.limits = dataclasses.replace(self.limits, overlap_depth=overlap_depth)
        self.toys: dict[str, Toy] = {}
        self._watched: dict[str, Toy] = {}
        new_req = self._arrivals.new_req

        def constrained(message: GenerateReq) -> Req | FinishReason:
            req = new_req(message)
            if isinstance(req, FinishReason):
                return req
            req.constraint = self.toys.get(req.rid)
            return req

        self._arrivals.new_req = constrained  # type: ignore[method-assign]

    def ask(self, rid: str, ids: list[int], toy: Toy | None = None, **options: Any) -> None:
        if toy is not None:
            self.toys[rid] = self._watched[rid] = toy
        self.submit(rid, ids, **options)

    def step(self) -> bool:
        worked = super().step()
        for rid, toy in list(self._watched.items()):
            taken = self.tokens(rid) if rid in self.outs else []
            assert toy.output == taken, f"{rid} was given tokens that it did not take"
            if rid in self.outs and self.last(rid).finish is not None and self.is_idle:
                del self._watched[rid]
        return worked

    def fault(self, rid: str) -> str:
        finish = self.finish(rid)
        assert (finish.type, finish.status) == ("error", 500), finish
        assert finish.message is not None
        return finish.message


def obeys(tokens: Sequence[int], rule: Rule) -> bool:
    return all(token in rule(list(tokens[:i])) for i, token in enumerate(tokens))
