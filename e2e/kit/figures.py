"""Figures that journeys measure, kept in the benchmarks' format."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from treeline_bench.metrics import metric, row
from treeline_bench.report import measured, page
from treeline_bench.results import write_result, write_whole

from e2e.cluster.place import ROOT

KEPT = ".cache/e2e"
"""The folder of a run's figures, below the repository's root."""
RECORD = "E2E_RECORD"
"""Set to 1, it lets a run replace the committed figures."""


def figure(name: str, found: Sequence[float]) -> float:
    """Reduce the measurements of a figure to one: the sum of streams, else the name's percentile or the largest
    time."""
    if metric(name).unit == "streams":
        return sum(found)
    if name.endswith(".p95"):
        return sorted(found)[math.ceil(0.95 * len(found)) - 1]
    return max(found)


class Figures:
    """One run's figures: the measurements of all journeys, by metric."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {}

    def add(self, name: str, *found: float) -> None:
        """Add a measurement. Raises KeyError for an unknown metric."""
        metric(name)
        self._found.setdefault(name, []).extend(found)

    def write(self) -> None:
        """Write the figures: into bench/results if E2E_RECORD asks for it, else beside the streams."""
        if not self._found:
            return
        folder = ROOT / ("bench/results" if os.environ.get(RECORD) == "1" else KEPT)
        rows = [row(name, figure(name, found)) for name, found in sorted(self._found.items())]
        result = measured("e2e", "make e2e", rows)
        write_result(result, folder)
        write_whole(Path(folder) / "e2e.md", page(result, "Journeys on a real Kubernetes").encode())
