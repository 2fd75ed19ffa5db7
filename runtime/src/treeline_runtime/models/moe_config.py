"""Mixtures of experts, in the words that config.json, models and operations share. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClampedGate:
    """gpt-oss's way between the products, where others have `gate`: (up + 1) x gate x sigmoid(alpha x gate).

    The gate is at most `limit`, up is between -limit and limit.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoeConfig:
    """Layers whose feed-forward is a choice of experts."""

    num_experts: int
    top_k: int
    """Experts that each token goes to."""
    intermediate_size: int
    """Of one expert."""
    normalise: bool
    """Whether the scores of a token's experts are divided by their sum."""
    shared_intermediate_size: int
    """Of the expert that every token goes to, behind a gate of its own; 0: there is none."""
    layers: frozenset[int]
    """Which layers have experts; the others are dense."""
    clamped: ClampedGate | None = None
    """None: silu of the gate, times up."""
