"""Writes the code map in docs/architecture.md: every module once, with the first sentence of its docstring.

`python scripts/code_map.py` rewrites what stands between the markers; with `--check` it only says, by its exit status,
whether that is current.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
ROOMS = ("wire", "kube", "runtime", "epp", "operator", "lang", "sim", "bench", "conformance", "cli")
BEGIN, END = "<!-- code map: begin -->\n", "<!-- code map: end -->"


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, or of its first paragraph when it has no full stop."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split()).replace("``", "`")
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`\"])", re.sub(r":\w+:`", "`", paragraph))[0].rstrip(".").replace("|", "\\|")


def code_map() -> str:
    """A heading and a table a room."""
    lines: list[str] = []
    for room in ROOMS:
        package = next((ROOT / room / "src").glob("treeline*/py.typed")).parent
        lines += [f"### {room}/ (`{package.name}`)", "", f"{first_sentence(package / '__init__.py')}.", ""]
        modules = sorted(path for path in package.rglob("*.py") if not path.name.startswith("__"))
        if modules:
            lines += ["| Module | |", "|---|---|"]
            lines += [f"| `{room}/{path.relative_to(package)}` | {first_sentence(path)} |" for path in modules]
            lines += [""]
    return "\n".join(lines)


def with_map(page: str) -> str:
    """The page with today's map between its markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{code_map()}{END}{rest.split(END)[1]}"


def main() -> int:
    page = PAGE.read_text()
    current = with_map(page)
    if "--check" in sys.argv[1:]:
        return 0 if page == current else 1
    PAGE.write_text(current)
    return 0


if __name__ == "__main__":
    sys.exit(main())
