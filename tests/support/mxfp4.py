"""gpt-oss checkpoints with experts in MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.runtime_models import edit, save


def packed(path: Path, theirs: Any) -> Path:
    """Return the checkpoint with random MXFP4 experts; the reference gets them, too, unpacked by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    save(theirs, path)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        groups = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 125, groups, dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            theirs.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return edit(path, quantization_config=quantization)
