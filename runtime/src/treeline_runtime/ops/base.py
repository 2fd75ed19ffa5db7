"""The interface of operations that read and write a step's activations once.

Tensors are flat over the step: (tokens, …).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from treeline_runtime.context import Context
from treeline_runtime.models.model_config import ClampedGate

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of stacked queries, keys and values."""

    query: int
    kv: int
    dim: int
    norm: torch.Tensor | None
    """(query + kv, dim): weights of an RMS norm over each query and key; None: no norm."""
    eps: float
    norm_over_heads: bool = False
    """The norm is over all queries of a token, and over all its keys."""
    rope: int = 0
    """Index of the context's table that rotates them."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Stacked weights of a layer's experts."""

    gate_up: torch.Tensor
    """(experts, 2 x inner, hidden): rows of gate, then up."""
    down: torch.Tensor
    """(experts, hidden, inner)"""
    biases: tuple[torch.Tensor, torch.Tensor] | None = None
    """(experts, 2 x inner) and (experts, hidden)"""
    clamped: ClampedGate | None = None
    local: torch.Tensor | None = None
    """(experts of the model,) int32: the place of each in these stacks; their length: elsewhere. None: all are here."""


MEETINGS = 512
"""The most programs of a kernel that meet those of other GPUs: enough that their reads fill the link."""


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """Memory of each GPU of a group that all of them read and write."""

    rank: int
    bases: torch.Tensor
    """(ranks,) int64: where each rank's memory begins, in this GPU's addresses."""
    flags: int
    """Where in it are MEETINGS x ranks numbers of type int32, at first 0."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables from which a step reads its input."""

    tokens: torch.Tensor
    """(rows, positions) int64: `TableManager.token_pool`."""
    pages: torch.Tensor
    """(rows, pages) int64"""
    page_size: int
    cos: torch.Tensor
    """(ropes, positions, rotated elements of a head)"""
    sin: torch.Tensor
    deltas: torch.Tensor | None = None
    """(rows,) int64: a row's angles are those of its positions plus so many, at least 0. None: of all rows 0."""


class Found(NamedTuple):
    """The content of a step's table cells."""

    ids: torch.Tensor
    """(tokens,) int64"""
    slots: torch.Tensor
    """(tokens,) int64: where a token's keys and values are stored."""
    cos: torch.Tensor
    """(ropes, tokens, 1, rotated elements of a head)"""
    sin: torch.Tensor
    unfinite: torch.Tensor
    """(tokens,) int32, zeros."""


class Ops(Protocol):
    """May overwrite inputs where stated; otherwise results are new tensors.

    Norm weights have the type of their input, or float32, in which the norm is then computed.
    """

    def look_up(self, rows: torch.Tensor, positions: torch.Tensor, tables: Tables) -> Found:
        """rows, positions (tokens,) int32: the cells of the step's tokens."""

    def put(self, ids: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """tokens[rows, positions] = ids; rows, positions and ids (tokens,), the first two int32."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        """x (tokens, inputs), weight (outputs, inputs), bias (outputs,) → (tokens, outputs)."""

    def linear_into(
        self, room: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`linear`, in `room`."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm of x (tokens, hidden), times weight (hidden,)."""

    def add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        after: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of the sum (without a weight the sum itself), and the sum, which may be stored in
        `residual`.

        after: the weight of a norm of x before it is added."""

    def gate(self, gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
        """(tokens, 2 x inner) → (tokens, inner): silu of the first half (or gelu by tanh) times the second."""

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap x tanh(x / cap), in place; x is contiguous."""

    def route(self, logits: torch.Tensor, top_k: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """logits (tokens, experts) → scores (tokens, top_k) float32 and ids (tokens, top_k) of each token's experts.

        Scores are the largest of the softmax, divided by their sum if `normalise`. With logits that are not finite they
        are NaN; ids are always different experts.
        """

    def experts(self, x: torch.Tensor, experts: Experts, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x (tokens, hidden), scores and ids of `route` → (tokens, hidden).

        The sum over a token's experts, those that are here, of score x feed-forward; that is two products with `gate`
        or `ClampedGate` between.
        """

    def rotate_and_store(
        self, qkv: torch.Tensor, heads: Heads, layer: int, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv (tokens, (query + 2 kv) x dim) → q (tokens, query, dim), k, v (tokens, kv, dim).

        Norm and rotation of queries and keys; stores keys and values in the step's slots. May overwrite qkv.
        """

    def stored_finite(self, context: Context) -> torch.Tensor:
        """(tokens,) bool: whether a token's keys and values are finite, in every stored layer."""

    def choose(
        self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits (rows, vocabulary) → token ids (rows,) int64, and (rows,) bool: whether a row's logits are finite.

        temperatures (rows,) float32, 0 = greedy; keys (rows, 2) int32 of `sampling.noise.row_keys`.
        """

    def forbid(self, logits: torch.Tensor, masks: torch.Tensor) -> None:
        """Sets forbidden logits (rows, vocabulary; contiguous) to -inf, NaN too.

        masks (rows, words) int32: token i is allowed if bit i % 32 of word i // 32 is set.
        """
