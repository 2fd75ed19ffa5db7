"""docs/language-compiler.md says what is true: its blocks are run in order, and print what stands below them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "language-compiler.md").read_text()


def test_blocks_print_what_the_page_shows():
    blocks = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == PAGE.count("```python")
    assert len(blocks) >= 3
    names: dict[str, object] = {"__name__": "page"}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "page.py", "exec"), names)
        assert printed.getvalue() == shown
