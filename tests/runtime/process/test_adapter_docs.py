"""The blocks of docs/adapters.md run, in order, against a real server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.runtime_server import running

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "adapters.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.deep


def test_every_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert len(BLOCKS) == 4
    with running(ROOT / "models" / "tiny", "--no-events", f"--lora-root={tmp_path / 'adapters'}") as server:
        for number, block in enumerate(BLOCKS):
            source = block.replace("http://127.0.0.1:8000", server.url).replace(
                "http://127.0.0.1:9700", server.admin_url
            )
            exec(compile(source, f"{PAGE.name}, block {number}", "exec"), names)
