"""docs/examples: each script runs against a real server and prints what its last comment says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


def promised(script: str) -> list[str]:
    return [line.removeprefix("# ") for line in script.partition("# Prints:\n")[2].splitlines()]


def test_there_are_three() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_it_says(script: Path, tiny_url: str) -> None:
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=ROOT, timeout=240, check=False,
        env=os.environ | {"TREELINE_URL": tiny_url},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == promised(script.read_text())
    assert promised(script.read_text())
