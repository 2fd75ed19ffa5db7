"""LoRA adapters of random numbers, as peft saves them: B is no matrix of zeros, as it is before training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from treeline_runtime.models.adapters import CONFIG, WEIGHTS, Site

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    seed: int = 0,
    rank: int = 8,
    alpha: float = 16.0,
    size: float = 0.3,
    edit: Mapping[str, torch.Tensor | None] | None = None,
    **changes: Any,
) -> Path:
    """Write an adapter of these modules, outputs and inputs of each. edit: tensors to replace, None: to leave out;
    changes: keys of its configuration."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module, (outputs, inputs) in shapes.items():
        name = f"base_model.model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * size
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * size
    tensors = {name: tensor for name, tensor in (tensors | dict(edit or {})).items() if tensor is not None}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(config | changes))
    return folder


def shapes_of(sites: Iterable[Site], names: Iterable[str] | None = None) -> dict[str, tuple[int, int]]:
    """Return the modules at these sites, or those with one of these names: outputs and inputs of each."""
    found = {
        name: (outputs, site.inputs) for site in sites for name, outputs in zip(site.names, site.outputs, strict=True)
    }
    return {name: shape for name, shape in found.items() if names is None or name.rpartition(".")[2] in names}
