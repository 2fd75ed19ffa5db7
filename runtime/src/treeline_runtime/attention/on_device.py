"""What the backends with kernels of our own ask of the device, and tell the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from treeline_runtime.attention.base import AttentionBackend

_LOG2_E = 1.4426950408889634


class Processors(NamedTuple):
    number: int
    shared_bytes: int
    """Of shared memory, that a program may have."""


def processors_of(device: torch.device) -> Processors:
    """Of a CPU, where the kernels are interpreted: one, with room for any block."""
    if device.type != "cuda":
        return Processors(1, 1 << 20)
    properties = torch.cuda.get_device_properties(device)
    return Processors(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def factors(backend: AttentionBackend, layer: int) -> tuple[float, float, float]:
    """→ what products of queries and keys are multiplied by, so that their softmax is one in base 2 (or with a cap,
    what its sigmoid takes); what values are multiplied by; the cap in base 2, 0 where there is none."""
    pool, cap = backend.pool, backend.scoring.softcap
    scale = backend.scale * _LOG2_E if cap is None else 2 * backend.scale / cap
    return pool.key_scales[layer] * scale, pool.value_scales[layer], 0.0 if cap is None else cap * _LOG2_E
