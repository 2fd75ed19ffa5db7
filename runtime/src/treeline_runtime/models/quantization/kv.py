"""The scales that a checkpoint has for keys and values in an fp8 cache: it was calibrated with them."""

from __future__ import annotations

from treeline_runtime.models.quantization.product import take_scale
from treeline_runtime.models.weights import Weights

KV_SCALES = ("k_scale", "v_scale")


def kv_scales(weights: Weights, num_layers: int) -> list[tuple[float, float]]:
    """Of each layer's keys and values: what is stored is the value over the scale. 1 where the checkpoint says nothing:
    e4m3 reaches 448, and its precision is the same for small and large. Raises ModelError."""
    if weights.scheme is None or weights.scheme.at_load:
        return [(1.0, 1.0)] * num_layers
    scales = []
    for layer in range(num_layers):
        names = [f"model.layers.{layer}.self_attn.{name}" for name in KV_SCALES]
        keys, values = (take_scale(weights, name) if weights.has(name) else 1.0 for name in names)
        scales.append((keys, values))
    return scales
