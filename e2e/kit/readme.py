"""The commands of the README's quick start, so that a journey runs what a reader would."""

from __future__ import annotations

import re

from e2e.cluster.place import ROOT

SECTION = "On Kubernetes"


def commands(section: str = SECTION) -> str:
    """All shell blocks of a section of the README, in their order, as one script."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no section {section!r}"
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", found[1], re.MULTILINE | re.DOTALL))
