"""Operations between a model's matrix products: in PyTorch, and fused in Triton on CUDA."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from treeline_runtime.ops import driver
from treeline_runtime.ops.base import Activation, Experts, Found, Heads, Ops, Tables

__all__ = ["Activation", "Experts", "Found", "Heads", "Ops", "Tables", "obstacle_to_triton", "ops_for"]

# Products and sums in one rounding, whatever a release of Triton takes for the default: it warns of its change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

logger = logging.getLogger(__name__)

OLDEST = (8, 0)
"""Compute capability: older GPUs have no bfloat16 and too little shared memory."""


@functools.cache
def obstacle_to_triton(device: torch.device) -> str | None:
    """Why our kernels cannot run on a CUDA device; None if they can. Checked once."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if driver.prebuilt() is None:  # Triton compiles it at its first use
        if not os.environ.get("CC", shutil.which("gcc") or shutil.which("clang")):
            return "Triton needs a C compiler (apt-get install gcc libc6-dev)"
        if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
            return "Triton needs Python's headers (apt-get install python3-dev)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    return None


def ops_for(device: torch.device) -> Ops:
    if device.type == "cuda":
        obstacle = obstacle_to_triton(device)
        if obstacle is None:
            from treeline_runtime.ops.triton_ops import TritonOps

            driver.use_prebuilt()
            return TritonOps(device)
        logger.warning("slow: operations are not fused and decode is not captured: %s", obstacle)
    from treeline_runtime.ops.torch_ops import TorchOps

    return TorchOps()
