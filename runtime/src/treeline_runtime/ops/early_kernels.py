"""Launches kernels while the previous one still runs (programmatic dependent launch), from Hopper on.

A kernel with EARLY lets the next one begin at once. Before it reads or writes shared data, it waits until everything
launched before is done and visible; reading weights need not wait. This hides launch times in any order of kernels:
after a kernel that does not take part (cuBLAS), the next begins when that one ends.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_OLDEST = (9, 0)
"""Compute capability."""


def early_launch(device: torch.device | None) -> dict[str, bool]:
    """Launch arguments for an early launch."""
    if device is None or device.type != "cuda" or torch.cuda.get_device_capability(device) < _OLDEST:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_others(EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()


@triton.jit
def take_turn(EARLY: tl.constexpr):
    """Both steps, for kernels with nothing to do before."""
    let_next_begin(EARLY)
    wait_for_others(EARLY)
