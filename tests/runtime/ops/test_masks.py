"""The kernel that leaves out forbidden tokens, against the operations in PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = [pytest.mark.integration, pytest.mark.deep]


def test_the_kernel_forbids_what_the_reference_does() -> None:
    """In a process of its own: the interpreter is chosen where the kernels are imported."""
    script = Path(__file__).with_name("compare_masks.py")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
