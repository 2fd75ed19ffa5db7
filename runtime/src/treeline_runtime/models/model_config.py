"""The configuration of a decoder and of attention scores, shared by models and attention backends. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from treeline_runtime.models.quantization.scheme import Scheme
from treeline_runtime.models.rope_config import RopeConfig


@dataclass(frozen=True)
class Scoring:
    """A score is q·k x scale; with a cap c it is c x tanh(score / c); then hidden keys are removed."""

    scale: float | None = None
    """None: head_dim ** -0.5."""
    softcap: float | None = None
    windows: tuple[int | None, ...] = ()
    """Each layer's window in tokens, including the token itself; None: all earlier tokens. (): no windows."""
    sinks: bool = False
    """Whether each query head has a sink: the score of a key that every token sees, with value zero. The scores are
    weights, passed to `AttentionBackend.forward`."""

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def oldest(self, length: int, window: int | None) -> int:
        """The first token that the last of so many tokens sees, with that window."""
        return 0 if window is None else max(length - window, 0)

    def within(self, length: int) -> Scoring:
        """The same for sequences up to this length; a window that hides nothing becomes none."""
        windows = tuple(None if window is None or window >= length else window for window in self.windows)
        return replace(self, windows=windows if any(windows) else ())

    @property
    def kinds(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(self.windows)) or (None,)


PLAIN = Scoring()
"""Scaled by head size, without windows."""


@dataclass(frozen=True)
class Norms:
    """Names of a layer's RMS norms: of the inputs of attention and feed-forward, and of their results."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


PRE_NORMS = Norms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
"""The norms of Llama; the second is named for its place."""


@dataclass(frozen=True)
class ClampedGate:
    """gpt-oss's gate: (up + 1) x gate x sigmoid(alpha x gate).

    The gate is at most `limit`, up is between -limit and limit.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoeConfig:
    """Layers whose feed-forward is a mixture of experts."""

    num_experts: int
    top_k: int
    """Experts per token."""
    intermediate_size: int
    layers: frozenset[int]
    """Layers with experts; the others are dense."""
    normalise: bool = True
    """Whether the scores of a token's experts are divided by their sum."""
    shared_intermediate_size: int = 0
    """The size of the expert that every token uses, behind a gate; 0: no such expert."""
    clamped: ClampedGate | None = None
    """None: silu of gate, times up."""


@dataclass(frozen=True)
class VisionConfig:
    """An encoder of images and videos: a transformer over patches, of which neighbours become one token."""

    depth: int
    hidden_size: int
    intermediate_size: int
    heads: int
    channels: int
    patch: int
    """A side in pixels."""
    frames: int
    """Pictures of a video that one patch covers."""
    merge: int
    """A token is of merge x merge patches."""
    out_size: int
    """The decoder's hidden size."""
    rope_theta: float
    gated: bool
    """RMS norms and gated feed-forwards; else LayerNorms and plain ones, and a bias of patches."""
    window: int | None = None
    """Tokens of a window's side, in layers that are not `full`; None: all see the whole frame."""
    full: frozenset[int] = frozenset()
    learned_side: int = 0
    """The side of the square grid of learned positions, which is stretched over a frame; 0: none are learned."""
    deepstack: tuple[int, ...] = ()
    """Layers whose outputs are added behind the decoder's first ones."""

    @property
    def patch_size(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.frames * self.patch * self.patch


@dataclass(frozen=True)
class TowerConfig:
    """An encoder of pictures of one size: SigLIP or InternViT."""

    depth: int
    hidden_size: int
    intermediate_size: int
    heads: int
    channels: int
    side: int
    """Of a picture, in pixels."""
    patch: int
    merge: int
    """A token is of merge x merge patches."""
    out_size: int
    """The decoder's hidden size."""
    eps: float
    means: bool
    """SigLIP, tokens are means of patches; else InternViT, tokens are patches one behind the other."""
    qkv_bias: bool = True
    qk_norm: bool = False
    rms: bool = False
    """RMS norms; else LayerNorms."""

    @property
    def patches_of_side(self) -> int:
        return self.side // self.patch

    @property
    def count(self) -> int:
        """Tokens of a picture."""
        return (self.patches_of_side // self.merge) ** 2


@dataclass(frozen=True)
class AudioConfig:
    """An encoder of sound: convolutions over a spectrogram, then a transformer."""

    depth: int
    hidden_size: int
    intermediate_size: int
    heads: int
    bins: int
    """Frequencies of the spectrogram."""
    channels: int
    """Of the convolutions."""
    chunk: int
    """Frames that are convolved together."""
    window: int
    """Frames that see each other; whole chunks."""
    out_size: int
    """The decoder's hidden size."""


@dataclass(frozen=True)
class MRopeConfig:
    """Rotation by three positions, of frame, row and column. Text has three equal ones."""

    axes: tuple[int, ...]
    """For each frequency the position that it turns with: 0, 1 or 2."""
    merge: int
    """A token is of merge x merge patches."""
    frame_step: int = 1
    """Positions from a video's frame to the next."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder. Sizes in elements; defaults are Llama's."""

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
    """The checkpoint has qkv_proj and gate_up_proj instead of q_proj, k_proj, v_proj, gate_proj and up_proj."""
    qk_norm: bool = False
    """Queries and keys have RMS norms: per head, or over all heads of a token."""
    qk_norm_over_heads: bool = False
    norms: Norms = PRE_NORMS
    norm_adds_one: bool = False
    """Norms multiply by 1 + weight."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    scoring: Scoring = PLAIN
    local_rope: RopeConfig | None = None
    """The rotation in layers with a window; None: the same as in the others."""
    moe: MoeConfig | None = None
    """None: all layers are dense."""
    vision: VisionConfig | TowerConfig | None = None
    """None: it reads no images."""
    both_ways: bool = False
    """The tokens of an image see each other in both directions."""
    audio: AudioConfig | None = None
    """None: it reads no sound."""
    mrope: MRopeConfig | None = None
    placeholders: Mapping[str, int] = field(default_factory=dict)
    """By kind of item: the id that stands for one of its tokens."""

    @property
    def longest_context(self) -> int:
        """Positions that the rope scaling supports."""
        if self.rope.type in ("linear", "dynamic"):
            return max(self.max_position, int(self.max_position * self.rope.factor))
        if self.rope.type == "yarn":
            return max(self.max_position, int(self.rope.original_max_position * self.rope.factor))
        return self.max_position
