"""The example of docs/speculation.md prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = re.compile(r"^```python\n(.*?print\(.*\)  # (.*?)\n)```$", re.DOTALL | re.MULTILINE)
PAGE = (ROOT / "docs" / "speculation.md").read_text()


def test_the_example_prints_what_the_page_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    ((source, printed),) = EXAMPLE.findall(PAGE)
    exec(compile(source, "docs/speculation.md", "exec"), {})
    assert capsys.readouterr().out == printed + "\n"
