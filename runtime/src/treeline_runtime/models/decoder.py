"""The decoder shared by all families; a `ModelConfig` describes the differences (`families/`).

A layer has two sublayers, attention and feed-forward. Each reads the residual stream, normed or not, and its result may
be normed before it is added.

Tensors are flat over the step: (tokens, …). Projections with the same input are one matrix.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from treeline_runtime.collectives import Ranks
from treeline_runtime.context import Context
from treeline_runtime.models.adapters import Site, site_of
from treeline_runtime.models.audio import AudioEncoder
from treeline_runtime.models.config import ModelConfig
from treeline_runtime.models.lora import AdapterStep
from treeline_runtime.models.media import MediaEncoder
from treeline_runtime.models.model_config import TowerConfig
from treeline_runtime.models.mrope import MRope
from treeline_runtime.models.pooler import Pooler
from treeline_runtime.models.quantization.product import Sizes, cut_of, float_product, kv_scales, new_product, stack
from treeline_runtime.models.rope import rope_tables
from treeline_runtime.models.shards import INPUTS, OUTPUTS, Cut, own
from treeline_runtime.models.tower import Tower
from treeline_runtime.models.vision import VisionEncoder
from treeline_runtime.models.weights import EMBEDDING, HEAD, Weights
from treeline_runtime.ops import Activation, Heads, Ops, ops_for

if TYPE_CHECKING:
    from treeline_runtime.models.draft_model import DraftModel
    from treeline_runtime.models.eagle import EagleHead

logger = logging.getLogger(__name__)


class Linear:
    """Stacked projections of one input, in any weight format. `names` → their output sizes, of all ranks.

    split: how ranks share it. With `OUTPUTS` (column-parallel) a rank gives its part of each projection's outputs, in
    which units such as heads stay whole; with `INPUTS` (row-parallel) it takes its part of the input, and all ranks'
    outputs must be added. None: each rank has all of it.
    """

    def __init__(
        self,
        weights: Weights,
        ops: Ops,
        prefix: str,
        names: Sizes,
        size: int,
        *,
        bias: bool,
        split: int | None = None,
        unit: int = 1,
    ) -> None:
        self._product = new_product(weights, ops, prefix, names, size, split, unit)
        self.site = site_of(prefix, names, size, [cut_of(weights, each, size, split, unit) for each in names.values()])
        self._bias: torch.Tensor | None = None
        if bias:
            parts = []
            for name, sizes in names.items():
                cut = cut_of(weights, sizes, size, split, unit) if split == OUTPUTS else None
                parts.append(weights.take(f"{prefix}{name}.bias", sum(sizes), cut=cut))
            if split != INPUTS or weights.rank.index == 0:  # to a sum it is added once
                self._bias = stack(parts)

    def __call__(
        self, x: torch.Tensor, adapters: AdapterStep | None = None, room: torch.Tensor | None = None
    ) -> torch.Tensor:
        """room: may be used for the result."""
        y = self._product(x, self._bias, room)
        if adapters is not None:
            adapters.add(self.site, x, y)
        return y


def norm_weight(config: ModelConfig, weights: Weights, name: str, size: int, cut: Cut | None = None) -> torch.Tensor:
    """The factor of normed values. 1 + weight stays float32, as in transformers: most weights are small, and 16 bits
    would round them to few values near 1."""
    weight = weights.take(f"{name}.weight", size, cut=cut)
    return weight.float() + 1 if config.norm_adds_one else weight


class Attention:
    """A layer's self-attention: projections, optional query/key norm, rope, backend, output projection. A rank has some
    query heads and their key/value heads."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, layer: int, ranks: Ranks | None) -> None:
        prefix = f"model.layers.{layer}.self_attn."
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        mine, rank = own(config, weights.rank), weights.rank
        sizes: Sizes = {"q_proj": (heads * dim,), "k_proj": (kv_heads * dim,), "v_proj": (kv_heads * dim,)}
        if config.packed:
            sizes = {"qkv_proj": (heads * dim, kv_heads * dim, kv_heads * dim)}
        hidden = config.hidden_size
        self._ops = ops
        self._layer = layer - rank.layers(config.num_layers).start
        """Its number within the stage, as in the KV pool."""
        self._qkv = Linear(weights, ops, prefix, sizes, hidden, bias=config.qkv_bias, split=OUTPUTS, unit=dim)
        self._o = Linear(weights, ops, prefix, {"o_proj": (hidden,)}, heads * dim, bias=config.o_bias, split=INPUTS)
        norm: torch.Tensor | None = None
        if config.qk_norm:
            parts = []
            for name, count, of_rank in (("q_norm", heads, mine.num_heads), ("k_norm", kv_heads, mine.num_kv_heads)):
                size, cut = dim, None
                if config.qk_norm_over_heads:
                    size, cut = count * dim, rank.cut(0, count * dim, unit=dim)
                weight = norm_weight(config, weights, prefix + name, size, cut)
                parts.append(weight.view(-1, dim).expand(of_rank, dim))
            norm = torch.cat(parts)
        self._norm_over_ranks: NormOverRanks | None = None
        if norm is not None and config.qk_norm_over_heads and ranks is not None and rank.count > 1:
            self._norm_over_ranks, norm = NormOverRanks(config, norm, ranks), None
        self._sinks: torch.Tensor | None = None
        if config.scoring.sinks:
            self._sinks = weights.take(f"{prefix}sinks", heads, cut=rank.cut(0, heads)).float()
        is_local = config.local_rope is not None and config.scoring.window(layer) is not None
        self._heads = Heads(
            mine.num_heads,
            mine.num_kv_heads,
            dim,
            norm,
            config.rms_norm_eps,
            config.qk_norm_over_heads,
            int(is_local),
        )

    @property
    def sites(self) -> list[Site]:
        return [self._qkv.site, self._o.site]

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        qkv = self._qkv(x, context.adapters)
        if self._norm_over_ranks is not None:
            self._norm_over_ranks(qkv)
        q, k, v = self._ops.rotate_and_store(qkv, self._heads, self._layer, context)
        heads = context.attention.forward(self._layer, q, k, v, context.plan, self._sinks)
        return self._o(heads, context.adapters, context.room)


class NormOverRanks:
    """The RMS norms over all queries and over all keys of a token, of which each rank has some heads."""

    def __init__(self, config: ModelConfig, weight: torch.Tensor, ranks: Ranks) -> None:
        """weight (own query + key/value heads, dim)"""
        mine, dim, count = own(config, ranks.rank), config.head_dim, ranks.rank.count
        self._sizes = [mine.num_heads * dim, mine.num_kv_heads * dim]
        self._weights = weight.flatten().split(self._sizes)
        # a head that several ranks have counts as often
        self._counts = (config.num_heads * dim, mine.num_kv_heads * count * dim)
        self._eps, self._sum = config.rms_norm_eps, ranks.sum

    def __call__(self, qkv: torch.Tensor) -> None:
        """qkv (tokens, (query + 2 kv) x dim): changes queries and keys."""
        parts = qkv[:, : sum(self._sizes)].split(self._sizes, dim=1)
        squares = torch.stack([part.float().square().sum(1) for part in parts])
        for part, weight, total, count in zip(parts, self._weights, self._sum(squares), self._counts, strict=True):
            part.copy_(part * (total / count + self._eps).rsqrt()[:, None] * weight)


class FeedForward:
    """Gated feed-forward: gate and up, activation of gate times up, down. A rank has a part of `inner`."""

    def __init__(
        self,
        weights: Weights,
        ops: Ops,
        prefix: str,
        hidden: int,
        inner: int,
        *,
        bias: bool,
        packed: bool = False,
        activation: Activation = "silu",
    ) -> None:
        sizes: Sizes = {"gate_up_proj": (inner, inner)} if packed else {"gate_proj": (inner,), "up_proj": (inner,)}
        self._ops, self._activation = ops, activation
        self._gate_up = Linear(weights, ops, prefix, sizes, hidden, bias=bias, split=OUTPUTS)
        self._down = Linear(weights, ops, prefix, {"down_proj": (hidden,)}, inner, bias=bias, split=INPUTS)

    @property
    def sites(self) -> list[Site]:
        return [self._gate_up.site, self._down.site]

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        inner = self._ops.gate(self._gate_up(x, context.adapters), self._activation)
        return self._down(inner, context.adapters, context.room)


class Computes(Protocol):
    """Attention or a feed-forward: (tokens, hidden) → what is added to it."""

    @property
    def sites(self) -> list[Site]:
        """Where adapters may add to it."""

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Sublayer:
    """Reads the residual stream and adds to it; with optional norms before and after."""

    before: torch.Tensor | None
    compute: Computes
    after: torch.Tensor | None


class Layer:
    """Attention and feed-forward. Each computes a summand: the sum over all ranks is the result."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, layer: int, ranks: Ranks | None) -> None:
        prefix = f"model.layers.{layer}."

        def norm(name: str | None) -> torch.Tensor | None:
            return norm_weight(config, weights, prefix + name, config.hidden_size) if name else None

        names = config.norms
        self._attention = Attention(config, weights, ops, layer, ranks)
        self._feed_forward = self.new_feed_forward(config, weights, ops, layer)
        self.sublayers = (
            Sublayer(norm(names.before_attention), self._attention, norm(names.after_attention)),
            Sublayer(norm(names.before_mlp), self._feed_forward, norm(names.after_mlp)),
        )

    @staticmethod
    def new_feed_forward(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> Computes:
        return FeedForward(
            weights,
            ops,
            f"model.layers.{layer}.mlp.",
            config.hidden_size,
            config.intermediate_size,
            bias=config.mlp_bias,
            packed=config.packed,
            activation=config.activation,
        )


class Decoder:
    """Embedding, layers, norm, head. `context_length` sizes the rope tables.

    Of several ranks, which make the same calls together, each has its part of layers and vocabulary. Inputs and hidden
    states are whole on each; logits are rank 0's. In a pipeline the first stage has the embedding, the last one norm
    and head, and each gives the next the residual stream: hidden states are the last stage's.
    """

    layer_type: type[Layer] = Layer
    pooler: Pooler | None = None
    """Makes vectors of hidden states, if the model is served for these."""
    drafter: EagleHead | DraftModel | None = None
    """Guesses what it says next; on rank 0 alone."""
    watched: tuple[int, ...] = ()
    """Layers whose input the drafter reads."""
    media: MediaEncoder | None = None
    """Makes embeddings of images and videos; None: it reads text alone."""
    mrope: MRope | None = None
    """The positions of prompts with images or videos, if it has positions of its own for these. Without items they
    are the plain ones."""

    def __init__(self, config: ModelConfig, weights: Weights, context_length: int, ranks: Ranks | None = None) -> None:
        """ranks: the connection of `weights.rank` to the others; None: there are no others."""
        self.config = config
        self.own = own(config, weights.rank, weights.experts.count)
        self.ranks = ranks
        self._first = weights.rank.rows(config.vocab_size)[0]
        """The first token of the own part of the vocabulary."""
        layers = weights.rank.layers(config.num_layers)
        weights.ignore(*(f"model.layers.{i}" for i in range(config.num_layers) if i not in layers))
        if not weights.rank.is_last_stage:
            weights.ignore("model.norm")
        self.embedding, head = _embedding_and_head(config, weights)
        dtype, device = weights.dtype, weights.device
        # rounded as the embedding is: transformers multiplies with a tensor of that type
        self._scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.ops = ops_for(device)
        self._head = None if head is None else float_product(self.ops, head, shared=head is self.embedding)
        self._layers = [self.layer_type(config, weights, self.ops, i, ranks) for i in layers]
        self.kv_scales = kv_scales(weights, layers)
        self._norm: torch.Tensor | None = None
        if weights.rank.is_last_stage:
            self._norm = norm_weight(config, weights, "model.norm", config.hidden_size)
        dim, trained = config.head_dim, config.max_position
        ropes = [rope for rope in (config.rope, config.local_rope) if rope is not None]
        tables = (rope_tables(rope, dim, trained, context_length, dtype, device) for rope in ropes)
        cos, sin = zip(*tables, strict=True)
        self.rope = torch.stack(cos), torch.stack(sin)
        """Cosines and sines, each (ropes, positions, rotated elements of a head)."""
        if config.mrope is not None:
            self.mrope = MRope(config.mrope, *self.rope)
        if config.vision is not None and weights.rank.is_first_stage:
            v = config.vision
            self.media = Tower(v, weights) if isinstance(v, TowerConfig) else VisionEncoder(v, weights)
        if config.audio is not None:
            self.media = AudioEncoder(config.audio, weights)

    @property
    def sites(self) -> list[Site]:
        """Where adapters may add to the own layers."""
        return [site for layer in self._layers for one in layer.sublayers for site in one.compute.sites]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids (tokens,) → (tokens, hidden), a new tensor: the input of the stage's first layer."""
        if self.embedding is None:
            assert self.ranks is not None
            shape = (len(input_ids), self.config.hidden_size)
            return self.ranks.receive(torch.empty(shape, dtype=self.rope[0].dtype, device=input_ids.device))
        if self.ranks is None:
            x = F.embedding(input_ids, self.embedding)
            return x if self._scale == 1 else x * self._scale
        rows, last = input_ids - self._first, len(self.embedding) - 1
        x = F.embedding(rows.clamp(0, last), self.embedding)
        x = self.ranks.sum(x.masked_fill_(((rows < 0) | (rows > last))[:, None], 0))
        return x * self._scale  # the sum itself is gone at the next one

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """x (tokens, hidden) → normalised hidden states (tokens, hidden); except on the last stage with any content."""
        residual: torch.Tensor | None = None
        after: torch.Tensor | None = None
        ranks = self.ranks
        for number, layer in enumerate(self._layers):
            for turn, sublayer in enumerate(layer.sublayers):
                x, residual = self._join(x, residual, after, sublayer.before, context)
                if turn == 0 and number in self.watched:
                    context.entering += [residual.clone()] * self.watched.count(number)
                if ranks is not None:
                    context.room = ranks.room(x, turn)
                x, after = sublayer.compute(x, context), sublayer.after
            if context.deep is not None and number < len(context.deep):
                assert residual is not None
                residual.add_(context.deep[number])
        x = self._join(x, residual, after, self._norm, context)[0]
        if self._norm is None and ranks is not None:
            ranks.send(x)
        return x

    def _join(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        after: torch.Tensor | None,
        before: torch.Tensor | None,
        context: Context,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds x, which the ranks sum and `after` norms, to the residual stream (None: x begins it). Returns the stream
        normed by `before`, and the stream."""
        eps, ranks = self.config.rms_norm_eps, self.ranks
        if residual is not None and ranks is not None:
            return ranks.add_norm(self.ops, x, context.room, residual, before, eps, after)
        if residual is not None:
            return self.ops.add_norm(x, residual, before, eps, after)
        return (x if before is None else self.ops.norm(x, before, eps)), x

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """(rows, hidden) → (rows, vocabulary), in `out` if given; with any content on other ranks than 0."""
        head, vocab = self._head, self.config.vocab_size
        if self.ranks is not None:
            if head is None:
                parts = hidden.new_empty(len(hidden), vocab)
            else:
                parts = self.ranks.gather(head(hidden, None))[:, :vocab]
            parts = self.ranks.home(parts)
            logits = parts.contiguous() if out is None else out.copy_(parts)
        else:
            assert head is not None
            logits = head(hidden, None) if out is None else torch.mm(hidden, head.weight.t(), out=out)
        cap = self.config.logit_softcap
        return logits if cap is None else self.ops.softcap(logits, cap)


def _embedding_and_head(config: ModelConfig, weights: Weights) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """One matrix if config.json ties them, unless the checkpoint has two different ones, as in transformers. Of several
    ranks each has as many rows of the vocabulary, the last with zeros for what is missing; of several stages the first
    has the embedding, the last the head."""
    vocab, count = config.vocab_size, weights.rank.count
    cut = Cut(0, (weights.rank.rows(vocab),)) if count > 1 else None

    def take(name: str) -> torch.Tensor:
        rows = weights.take(name, vocab, config.hidden_size, cut=cut)
        missing = -(-vocab // count) - len(rows)
        return F.pad(rows, (0, 0, 0, missing)) if missing else rows

    tied = config.tie_word_embeddings
    of_last = EMBEDDING if tied and not weights.has(HEAD) else HEAD
    of_first = of_last if tied and not weights.has(EMBEDDING) else EMBEDDING
    if weights.rank.stages > 1:
        mine = of_first if weights.rank.is_first_stage else of_last if weights.rank.is_last_stage else None
        weights.ignore(*{EMBEDDING, HEAD} - {mine})
        matrix = None if mine is None else take(mine)
        return (matrix, None) if weights.rank.is_first_stage else (None, matrix)
    embedding = take(of_first)
    head = embedding if of_last == of_first else take(of_last)
    if tied and head is not embedding:
        if torch.equal(embedding, head):
            return embedding, embedding
        logger.warning("config.json ties embedding and head, but the checkpoint has two that differ: both are used")
    return embedding, head
