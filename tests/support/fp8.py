"""fp8 (e4m3) by its definition, in plain numpy: the reference for the runtime's numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Floats = npt.NDArray[np.float64]


def _value(code: int) -> float:
    """Return a code's number: 1 bit of sign, 4 of exponent (bias 7), 3 of mantissa. No infinity; NaN where all but the
    sign are ones."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


VALUES = np.array([_value(code) for code in range(256)])
POSITIVE = VALUES[:127]
LARGEST = 448.0


def nearest(x: Floats) -> npt.NDArray[np.uint8]:
    """Return the code of the nearest number, the even one of two; beyond the largest, the largest."""
    size = np.minimum(np.abs(x), LARGEST)
    above = np.clip(np.searchsorted(POSITIVE, size), 1, 126)
    low, high = POSITIVE[above - 1], POSITIVE[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    code = np.where(up, above, above - 1)
    return (code + np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def as_tensor(codes: npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def rounded(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return x rounded to fp8: (x / scale) in fp8, times scale."""
    over = (x.double() / scale).numpy()
    return torch.from_numpy(VALUES[nearest(over)]) * scale


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """x (…, n), each row with a scale of its own"""
    scale = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return rounded(x, scale).to(x.dtype)


def rounded_groups(x: torch.Tensor, group: int = 128) -> torch.Tensor:
    """x (…, n), each `group` elements of a row with a scale of their own"""
    return torch.cat([rounded_rows(part) for part in x.split(group, -1)], -1)


def quantised(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight (outputs, inputs), kind tensor, channel or block → values, scales as a checkpoint has them, and what the
    two mean."""
    w = weight.double()
    if kind == "block":
        rows, columns = w.shape
        padded = torch.nn.functional.pad(w, (0, -columns % 128, 0, -rows % 128))
        blocks = padded.view(padded.shape[0] // 128, 128, -1, 128)
        scales = blocks.abs().amax((1, 3)) / LARGEST
        each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    else:
        scales = (w.abs().amax() if kind == "tensor" else w.abs().amax(1, keepdim=True)) / LARGEST
        each = scales.expand(w.shape)
    scales, each = scales.float(), each.float().double()
    codes = nearest((w / each).numpy())
    return as_tensor(codes), scales, (torch.from_numpy(VALUES[codes]) * each).float()


WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
INPUTS = WEIGHTS | {"dynamic": True, "strategy": "token"}
BLOCKS = WEIGHTS | {"strategy": "block", "block_structure": [128, 128]}


def compressed(weights: dict[str, Any] | None = None, inputs: Any = INPUTS, **more: Any) -> dict[str, Any]:
    """Return a configuration as llm-compressor writes it, including keys without effect."""
    group = {"targets": ["Linear"], "weights": (weights or WEIGHTS) | {"observer": "minmax", "observer_kwargs": {}}}
    group |= {"input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "sparsity_config": {},
    } | more


FINE_GRAINED = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
STATIC_SCALE = 0.02

Inputs = Callable[[torch.Tensor], torch.Tensor]
FORMATS: dict[str, tuple[dict[str, Any], str, str, dict[str, torch.Tensor], Inputs]] = {
    "fp8 per tensor": (STATIC | {"activation_scheme": "dynamic"}, "tensor", "weight_scale", {}, rounded_rows),
    "fp8 static": (
        STATIC,
        "tensor",
        "weight_scale",
        {"input_scale": torch.tensor([STATIC_SCALE])},
        lambda x: rounded(x, STATIC_SCALE).to(x.dtype),
    ),
    "fp8 of transformers, static": (
        STATIC,
        "tensor",
        "weight_scale_inv",
        {"activation_scale": torch.tensor(STATIC_SCALE)},
        lambda x: rounded(x, STATIC_SCALE).to(x.dtype),
    ),
    "fine-grained fp8": (FINE_GRAINED, "block", "weight_scale_inv", {}, rounded_groups),
    "compressed-tensors per channel": (compressed(), "channel", "weight_scale", {}, rounded_rows),
    "compressed-tensors per tensor": (
        compressed(WEIGHTS | {"strategy": "tensor"}),
        "tensor",
        "weight_scale",
        {},
        rounded_rows,
    ),
    "compressed-tensors per block": (
        compressed(BLOCKS, INPUTS | {"strategy": "group", "group_size": 128}),
        "block",
        "weight_scale",
        {},
        rounded_groups,
    ),
}
"""Settings, names of quantised tensors and of their scales, other tensors, and the change of a projection's inputs."""


PROJECTIONS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def quantise_checkpoint(
    path: Path, settings: dict[str, Any], kind: str, suffix: str = "weight_scale", **more: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Rewrite a checkpoint with the projections in fp8; `more` tensors beside them, by name or by the name within a
    module (`input_scale`). → the weights that it means"""
    tensors, meant = load_file(path / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        meant[name] = tensor
        if not name.endswith(PROJECTIONS):
            continue
        values, scales, meant[name] = quantised(tensor, kind)
        module = name.removesuffix("weight")
        tensors |= {name: values, module + suffix: scales}
        tensors |= {module + inner: value.clone() for inner, value in more.items() if "." not in inner}
    tensors |= {name: value for name, value in more.items() if "." in name}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config))
    return meant
