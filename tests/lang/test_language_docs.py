"""The language's pages say what is true: their blocks are run, in order, against a real server, and print what they
show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "language.md", ROOT / "docs" / "language-backends.md"]
SHOWN_URL = "http://127.0.0.1:30000"


class Block(NamedTuple):
    kind: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [Block(match[1], match[2], page.count("\n", 0, match.start()) + 2) for match in found]


def server_flags(page: list[Block]) -> list[str]:
    """Of the server that the page tells its reader to start."""
    (command,) = [block.text.split() for block in page if block.kind == "sh server"]
    assert command[:2] == ["treeline", "serve"]
    assert f"http://127.0.0.1:{command[command.index('--port') + 1]}" == SHOWN_URL
    return command[2:]


@pytest.fixture(scope="module")
def url(tiny_url: str) -> str:
    for page in PAGES:
        flags = server_flags(blocks(page.read_text()))
        assert flags[flags.index("--model") + 1] == "models/tiny"
    return tiny_url


def run_python(path: Path, block: Block, url: str, names: dict[str, Any]) -> str:
    code = compile("\n" * (block.line - 1) + block.text.replace(SHOWN_URL, url), str(path), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_block_does_what_the_page_says(
    path: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(ROOT / "models")
    names: dict[str, Any] = {"__name__": "language_page"}
    page = blocks(path.read_text())
    assert len(page) >= 7
    printed, where = "", 0
    for block in page:
        if block.kind == "text":
            assert printed == block.text, f"line {where} prints something else"
        elif block.kind == "python":
            printed, where = run_python(path, block, url, names), block.line
        else:
            assert block.kind == "sh server", f"line {block.line}: nobody runs a block of {block.kind!r}"
