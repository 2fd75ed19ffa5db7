"""The blocks of docs/structured-output.md run, in order, against a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runtime_server import running

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "structured-output.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(ROOT / "models" / "tiny", "--no-events") as server:
        yield server.url


def test_every_block_of_the_page_runs(url: str) -> None:
    names: dict[str, Any] = {}
    assert len(BLOCKS) > 12
    for number, block in enumerate(BLOCKS):
        source = block.replace("http://127.0.0.1:8000", url)
        exec(compile(source, f"{PAGE.name}, block {number}", "exec"), names)
