"""Writes what is generated from the typed API: CRDs, the chart's templates of them and of the policies, docs/api.md."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from treeline_operator.api import crds, docs, policies
from treeline_operator.api.growth import Definition, retreat

ROOT: Final = Path(__file__).parents[4]
RELEASED: Final = Path("crds/released/v1alpha1.json")
"""The definitions of the last release, which those of now must contain."""


def documents() -> dict[Path, str]:
    """Everything that is generated: path in the checkout → text."""
    written = {}
    for plural, crd in crds.all_crds().items():
        written[Path(f"crds/{plural}.yaml")] = crds.GENERATED + crds.as_yaml(crd)
        written[Path(f"charts/treeline/templates/crds/{plural}.yaml")] = crds.chart_template(crd)
    written[Path("charts/treeline/templates/policies.yaml")] = policies.chart_template()
    written[Path("docs/api.md")] = docs.page()
    return written


def definitions() -> dict[str, Definition]:
    """What clients rely on of every kind, by its plural name."""
    found = {}
    for plural, crd in crds.all_crds().items():
        (version,) = crd["spec"]["versions"]
        found[plural] = {
            **{key: crd["spec"][key] for key in ("scope", "names")},
            "subresources": version["subresources"],
            "schema": version["schema"]["openAPIV3Schema"],
        }
    return found


def problems(root: Path) -> list[str]:
    """What of a checkout is not as the typed API says, or takes away what was released."""
    found = [
        f"{path} differs: run `python -m treeline_operator.api`"
        for path, text in documents().items()
        if not (root / path).exists() or (root / path).read_text() != text
    ]
    now = definitions()
    for plural, released in json.loads((root / RELEASED).read_text()).items():
        found += [f"{plural}{way}; v1alpha1 only grows" for way in retreat(released, now.get(plural, {}))]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Write, check, or note the definitions as released."""
    parser = argparse.ArgumentParser(prog="python -m treeline_operator.api", description=__doc__)
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="the checkout (default: the one of this package)"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", action="store_true", help="write nothing; fail where something differs or shrinks"
    )
    mode.add_argument(
        "--release", action="store_true", help=f"note the definitions of now as released in {RELEASED}"
    )
    options = parser.parse_args(arguments)
    if options.check:
        found = problems(options.root)
        sys.stderr.writelines(f"{problem}\n" for problem in found)
        return 1 if found else 0
    texts = {RELEASED: json.dumps(definitions(), indent=1) + "\n"} if options.release else documents()
    for path, text in texts.items():
        (options.root / path).parent.mkdir(parents=True, exist_ok=True)
        (options.root / path).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
