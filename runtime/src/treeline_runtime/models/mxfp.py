"""Weights of four bits in blocks that share a scale: MXFP4, as in gpt-oss. They are made whole as they are loaded.

The format is OCP's "Microscaling Formats" 1.0: 32 numbers of type E2M1, two in a byte, the first in its lower half, and
for each 32 a power of two of type E8M0.
"""

from __future__ import annotations

import torch

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
