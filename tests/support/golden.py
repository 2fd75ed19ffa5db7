"""Golden texts: one case in full, the others as their differences from it.

A case is a number of named parts, such as objects by kind and name. `TREELINE_GOLDEN=write pytest …` writes the files
anew; look at `git diff` then: it shows what has changed, once.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

Parts = Mapping[str, str]


class Plain(yaml.SafeDumper):
    """A dumper without anchors: everything is written out in place."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def check(folder: Path, case: str, parts: Parts, base_case: str, base: Parts) -> None:
    """Compare a case with its file: `CASE.yaml` for the base, `CASE.diff` for the others."""
    if case == base_case:
        path, text = (
            folder / f"{case}.yaml",
            "".join(f"# {name}\n{part}---\n" for name, part in parts.items()),
        )
    else:
        path, text = folder / f"{case}.diff", "".join(_differences(base_case, base, parts))
    if os.environ.get("TREELINE_GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "TREELINE_GOLDEN=write accepts it; then read the difference"


def _differences(base_case: str, base: Parts, parts: Parts) -> Iterator[str]:
    yield f"# What differs from {base_case}.yaml, part by part, in this order.\n"
    for name, part in parts.items():
        if name not in base:
            yield f"added: {name}\n" + "".join(f"+{line}\n" for line in part.splitlines())
        elif part == base[name]:
            yield f"same: {name}\n"
        else:
            yield f"changed: {name}\n"
            changed = difflib.unified_diff(base[name].splitlines(), part.splitlines(), n=2, lineterm="")
            # Line numbers would change with every line above.
            yield from ("@@\n" if line.startswith("@@") else f"{line}\n" for line in list(changed)[2:])
    yield from (f"absent: {name}\n" for name in base if name not in parts)
