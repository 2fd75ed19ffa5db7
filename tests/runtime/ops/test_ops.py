"""The fused kernels against the operations in PyTorch: in Triton's interpreter on a CPU, compiled on CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.integration


def test_the_kernels_compute_what_the_reference_does() -> None:
    """In a process of its own: the interpreter is chosen where the kernels are imported."""
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("compare_ops.py")], capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 0, result.stderr[-3000:]
    compared = "linear norm gate rotate_and_store choose decode extend"
    fp8 = "rotate_and_store_fp8 quantise_fp8 linear_fp8 decode_fp8 extend_fp8"
    assert result.stdout.split() == f"{compared} {fp8} pages overflow".split()
