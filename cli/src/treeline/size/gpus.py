"""GPUs that people rent, as their data sheets have them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int
    """Bytes that CUDA reports, a little less than the data sheet's."""
    tb_s: float | None = None
    """Bandwidth of its memory; None: not known, so no speed is estimated."""
    tflop_s: float | None = None
    """TFLOP/s of dense products in 16 bits."""
    has_fp8: bool = True
    """Whether it multiplies fp8: Ada and later do."""
    has_bfloat16: bool = True


def _gpu(name: str, gib: float, tb_s: float, tflop_s: float, has_fp8: bool = True, has_bfloat16: bool = True) -> Gpu:
    return Gpu(name, int(gib * GIB), tb_s, tflop_s, has_fp8, has_bfloat16)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", 178.3, 7.7, 2250),
        _gpu("h200", 139.8, 4.8, 989),
        _gpu("h100", 79.2, 3.35, 989),
        _gpu("a100-80", 79.2, 2.04, 312, has_fp8=False),
        _gpu("a100-40", 39.4, 1.56, 312, has_fp8=False),
        _gpu("l40s", 44.4, 0.86, 362),
        _gpu("rtx4090", 23.5, 1.01, 165),
        _gpu("a10", 22.1, 0.6, 125, has_fp8=False),
        _gpu("l4", 22.0, 0.3, 121),
        _gpu("t4", 14.6, 0.32, 65, has_fp8=False, has_bfloat16=False),
    )
}


def gpu(text: str) -> Gpu:
    """A name, or how many GiB it has."""
    if found := GPUS.get(text.lower()):
        return found
    number = text.lower().removesuffix("gib").removesuffix("gb").removesuffix("g").strip()
    try:
        if 1 <= (gib := float(number)) <= 4096:
            return Gpu(f"{gib:g} GiB", int(gib * GIB))
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(GPUS)}, nor a size like 24 (GiB)")
