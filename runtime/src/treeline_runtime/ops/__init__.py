"""What a model computes between its matrix products: in PyTorch everywhere, fused in Triton on CUDA."""

from __future__ import annotations

import torch

from treeline_runtime.ops.base import Heads, Ops

__all__ = ["Heads", "Ops", "ops_for"]


def ops_for(device: torch.device) -> Ops:
    if device.type == "cuda":
        from treeline_runtime.ops.triton_ops import TritonOps

        return TritonOps()
    from treeline_runtime.ops.torch_ops import TorchOps

    return TorchOps()
