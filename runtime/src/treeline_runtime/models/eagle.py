"""EAGLE-3 heads: one layer that guesses what the model says next.

Its input at a position is the token there, and the *features* of the position before: what entered three layers of the
model, joined. A guess is computed with the token guessed before it and, instead of features, what the layer itself made
of that one. Attention sees all positions but the first, which has no features before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from treeline_runtime.context import Context
from treeline_runtime.models.config import ModelError
from treeline_runtime.models.decoder import Decoder, FeedForward, Linear
from treeline_runtime.models.eagle_config import EagleConfig
from treeline_runtime.models.quantization.product import Packed, Plain, float_product
from treeline_runtime.models.rope import rope_tables
from treeline_runtime.models.weights import EMBEDDING, HEAD, Weights
from treeline_runtime.ops import Heads

_MASK = "mask_hidden"
_OLD_NORMS = ("low", "mid", "high")


class EagleHead:
    """Computes one layer, on rank 0. Results of `keep` and `guess` are in the pool of the context's attention."""

    joins = True

    def __init__(
        self, config: EagleConfig, weights: Weights, model: Decoder, whole: Callable[[str], torch.Tensor]
    ) -> None:
        """model, whole: have the embedding and the language-model head for one that has none of its own. Raises
        ModelError."""
        ops = self._ops = model.ops
        self.config = config
        layer = self.layer = config.layer
        hidden, heads, kv_heads, dim = layer.hidden_size, layer.num_heads, layer.num_kv_heads, layer.head_dim
        if weights.has(_MASK):
            raise ModelError(f"it has a tensor {_MASK}: heads that guess in parallel are not supported")
        weights.ignore("t2d")
        prefix = "midlayer." if weights.has("midlayer.hidden_norm.weight") else "layers.0."

        def norm(name: str, size: int = hidden) -> torch.Tensor:
            return weights.take(f"{name}.weight", size)

        of_each, count = config.target_hidden_size, len(config.features)
        self._input_norm = norm("input_norm", count * of_each) if config.norm_before_fc else None
        self._fc_norms: list[torch.Tensor] = []
        if config.fc_norm:
            old = weights.has("aux_norm_low.weight")
            names = [f"aux_norm_{_OLD_NORMS[i]}" if old else f"fc_norm.{i}" for i in range(count)]
            self._fc_norms = [norm(name, of_each) for name in names]
        self._fc = Linear(weights, ops, "", {"fc": (hidden,)}, count * of_each, bias=False)
        self._token_norm, self._hidden_norm = norm(f"{prefix}input_layernorm"), norm(f"{prefix}hidden_norm")
        self._mlp_norm, self._norm = norm(f"{prefix}post_attention_layernorm"), norm("norm")
        attention, bias = f"{prefix}self_attn.", layer.qkv_bias
        sizes = {"q_proj": (heads * dim,), "k_proj": (kv_heads * dim,), "v_proj": (kv_heads * dim,)}
        self._qkv = Linear(weights, ops, attention, sizes, 2 * hidden, bias=bias)
        self._o = Linear(weights, ops, attention, {"o_proj": (hidden,)}, heads * dim, bias=layer.o_bias)
        self._mlp = FeedForward(weights, ops, f"{prefix}mlp.", hidden, layer.intermediate_size, bias=layer.mlp_bias)
        self._heads = Heads(heads, kv_heads, dim, None, layer.rms_norm_eps)
        own = "embed_tokens.weight"
        for name in (own, HEAD):
            if hidden != of_each and not weights.has(name):
                raise ModelError(f"it has hidden states of {hidden}, and lacks {name}: the model's is of {of_each}")
        if weights.has(own):
            self._embedding = weights.take(own, layer.vocab_size, hidden)
        else:
            shared = model.embedding if model.ranks is None else whole(EMBEDDING)
            assert shared is not None
            self._embedding = shared
        self._targets = _targets(config, weights)
        self._of_model = model.logits
        self._head: Plain | Packed | None = None  # no function that holds it, so that its weights sleep, too
        if weights.has(HEAD) or model.ranks is not None:
            size = config.draft_vocab_size or layer.vocab_size
            self._head = float_product(ops, weights.take(HEAD, size, hidden) if weights.has(HEAD) else whole(HEAD))
        length = model.rope[0].shape[1]
        cos, sin = rope_tables(layer.rope, dim, layer.max_position, length, weights.dtype, weights.device)
        self.rope = cos[None], sin[None]
        """As `Decoder.rope`."""

    def join(self, entering: Sequence[torch.Tensor]) -> torch.Tensor:
        """What entered the layers of `EagleConfig.features`, each (tokens, the model's hidden) → features (tokens,
        hidden)."""
        eps = self.config.layer.rms_norm_eps
        if self._fc_norms:
            entering = [self._ops.norm(x, weight, eps) for x, weight in zip(entering, self._fc_norms, strict=True)]
        x = torch.cat(list(entering), -1)
        return self._fc(x if self._input_norm is None else self._ops.norm(x, self._input_norm, eps))

    def keep(self, ids: torch.Tensor, hidden: torch.Tensor, context: Context) -> None:
        """Stores keys and values of tokens (tokens,) after the features before each of them (tokens, hidden)."""
        self._attend(ids, hidden, context)

    def guess(self, ids: torch.Tensor, hidden: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """ids (rows,), hidden (rows, hidden), which it may overwrite: features, or the second result for the token
        before → the likeliest next tokens (rows,), and what to give with them."""
        ops, eps = self._ops, self.config.layer.rms_norm_eps
        (q, k, v), normed = self._attend(ids, hidden, context)
        x = self._o(context.attention.forward(0, q, k, v, context.plan))
        x, residual = ops.add_norm(x, normed if self.config.norm_before_residual else hidden, self._mlp_norm, eps)
        x, residual = ops.add_norm(self._mlp(x, context), residual, self._norm, eps)
        chosen = (self._of_model(x) if self._head is None else self._head(x, None)).argmax(-1)
        if self._targets is not None:
            chosen = self._targets[chosen]
        return chosen, x if self.config.norm_output else residual

    def _attend(
        self, ids: torch.Tensor, hidden: torch.Tensor, context: Context
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """→ rotated queries, keys and values, of which the latter are stored; the normed hidden states."""
        ops, eps = self._ops, self.config.layer.rms_norm_eps
        token = ops.norm(F.embedding(ids, self._embedding), self._token_norm, eps)
        normed = ops.norm(hidden, self._hidden_norm, eps)
        qkv = self._qkv(torch.cat((token, normed), -1))
        return ops.rotate_and_store(qkv, self._heads, 0, context), normed


def _targets(config: EagleConfig, weights: Weights) -> torch.Tensor | None:
    """The model's token for each that it can guess; the checkpoint has differences. None: they are the same."""
    if (config.draft_vocab_size or config.layer.vocab_size) != config.layer.vocab_size:
        for name, what in ("d2t", "says which tokens these are"), (HEAD, "computes them"):
            if not weights.has(name):
                raise ModelError(f"it has a vocabulary of its own, but no tensor {name} that {what}")
    if config.draft_vocab_size is None or not weights.has("d2t"):
        weights.ignore("d2t")
        return None
    count = config.draft_vocab_size
    targets = weights.take("d2t", count, dtype=torch.int64) + torch.arange(count, device=weights.device)
    if not 0 <= int(targets.min()) <= int(targets.max()) < config.layer.vocab_size:
        raise ModelError("its tensor d2t leads to tokens that the model does not have")
    return targets
