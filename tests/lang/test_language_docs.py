"""The blocks of the language's pages run against a real server and print what the pages show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("language", "language-backends", "language-compiler")]
SHOWN_URL = "http://127.0.0.1:30000"


class Block(NamedTuple):
    kind: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [Block(match[1], match[2], page.count("\n", 0, match.start()) + 2) for match in found]


@pytest.fixture(scope="module")
def url(tiny_url: str) -> str:
    """Return the URL of the server that the pages tell the reader to start."""
    shown = [block.text.split() for page in PAGES for block in blocks(page.read_text()) if block.kind == "sh server"]
    assert len(shown) == 2
    for command in shown:
        assert command[:3] == ["treeline", "serve", "tiny"]
        assert f"http://127.0.0.1:{command[command.index('--port') + 1]}" == SHOWN_URL
    return tiny_url


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_block_does_what_the_page_says(
    path: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(ROOT / "models")
    names: dict[str, Any] = {"__name__": "language_page"}
    page = blocks(path.read_text())
    assert len(page) >= 6
    printed, where = "", 0
    for block in page:
        if block.kind == "text":
            assert printed == block.text, f"line {where} prints something else"
        elif block.kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as shown:
                exec(compile(block.text.replace(SHOWN_URL, url), "page.py", "exec"), names)
            printed, where = shown.getvalue(), block.line
        else:
            assert block.kind == "sh server", f"line {block.line}: no test runs a block of {block.kind!r}"
