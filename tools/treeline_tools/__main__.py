"""`python -m treeline_tools`: writes all generated files; with `--check` it lists the ones that are not current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from treeline_tools import (
    GENERATED,
    api_page,
    commands_page,
    crds,
    dashboards,
    events_page,
    http_page,
    metrics_page,
    policies,
    protos,
    rbac,
    reasons_page,
)

ROOT: Final = Path(__file__).parents[2]


def documents() -> dict[Path, str]:
    """Path in the checkout → text."""
    written = protos.modules(ROOT)
    for plural, crd in crds.all_crds().items():
        written[Path(f"crds/{plural}.yaml")] = GENERATED + crds.as_yaml(crd)
        written[Path(f"charts/treeline/templates/crds/{plural}.yaml")] = crds.chart_template(crd)
    written[Path("charts/treeline/templates/policies.yaml")] = policies.chart_template()
    written[Path("charts/treeline/files/rbac.yaml")] = rbac.chart_file()
    written[Path("docs/api.md")] = api_page.page()
    written[Path("docs/reasons.md")] = reasons_page.page()
    written[Path("docs/serve.md")] = commands_page.serve_page()
    written[Path("docs/commands.md")] = commands_page.commands_page()
    written[Path("docs/http-api.md")] = http_page.page()
    written[Path("docs/events.md")] = events_page.page()
    written[Path("docs/metrics.md")] = metrics_page.page()
    for name, board in dashboards.documents().items():
        written[Path("charts/treeline/files/dashboards", name)] = board
    return written


def main(arguments: list[str] | None = None) -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m treeline_tools", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: the one of this package)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where something differs")
    options = parser.parse_args(arguments)
    texts = {options.root / path: text for path, text in documents().items()}
    if options.check:
        stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
        sys.stderr.writelines(f"{path.relative_to(options.root)} differs: run `make generate`\n" for path in stale)
        return 1 if stale else 0
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
