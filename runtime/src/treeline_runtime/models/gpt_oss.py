"""gpt-oss: the decoder with its own experts and their layouts in a checkpoint.

Rows of gate and up take turns there. Weights have their inputs first, as transformers multiplies them, or they are
MXFP4 and have their inputs last; those are made whole as they are loaded. MXFP4 is OCP's "Microscaling Formats" 1.0: 32
numbers of type E2M1, two in a byte, the first in its lower half, and for each 32 a power of two of type E8M0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from treeline_runtime.context import Context
from treeline_runtime.models.config import ModelConfig
from treeline_runtime.models.decoder import Decoder, Layer, Linear
from treeline_runtime.models.model_config import MoeConfig
from treeline_runtime.models.moe import Moe, new_stack
from treeline_runtime.models.weights import Weights
from treeline_runtime.ops import Experts, Ops


class GptOssLayer(Layer):
    @staticmethod
    def new_feed_forward(
        config: ModelConfig, weights: Weights, ops: Ops, layer: int
    ) -> Callable[[torch.Tensor, Context], torch.Tensor]:
        assert config.moe is not None
        prefix = f"model.layers.{layer}.mlp."
        router = Linear(weights, ops, prefix, {"router": config.moe.num_experts}, config.hidden_size, bias=True)
        return Moe(ops, config.moe, router, take_experts(weights, f"{prefix}experts.", config.moe, config.hidden_size))


class GptOssDecoder(Decoder):
    layer_type = GptOssLayer


def take_experts(weights: Weights, prefix: str, moe: MoeConfig, hidden: int) -> Experts:
    count, inner = moe.num_experts, moe.intermediate_size
    biases = (
        weights.take(f"{prefix}gate_up_proj_bias", count, 2 * inner),
        weights.take(f"{prefix}down_proj_bias", count, hidden),
    )
    gate_up_of = _matrices(weights, f"{prefix}gate_up_proj", count, 2 * inner, hidden)
    down_of = _matrices(weights, f"{prefix}down_proj", count, hidden, inner)
    gate_up, down = new_stack(biases[0], count, 2 * inner, hidden), new_stack(biases[0], count, hidden, inner)
    for expert in range(count):
        taking_turns = gate_up_of(expert)
        gate_up[expert, :inner] = taking_turns[0::2]
        gate_up[expert, inner:] = taking_turns[1::2]
        down[expert] = down_of(expert)
    return Experts(gate_up, down, (_apart(biases[0]), biases[1].contiguous()), moe.clamped)


def _apart(gate_up: torch.Tensor) -> torch.Tensor:
    """(…, 2 x inner) taking turns → the gates, then the ups."""
    return torch.cat((gate_up[..., 0::2], gate_up[..., 1::2]), dim=-1)


def _matrices(weights: Weights, name: str, count: int, outputs: int, inputs: int) -> Callable[[int], torch.Tensor]:
    """→ each expert's matrix, (outputs, inputs)."""
    if weights.has(name) or not weights.has(f"{name}_blocks"):
        whole = weights.take(name, count, inputs, outputs)
        return lambda expert: whole[expert].t()
    packed = torch.uint8
    blocks = weights.take(f"{name}_blocks", count, outputs, inputs // BLOCK, BLOCK // 2, dtype=packed)
    scales = weights.take(f"{name}_scales", count, outputs, inputs // BLOCK, dtype=packed)
    return lambda expert: dequantise(blocks[expert], scales[expert])


# ---- MXFP4 ------------------------------------------------------------------------------------------------------

BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
_PAIRS = torch.stack((_NUMBERS.repeat(16), _NUMBERS.repeat_interleave(16)), dim=1)
"""(256, 2): the two numbers of a byte."""
_SMALLEST = 2.0**-127


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks (…, inputs / 32, 16) uint8, scales (…, inputs / 32) uint8 → (…, inputs) float32, without rounding."""
    numbers = _PAIRS.to(blocks.device)[blocks.int()].flatten(-2)
    # a scale is the exponent of a float32; that of 0 would be a zero there
    factors = (scales.int() << 23).view(torch.float32).clamp(min=_SMALLEST)
    return numbers.mul_(factors[..., None]).flatten(-2)
