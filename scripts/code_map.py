"""Writes docs/code-map.md: every module once, with the first sentence of its docstring.

`python scripts/code_map.py` writes the page; with `--check` it only says, by its exit status, whether that is current.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "code-map.md"
ROOMS = ("wire", "kube", "runtime", "epp", "operator", "lang", "sim", "bench", "conformance", "cli")
HEAD = """# Code map

Every module once, by the first sentence of its docstring; `scripts/code_map.py` writes this page.

"""


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, or of its first paragraph when it has no full stop."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split()).replace("``", "`")
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`\"])", re.sub(r":\w+:`", "`", paragraph))[0].rstrip(".").replace("|", "\\|")


def code_map() -> str:
    """The page: a heading and a table for each room."""
    lines: list[str] = []
    for room in ROOMS:
        package = next((ROOT / room / "src").glob("treeline*/py.typed")).parent
        lines += [f"## {room}/ (`{package.name}`)", "", f"{first_sentence(package / '__init__.py')}.", ""]
        modules = sorted(path for path in package.rglob("*.py") if not path.name.startswith("__"))
        if modules:
            lines += ["| Module | |", "|---|---|"]
            lines += [f"| `{room}/{path.relative_to(package)}` | {first_sentence(path)} |" for path in modules]
            lines += [""]
    return HEAD + "\n".join(lines)


def main() -> int:
    page = code_map()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text() == page else 1
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
