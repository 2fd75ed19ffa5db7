"""docs/language-compiler.md says what is true: its blocks are run in order, and print what stands below them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from treeline_lang.compiler.serialize import MAX_BYTES, MAX_STEPS, MAX_STREAMS

PAGE = (Path(__file__).parents[3] / "docs" / "language-compiler.md").read_text()


def test_blocks_print_what_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == PAGE.count("```python")
    assert len(blocks) >= 5
    names: dict[str, object] = {"__name__": "page"}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "page.py", "exec"), names)
        assert printed.getvalue() == shown


def test_bounds_are_those_of_the_reader():
    assert f"at most {MAX_BYTES >> 20} MiB, of {MAX_STREAMS} streams and {MAX_STEPS} steps" in PAGE
