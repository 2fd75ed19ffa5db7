"""What journeys measure, kept as the benchmarks keep theirs."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from treeline_bench.machine import this_machine, versions
from treeline_bench.metrics import row
from treeline_bench.report import page
from treeline_bench.results import Result, Row, write_result, write_whole

from e2e.cluster.place import ROOT

RECORD = "E2E_RECORD"
"""Set to 1, it lets a run replace the committed figures."""


class Figures:
    """One run's figures; the last value of a name counts."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def add(self, metric: str, value: float) -> None:
        self._rows[metric] = row(metric, value)

    def write(self) -> None:
        """Into bench/results if that is asked for, else beside the streams."""
        if not self._rows:
            return
        folder = ROOT / "bench/results" if os.environ.get(RECORD) == "1" else ROOT / ".cache/e2e"
        rows = [self._rows[name] for name in sorted(self._rows)]
        today = datetime.date.today().isoformat()
        result = Result("e2e", today, this_machine(), versions(), "make e2e", rows)
        write_result(result, folder)
        write_whole(Path(folder) / "e2e.md", page(result, "Journeys on a real Kubernetes").encode())
