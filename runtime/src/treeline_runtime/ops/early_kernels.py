"""Kernels that are launched while the one before them still runs (programmatic dependent launch), from Hopper on.

A kernel with EARLY lets the next one begin at once, and waits itself, before it reads or writes anything that others
touch, until all that was launched before it is done and visible. What it reads of the weights need not wait. So the
time that a launch takes is hidden, whatever the order of kernels: who comes after one that does not take part (those of
cuBLAS) begins when that one ends.
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
    """The arguments of a launch that say whether it is early."""
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
    """Both, for kernels that have nothing to do before."""
    let_next_begin(EARLY)
    wait_for_others(EARLY)
