"""The commands of the quick start on Kubernetes, so that a journey runs what a reader would."""

from __future__ import annotations

import re

from e2e.cluster.place import ROOT

PAGE = ROOT / "docs" / "kubernetes.md"


def commands() -> str:
    """Return all shell blocks of the page, in order, as one script."""
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
