"""A decoder, and how its scores are made, in the words that models and attention backends share. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from treeline_runtime.models.quantization.scheme import Scheme
from treeline_runtime.models.rope_config import RopeConfig


@dataclass(frozen=True)
class Scoring:
    """A score is q·k x scale; with a cap c it is c x tanh(score / c); then who is not seen is left out."""

    scale: float | None = None
    """None: head_dim ** -0.5."""
    softcap: float | None = None
    windows: tuple[int | None, ...] = ()
    """Of each layer, how many tokens one sees, itself the last of them; None: all before it. (): no layer has one."""
    sinks: bool = False
    """Whether each query head has a sink: the score of a key that every token sees, whose value is zero. The scores
    are weights; `AttentionBackend.forward` is given them."""

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def oldest(self, length: int, window: int | None) -> int:
        """The first token that the last of so many sees, in a layer with that window."""
        return 0 if window is None else max(length - window, 0)

    def within(self, length: int) -> Scoring:
        """The same of sequences that are no longer: a window that hides none of their tokens is none."""
        windows = tuple(None if window is None or window >= length else window for window in self.windows)
        return replace(self, windows=windows if any(windows) else ())

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """The windows that occur, each once."""
        return tuple(dict.fromkeys(self.windows)) or (None,)


PLAIN = Scoring()
"""Scaled by the size of heads; everybody sees all before it."""


@dataclass(frozen=True)
class Norms:
    """Names of a layer's RMS norms: of what attention and feed-forward read, and of what they add to the residual."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


PRE_NORMS = Norms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
"""As Llama has them; the second is named for where it stands."""


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


@dataclass(frozen=True)
class ModelConfig:
    """A decoder. Sizes in elements. The defaults are Llama's."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    tie_word_embeddings: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    quantization: Scheme | None

    # how its family differs: `families/`
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    packed: bool = False
    """The checkpoint has qkv_proj and gate_up_proj in place of q_proj, k_proj, v_proj and gate_proj, up_proj."""
    qk_norm: bool = False
    """Queries and keys have RMS norms: of each head, or over all heads of a token."""
    qk_norm_over_heads: bool = False
    norms: Norms = PRE_NORMS
    norm_adds_one: bool = False
    """Norms multiply by 1 + weight."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    scoring: Scoring = PLAIN
    local_rope: RopeConfig | None = None
    """Of the layers that have a window; None: the same as of the others."""
    moe: MoeConfig | None = None
    """None: every layer's feed-forward is dense."""

    @property
    def longest_context(self) -> int:
        """Positions that the rope scaling makes usable."""
        if self.rope.type in ("linear", "dynamic"):
            return max(self.max_position, int(self.max_position * self.rope.factor))
        if self.rope.type == "yarn":
            return max(self.max_position, int(self.rope.original_max_position * self.rope.factor))
        return self.max_position
