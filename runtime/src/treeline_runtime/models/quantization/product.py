"""Products of activations with stacked projections, in the checkpoint's format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from treeline_runtime.models.config import ModelError
from treeline_runtime.models.quantization.fp8 import E4M3, dequantise, quantise, quantise_weight
from treeline_runtime.models.quantization.scheme import BLOCK, Scheme
from treeline_runtime.models.shards import INPUTS, OUTPUTS, Cut
from treeline_runtime.models.stream import cut_from
from treeline_runtime.models.weights import Weights
from treeline_runtime.ops import Ops, obstacle_to_triton, onednn

WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
"""Names of a weight's scale; the second is fine-grained fp8's, and is not an inverse either."""
INPUT_SCALES = ("input_scale", "activation_scale")
OLDEST = (8, 9)
"""Compute capability: older GPUs than Ada have no fp8 products."""
SECOND_COPY_BYTES = 64 << 20
"""Bytes that may be spent on a second copy in a faster order."""

Sizes = Mapping[str, tuple[int, ...]]
"""Projections of the checkpoint → their outputs: one number, or several where it has packed several into one."""
Product = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
"""x (tokens, inputs), bias (outputs,) or None, and room for the result, which need not be used → (tokens, outputs)."""


class Plain:
    """A float matrix (outputs, inputs)."""

    def __init__(self, ops: Ops, weight: torch.Tensor) -> None:
        self._ops = ops
        self.weight = weight

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, room: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._ops.linear(x, self.weight, bias, room)


class Packed:
    """A float matrix (outputs, inputs) as oneDNN reads it: where `onednn.can_pack`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = onednn.pack(weight)

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, _: torch.Tensor | None = None
    ) -> torch.Tensor:
        return onednn.linear(x, self.weight, bias)


def float_product(ops: Ops, weight: torch.Tensor, *, shared: bool = False) -> Plain | Packed:
    """The fastest product of a matrix (outputs, inputs), perhaps in another memory order.

    shared: the matrix is also used elsewhere, so another order would be a second copy.
    """
    if weight.device.type != "cpu" or (shared and weight.nbytes > SECOND_COPY_BYTES):
        return Plain(ops, weight)
    # without oneDNN (inputs, outputs): with 2 to 16 rows MKL's kernels are faster on it
    return Packed(weight) if onednn.can_pack(weight) else Plain(ops, weight.t().contiguous().t())


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix:
    """values (outputs, inputs) e4m3, scales (groups, outputs) float32; see `quantization.fp8`."""

    values: torch.Tensor
    scales: torch.Tensor
    group: int
    """Inputs that share a scale, in matrix and activations."""
    input_scale: float | None
    """One scale for all activations; None: each token has its own."""


class Emulated:
    """Without fp8 products: weights as floats, activations rounded to fp8.

    The same numbers as `Fp8` up to rounding, with the memory and speed of unquantised weights.
    """

    def __init__(self, ops: Ops, matrix: Fp8Matrix, dtype: torch.dtype) -> None:
        self._group, self._input_scale = matrix.group, matrix.input_scale
        self._plain = float_product(ops, dequantise(matrix.values, matrix.scales, matrix.group).to(dtype))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, room: torch.Tensor | None) -> torch.Tensor:
        values, scales = quantise(x, self._group, self._input_scale)
        return self._plain(dequantise(values, scales, self._group).to(x.dtype), bias, room)


class Fp8:
    """fp8 products on tensor cores."""

    def __init__(self, matrix: Fp8Matrix) -> None:
        from treeline_runtime.ops.fp8 import scaled_linear

        self._linear = scaled_linear
        self._matrix = matrix

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, _: torch.Tensor | None) -> torch.Tensor:
        matrix = self._matrix
        return self._linear(x, matrix.values, matrix.scales, matrix.group, matrix.input_scale, bias)


def new_product(
    weights: Weights, ops: Ops, prefix: str, names: Sizes, size: int, split: int | None = None, unit: int = 1
) -> Product:
    """Takes the weights of these projections of one input, or the rank's part of each. size: inputs; split, unit: see
    `Linear`. Raises ModelError."""
    scheme = weights.scheme
    if scheme is None or scheme.at_load:
        quantised = list(names) if scheme else []
    else:
        quantised = [name for name in names if _find(weights, f"{prefix}{name}.", WEIGHT_SCALES)]
    cuts = {name: cut_of(weights, sizes, size, split, unit) for name, sizes in names.items()}
    outputs = {name: sum(sizes) for name, sizes in names.items()}
    if scheme is None or not quantised:
        parts = [weights.take(f"{prefix}{n}.weight", out, size, cut=cuts[n]) for n, out in outputs.items()]
        return float_product(ops, stack(parts))
    if len(quantised) < len(names):
        other = next(name for name in names if name not in quantised)
        raise ModelError(
            f"{prefix}{quantised[0]} is quantised and {prefix}{other} is not: as both read the same input, they are "
            "one matrix here, and have to be quantised alike"
        )
    matrices = [_take(weights, scheme, f"{prefix}{n}.", out, size, cuts[n]) for n, out in outputs.items()]
    static = [part.input_scale for part in matrices if part.input_scale is not None]
    matrix = Fp8Matrix(
        stack([part.values for part in matrices]),
        torch.cat([part.scales for part in matrices], dim=1),
        matrices[0].group,
        # they were measured on the same input; if they differ, nothing that one of them allows is cut off
        max(static) if static else None,
    )
    return Fp8(matrix) if multiplies_fp8(matrix.values.device) else Emulated(ops, matrix, weights.dtype)


def cut_of(weights: Weights, outputs: tuple[int, ...], inputs: int, split: int | None, unit: int) -> Cut | None:
    """The rank's part of a projection's weights."""
    if split == OUTPUTS:
        return weights.rank.cut(OUTPUTS, *outputs, unit=unit)
    return weights.rank.cut(INPUTS, inputs) if split == INPUTS else None


def stack(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


def multiplies_fp8(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < OLDEST:
        return False
    return obstacle_to_triton(device) is None


def _take(weights: Weights, scheme: Scheme, module: str, outputs: int, inputs: int, cut: Cut | None) -> Fp8Matrix:
    """A rank that has a part of the inputs quantises only this part of each row of activations (at load, of weights).
    So its scales are not those of whole rows, and results differ a little from those of a single rank."""
    if scheme.at_load:
        weight = weights.take(f"{module}weight", outputs, inputs, cut=cut)
        return Fp8Matrix(*quantise_weight(weight), weight.shape[1], None)
    values = weights.take(f"{module}weight", outputs, inputs, dtype=E4M3, cut=cut)
    name = module + _find(weights, module, WEIGHT_SCALES)
    if scheme.weights == "blocks":
        blocks = weights.take(name, -(-outputs // BLOCK), -(-inputs // BLOCK), dtype=torch.float32)
        scales = blocks.t().repeat_interleave(BLOCK, dim=1)[:, :outputs].contiguous()
        return Fp8Matrix(values, _own_scales(scales, cut, BLOCK), BLOCK, None)
    shape = weights.shape(name)
    if shape not in ((), (1,), (1, 1), (outputs,), (outputs, 1)):
        raise ModelError(f"tensor {name} has shape {shape}: not one scale, nor one for each of {outputs} outputs")
    scales = weights.take(name, *shape, dtype=torch.float32).reshape(1, -1).expand(1, outputs).contiguous()
    input_scale = _input_scale(weights, module) if scheme.inputs == "static" else None
    return Fp8Matrix(values, _own_scales(scales, cut, inputs), values.shape[1], input_scale)


def _own_scales(scales: torch.Tensor, cut: Cut | None, group: int) -> torch.Tensor:
    """scales (groups, outputs) of all → of a cut of the weights: inputs are whole groups, or of the only one."""
    if cut is None:
        return scales
    if cut.dim == OUTPUTS:
        return cut_from(scales, Cut(1, cut.ranges))
    return cut_from(scales, Cut(0, tuple((begin // group, -(-end // group)) for begin, end in cut.ranges)))


def _input_scale(weights: Weights, module: str) -> float:
    return take_scale(weights, module + (_find(weights, module, INPUT_SCALES) or INPUT_SCALES[0]))


def take_scale(weights: Weights, name: str) -> float:
    """One positive number. Raises ModelError."""
    shape = weights.shape(name)
    scale = weights.take(name, *shape, dtype=torch.float32)
    if scale.numel() != 1 or not 0 < scale.item() < math.inf:
        raise ModelError(f"tensor {name} is not one positive number, but {scale.flatten()[:4].tolist()} …")
    return scale.item()


def _find(weights: Weights, module: str, names: tuple[str, ...]) -> str:
    """The first of these names that the checkpoint has for a module; empty: none."""
    return next((name for name in names if weights.has(module + name)), "")


KV_SCALES = ("k_scale", "v_scale")


def kv_scales(weights: Weights, layers: range) -> list[tuple[float, float]]:
    """Scales of each layer's keys and values, which are stored divided by them. 1 if the checkpoint has none: e4m3
    reaches 448, with equal precision for small and large values. Raises ModelError."""
    if weights.scheme is None or weights.scheme.at_load:
        return [(1.0, 1.0)] * len(layers)
    scales = []
    for layer in layers:
        names = [f"model.layers.{layer}.self_attn.{name}" for name in KV_SCALES]
        keys, values = (take_scale(weights, name) if weights.has(name) else 1.0 for name in names)
        scales.append((keys, values))
    return scales
