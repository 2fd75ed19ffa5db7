"""What a model computes between its matrix products: in PyTorch everywhere, fused in Triton on CUDA."""

from __future__ import annotations

import logging
import os
import shutil
from importlib.util import find_spec

import torch

from treeline_runtime.ops.base import Heads, Ops

__all__ = ["Heads", "Ops", "obstacle_to_triton", "ops_for"]

logger = logging.getLogger(__name__)


def obstacle_to_triton() -> str | None:
    """Why Triton's kernels cannot run here; None if they can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang")))):
        return "Triton needs a C compiler (apt-get install gcc libc6-dev)"
    return None


def ops_for(device: torch.device) -> Ops:
    if device.type == "cuda":
        obstacle = obstacle_to_triton()
        if obstacle is None:
            from treeline_runtime.ops.triton_ops import TritonOps

            return TritonOps()
        logger.warning("slow: operations are not fused and decode is not captured: %s", obstacle)
    from treeline_runtime.ops.torch_ops import TorchOps

    return TorchOps()
