"""CPU products with weights packed for oneDNN.

torch gives products of float32 to MKL, which takes slow kernels on processors that are not Intel's, and packs the
weights again in every call. oneDNN takes what the processor has, and reads weights from an order of its own, into which
they are brought once. On an EPYC with AVX-512, the products of models/tiny beside `F.linear`: float32 in half the time
from 4 rows on, bfloat16 1.2 to 1.5 times as fast with 2 to 64 rows, both about equal with one. On a Xeon with AVX-512,
MKL with weights as (inputs, outputs) takes a quarter to two thirds of oneDNN's time for a row of float32, and two
thirds for 32: on Intel's float32 is left to it. The operators are those that torch.compile puts in the place of
`linear` where weights are frozen (torch/_inductor/fx_passes/mkldnn_fusion.py).

A kernel is generated per number of rows, in 0.5 to 3 ms and with 0.6 MB or more. So there are few: long inputs are cut
into pieces that have a kernel, and the rest is padded to the next size.
"""

from __future__ import annotations

import bisect
import functools
import platform
from pathlib import Path

import torch
import torch.nn.functional as F

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
FILLED_UP = 128
"""Beyond it, padding would cost more than cutting saves."""


def can_pack(weight: torch.Tensor) -> bool:
    """Whether there are kernels and no faster ones: on x86, for float32 where MKL has no own kernels, and for bfloat16
    from AVX-512 on. Not measured on Arm."""
    if weight.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    of_bfloat16 = weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return of_bfloat16 or (weight.dtype == torch.float32 and not (_is_intel() and torch.backends.mkl.is_available()))


@functools.cache
def _is_intel() -> bool:
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and "GenuineIntel" in cpus.read_text()


def pack(weight: torch.Tensor) -> torch.Tensor:
    """(outputs, inputs) → an opaque copy that only `linear` and `to_dense` can read."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (tokens, inputs), bias (outputs,) → (tokens, outputs)."""
    rows = x.shape[0]
    if rows in ROWS:
        return _product(x, packed, bias)
    if rows > FILLED_UP:
        return torch.cat([linear(part, packed, bias) for part in x.split(_cut(rows))])
    missing = ROWS[bisect.bisect(ROWS, rows)] - rows
    return _product(F.pad(x, (0, 0, 0, missing)), packed, bias)[:rows]


def _cut(rows: int) -> list[int]:
    """Pieces that have a kernel, the largest first, and the rest."""
    sizes = []
    while rows > FILLED_UP:
        sizes.append(ROWS[bisect.bisect(ROWS, rows) - 1])
        rows -= sizes[-1]
    return [*sizes, rows] if rows else sizes


def _product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y
