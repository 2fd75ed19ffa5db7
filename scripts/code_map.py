"""Writes docs/code-map.md: the larger modules of each room, one line each from the module's docstring.

`python scripts/code_map.py` writes the page. With `--check` it only exits with 1 if the page is out of date.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "code-map.md"
ROOMS = ("wire", "kube", "runtime", "epp", "operator", "lang", "sim", "bench", "conformance", "cli")
FEWEST_LINES = 100
HEAD = f"""# Code map

Modules with at least {FEWEST_LINES} lines and what each is for. `scripts/code_map.py` writes this page from docstrings.

"""


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, up to the first colon or semicolon."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split()).replace("``", "`")
    return (
        re.split(r"(?<=[.!?])\s+(?=[A-Z`\"])|[:;] ", re.sub(r":\w+:`", "`", paragraph))[0]
        .rstrip(".:")
        .replace("|", "\\|")
    )


def modules(package: Path) -> list[Path]:
    """The modules that the page names."""
    found = (path for path in package.rglob("*.py") if not path.name.startswith("__"))
    return sorted(path for path in found if len(path.read_text().splitlines()) >= FEWEST_LINES)


def code_map() -> str:
    """The page: a heading and a table for each room."""
    lines: list[str] = []
    for room in ROOMS:
        package = next((ROOT / room / "src").glob("treeline*/py.typed")).parent
        lines += [f"## {room}/ (`{package.name}`)", "", f"{summary(package / '__init__.py')}.", ""]
        if named := modules(package):
            lines += ["| Module | |", "|---|---|"]
            lines += [f"| `{room}/{path.relative_to(package)}` | {summary(path)} |" for path in named]
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
