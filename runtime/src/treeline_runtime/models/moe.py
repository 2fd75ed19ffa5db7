"""Decoders with a mixture of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, Qwen3-VL-MoE, gpt-oss.

Otherwise they are the dense decoder. A rank has a part of every expert, or some experts as a whole.

In gpt-oss checkpoints rows of gate and up alternate. Weights have their inputs first, as transformers multiplies them,
or are MXFP4 with inputs last, converted while loading. MXFP4 is OCP's "Microscaling Formats" 1.0: 32 numbers of type
E2M1, two per byte, the first in the lower half, and a power of two of type E8M0 for each 32.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F

from treeline_runtime.collectives import Ranks, Stage
from treeline_runtime.context import Context
from treeline_runtime.models.adapters import Site
from treeline_runtime.models.config import ModelConfig
from treeline_runtime.models.decoder import Computes, Decoder, FeedForward, Layer, Linear
from treeline_runtime.models.model_config import MoeConfig
from treeline_runtime.models.shards import INPUTS, OUTPUTS, WHOLE, Cut
from treeline_runtime.models.weights import Weights
from treeline_runtime.ops import Experts, Ops

QWEN_NAMES = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = ("w1", "w3", "w2")
"""Gate, up and down of an expert, in checkpoints with one matrix per expert."""
BLOCKS = ("mlp.", "block_sparse_moe.")
"""The second is Mixtral's, which transformers 5 no longer has in memory, and may not save."""


class Exchange:
    """Lets the experts of all data-parallel ranks compute the tokens of all."""

    rows = 0
    """The number of tokens to which every rank pads its own, the same on all ranks. 0: all have equally many."""

    def __init__(self, ranks: Stage) -> None:
        self.ranks = ranks

    def over(self, x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """x (tokens, hidden) → what all ranks' experts add to it. compute: the sum of this rank's, of any tokens."""
        tokens = len(x)
        everyones = self.ranks.all_gather(F.pad(x, (0, 0, 0, max(self.rows, tokens) - tokens)))
        return self.ranks.reduce_scatter(compute(everyones))[:tokens]


class Moe:
    """A router, its experts, and optionally a gated expert for every token."""

    def __init__(
        self,
        ops: Ops,
        moe: MoeConfig,
        router: Linear,
        experts: Experts,
        shared: tuple[Linear, FeedForward] | None = None,
    ) -> None:
        """shared: its gate and itself."""
        self._ops, self._top_k, self._normalise = ops, moe.top_k, moe.normalise
        self._router, self._experts, self._shared = router, experts, shared
        self.exchange: Exchange | None = None

    @property
    def sites(self) -> list[Site]:
        """Only of the expert for every token."""
        return [] if self._shared is None else self._shared[1].sites

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        def routed(x: torch.Tensor) -> torch.Tensor:
            scores, ids = self._ops.route(self._router(x), self._top_k, normalise=self._normalise)
            return self._ops.experts(x, self._experts, scores, ids)

        y = routed(x) if self.exchange is None else self.exchange.over(x, routed)
        if self._shared is None:
            return y
        gate, expert = self._shared
        return torch.addcmul(y, gate(x).sigmoid(), expert(x, context))


def new_moe(moe: MoeConfig, weights: Weights, ops: Ops, prefix: str, hidden: int) -> Moe:
    """prefix: of the names, up to the block's own dot."""
    router = Linear(weights, ops, prefix, {"gate": (moe.num_experts,)}, hidden, bias=False)
    experts = take_experts(weights, f"{prefix}experts.", moe, hidden)
    if not moe.shared_intermediate_size:
        return Moe(ops, moe, router, experts)
    gate = Linear(weights, ops, prefix, {"shared_expert_gate": (1,)}, hidden, bias=False)
    shared = FeedForward(weights, ops, f"{prefix}shared_expert.", hidden, moe.shared_intermediate_size, bias=False)
    return Moe(ops, moe, router, experts, (gate, shared))


def take_experts(weights: Weights, prefix: str, moe: MoeConfig, hidden: int) -> Experts:
    """Takes any layout: all experts in one tensor, as transformers 5 may save them, in Qwen3-VL-MoE with inputs before
    outputs, or a matrix each. Of the latter one copy exists beside the stack at a time."""
    count, inner = moe.num_experts, moe.intermediate_size
    local = local_numbers(weights, count)
    stacked = f"{prefix}gate_up_proj"
    if weights.has(stacked):
        turned = hidden != 2 * inner and weights.shape(stacked) == (count, hidden, 2 * inner)

        def stack(name: str, outputs: int, inputs: int, dim: int, *sections: int) -> torch.Tensor:
            shape, dim = ((inputs, outputs), 3 - dim) if turned else ((outputs, inputs), dim)
            taken = weights.take(f"{prefix}{name}", count, *shape, cut=cut_of_stack(weights, count, dim, *sections))
            return _laid_out(taken.transpose(1, 2) if turned else taken)

        into = stack("gate_up_proj", 2 * inner, hidden, 1, inner, inner)
        return Experts(into, stack("down_proj", hidden, inner, 2, inner), local=local)
    begin, end = weights.experts.part(count)
    names = MIXTRAL_NAMES if weights.has(f"{prefix}{begin}.{MIXTRAL_NAMES[0]}.weight") else QWEN_NAMES
    rank = weights.rank if local is None else WHOLE
    inward, outward = rank.cut(OUTPUTS, inner), rank.cut(INPUTS, inner)
    first = weights.take(f"{prefix}{begin}.{names[0]}.weight", inner, hidden, cut=inward)
    own = len(first)
    experts = Experts(
        new_stack(first, end - begin, 2 * own, hidden), new_stack(first, end - begin, hidden, own), local=local
    )
    for at, expert in enumerate(range(begin, end)):
        gate, up = experts.gate_up[at].chunk(2)
        gate.copy_(weights.take(f"{prefix}{expert}.{names[0]}.weight", inner, hidden, cut=inward) if at else first)
        up.copy_(weights.take(f"{prefix}{expert}.{names[1]}.weight", inner, hidden, cut=inward))
        experts.down[at].copy_(weights.take(f"{prefix}{expert}.{names[2]}.weight", hidden, inner, cut=outward))
    return experts


def cut_of_stack(weights: Weights, count: int, dim: int, *sizes: int) -> Cut | None:
    """The rank's part of a tensor that has `count` experts in dimension 0: some experts as a whole, or else a part of
    every expert. dim, sizes: the dimension that is divided then, and its sections (see `Rank.cut`)."""
    return weights.experts.cut(0, count) or weights.rank.cut(dim, *sizes)


def local_numbers(weights: Weights, count: int) -> torch.Tensor | None:
    """`Experts.local` for `count` experts."""
    if weights.experts.count == 1:
        return None
    begin, end = weights.experts.part(count)
    local = torch.full((count,), end - begin, dtype=torch.int32, device=weights.device)
    local[begin:end] = torch.arange(end - begin, dtype=torch.int32)
    return local


def leave_out(weights: Weights, moe: MoeConfig) -> None:
    """Ignores other ranks' experts, where each is a module of its own. Before any is taken: with the first one, those
    of all layers begin to be read."""
    begin, end = weights.experts.part(moe.num_experts)
    others = [*range(begin), *range(end, moe.num_experts)]
    modules = product(moe.layers, BLOCKS, others)
    weights.ignore(*(f"model.layers.{layer}.{block}experts.{expert}" for layer, block, expert in modules))


def new_stack(like: torch.Tensor, count: int, outputs: int, inputs: int) -> torch.Tensor:
    """(count, outputs, inputs), to be filled. On a CPU inputs come first in memory: decode steps of 1 to 8 rows are 10
    to 18 % faster (hidden 512, 32 experts of 256)."""
    if like.device.type == "cpu":
        return like.new_empty(count, inputs, outputs).transpose(1, 2)
    return like.new_empty(count, outputs, inputs)


def _laid_out(stack: torch.Tensor) -> torch.Tensor:
    return new_stack(stack, *stack.shape).copy_(stack) if stack.device.type == "cpu" else stack.contiguous()


class MoeLayer(Layer):
    """With experts or dense."""

    @staticmethod
    def new_feed_forward(config: ModelConfig, weights: Weights, ops: Ops, layer: int) -> Computes:
        moe = config.moe
        if moe is None or layer not in moe.layers:
            return Layer.new_feed_forward(config, weights, ops, layer)
        prefix, hidden = f"model.layers.{layer}.", config.hidden_size
        if moe.clamped is not None:
            return new_gpt_oss_moe(moe, weights, ops, f"{prefix}mlp.", hidden)
        block = BLOCKS[1] if weights.has(f"{prefix}{BLOCKS[1]}gate.weight") else BLOCKS[0]
        return new_moe(moe, weights, ops, prefix + block, hidden)


class MoeDecoder(Decoder):
    layer_type = MoeLayer

    def __init__(self, config: ModelConfig, weights: Weights, context_length: int, ranks: Ranks | None = None) -> None:
        assert config.moe is not None
        leave_out(weights, config.moe)
        super().__init__(config, weights, context_length, ranks)

    def exchange_over(self, exchange: Exchange) -> None:
        """Lets other ranks' experts compute tokens, too: those that are not here."""
        for layer in self._layers:
            for sublayer in layer.sublayers:
                if isinstance(sublayer.compute, Moe):
                    sublayer.compute.exchange = exchange


# ---- gpt-oss --------------------------------------------------------------------------------------------------


def new_gpt_oss_moe(moe: MoeConfig, weights: Weights, ops: Ops, prefix: str, hidden: int) -> Moe:
    router = Linear(weights, ops, prefix, {"router": (moe.num_experts,)}, hidden, bias=True)
    return Moe(ops, moe, router, take_gpt_oss_experts(weights, f"{prefix}experts.", moe, hidden))


def take_gpt_oss_experts(weights: Weights, prefix: str, moe: MoeConfig, hidden: int) -> Experts:
    count, inner = moe.num_experts, moe.intermediate_size
    local = local_numbers(weights, count)
    into_cut = cut_of_stack(weights, count, 1, 2 * inner)
    into_bias = weights.take(f"{prefix}gate_up_proj_bias", count, 2 * inner, cut=into_cut)
    out_bias = weights.take(f"{prefix}down_proj_bias", count, hidden, cut=weights.experts.cut(0, count))
    if local is None and weights.rank.index:  # to a sum it is added once
        out_bias = torch.zeros_like(out_bias)
    gate_up_of = _matrices(weights, f"{prefix}gate_up_proj", count, 2 * inner, hidden, OUTPUTS)
    down_of = _matrices(weights, f"{prefix}down_proj", count, hidden, inner, INPUTS)
    here, own = into_bias.shape[0], into_bias.shape[1] // 2
    gate_up, down = new_stack(into_bias, here, 2 * own, hidden), new_stack(into_bias, here, hidden, own)
    for expert in range(here):
        gate_up[expert] = _apart(gate_up_of(expert).t()).t()
        down[expert] = down_of(expert)
    return Experts(gate_up, down, (_apart(into_bias), out_bias.contiguous()), moe.clamped, local)


def _apart(gate_up: torch.Tensor) -> torch.Tensor:
    """Alternating (…, 2 x inner) → gates, then ups."""
    return torch.cat((gate_up[..., 0::2], gate_up[..., 1::2]), dim=-1)


def _matrices(
    weights: Weights, name: str, count: int, outputs: int, inputs: int, split: int
) -> Callable[[int], torch.Tensor]:
    """Returns a function from an expert that is here to its matrix (outputs, inputs), or the rank's part of that."""
    rank, packed = weights.rank if weights.experts.count == 1 else WHOLE, torch.uint8
    if weights.has(name) or not weights.has(f"{name}_blocks"):
        cut = cut_of_stack(weights, count, *((2, outputs) if split == OUTPUTS else (1, inputs)))
        whole = weights.take(name, count, inputs, outputs, cut=cut)
        return lambda expert: whole[expert].t()
    begin, end = rank.part(inputs) if split == INPUTS else (0, inputs)
    cut = cut_of_stack(weights, count, 1, outputs)
    if split == INPUTS and rank.count > 1:  # a part may begin or end within a block
        cut = Cut(2, ((begin // BLOCK, -(-end // BLOCK)),))
    blocks = weights.take(f"{name}_blocks", count, outputs, inputs // BLOCK, BLOCK // 2, dtype=packed, cut=cut)
    scales = weights.take(f"{name}_scales", count, outputs, inputs // BLOCK, dtype=packed, cut=cut)
    return lambda expert: dequantise(blocks[expert], scales[expert]).narrow(1, begin % BLOCK, end - begin)


# ---- MXFP4 ------------------------------------------------------------------------------------------------------

BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
_PAIRS = torch.stack((_NUMBERS.repeat(16), _NUMBERS.repeat_interleave(16)), dim=1)
"""(256, 2): a byte's two numbers."""
_SMALLEST = 2.0**-127


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks (…, inputs / 32, 16) uint8, scales (…, inputs / 32) uint8 → (…, inputs) float32, without rounding."""
    numbers = _PAIRS.to(blocks.device)[blocks.int()].flatten(-2)
    # a scale is the exponent of a float32; that of 0 would be a zero there
    factors = (scales.int() << 23).view(torch.float32).clamp(min=_SMALLEST)
    return numbers.mul_(factors[..., None]).flatten(-2)
