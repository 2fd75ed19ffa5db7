"""The fused kernels against the operations in PyTorch: in Triton's interpreter on a CPU, compiled on CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = [pytest.mark.integration, pytest.mark.deep]

GROUPS = {
    "attention": ("compare_attention.py", "decode decode_fp8 extend extend_fp8 spans"),
    "shared_prefixes": ("compare_attention.py", "decode_shared decode_shared_fp8"),
    "products": ("compare_ops.py", "linear linear_fp8 quantise_fp8 route experts adapters"),
    "rest": (
        "compare_ops.py",
        "cells norm gate softcap rotate_and_store rotate_and_store_fp8 choose forbid pages overflow",
    ),
}


@pytest.mark.parametrize("group", GROUPS)
def test_the_kernels_equal_the_reference(group: str) -> None:
    """It runs in a process of its own: the interpreter is chosen when the kernels are imported."""
    script, compared = GROUPS[group]
    path = Path(__file__).with_name(script)
    result = subprocess.run([sys.executable, path, group], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == compared.split()
