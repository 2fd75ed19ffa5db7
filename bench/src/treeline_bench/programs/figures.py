"""The rows of a result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treeline_bench.metrics import row
from treeline_bench.programs.ablations import ABLATIONS, FULL, NONE
from treeline_bench.programs.oracle import Found
from treeline_bench.programs.workloads import WORKLOADS
from treeline_bench.results import Row, number, table


@dataclass(frozen=True)
class Measured:
    """A workload under one ablation. `latency_s`: the mean of programs that ran alone; None if not measured."""

    programs: int
    duration_s: float
    found: Found
    latency_s: float | None = None

    @property
    def throughput(self) -> float:
        """Programs a second."""
        return self.programs / self.duration_s


Table = Mapping[str, Mapping[str, Measured]]
"""Workload → ablation → measurement."""


def geomean(values: Sequence[float]) -> float:
    """The geometric mean of at least one positive number."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def rows_of(measured: Table, calls: Mapping[str, float]) -> list[Row]:
    """Summary rows first, then details. `calls`: ratios of API speculation by form; {} if not measured."""
    found = _summary(measured)
    if calls:
        found.append(row("programs.api_speculation_call_ratio", min(calls.values())))
        found += [row(f"programs.api_speculation_call_ratio.{form}", ratio) for form, ratio in calls.items()]
    for workload, by_ablation in measured.items():
        for ablation, one in by_ablation.items():
            beside = by_ablation.get(NONE.name) if ablation != NONE.name else None
            tail = f"{workload}.{ablation}"
            found += [
                row(f"programs.throughput.{tail}", one.throughput, beside.throughput if beside else None),
                row(f"programs.hit_rate.{tail}", one.found.rate, one.found.best_rate if one.found.best else None),
            ]
    return found


def _summary(measured: Table) -> list[Row]:
    found: list[Row] = []
    full = {name: by_ablation[FULL.name] for name, by_ablation in measured.items() if FULL.name in by_ablation}
    if full:
        shares = {name: one.found.vs_optimal for name, one in full.items()}
        found.append(row("programs.hit_vs_optimal.min", min(shares.values())))
        found += [row(f"programs.hit_vs_optimal.{name}", share) for name, share in shares.items()]
    both = {name: (one, measured[name][NONE.name]) for name, one in full.items() if NONE.name in measured[name]}
    throughput = {name: one.throughput / none.throughput for name, (one, none) in both.items()}
    latency = {
        name: one.latency_s / none.latency_s for name, (one, none) in both.items() if one.latency_s and none.latency_s
    }
    for metric, ratios in (("throughput_full_over_none", throughput), ("latency_full_over_none", latency)):
        if ratios:
            found.append(row(f"programs.{metric}.geomean", geomean(list(ratios.values()))))
            found += [row(f"programs.{metric}.{name}", ratio) for name, ratio in ratios.items()]
    return found


def table_of(measured: Table) -> str:
    """A Markdown table: programs per second of every workload and ablation, and hit rates against the optimum."""
    names = [name for name in ABLATIONS if any(name in by_ablation for by_ablation in measured.values())]
    header = ["workload", *(ABLATIONS[name].title for name in names), "hit rate", "of the best"]
    lines = []
    for workload, by_ablation in measured.items():
        full = by_ablation.get(FULL.name)
        found = [f"{full.found.rate:.1%}", f"{full.found.vs_optimal:.1%}"] if full else ["–", "–"]
        lines.append([WORKLOADS[workload].title, *(number(by_ablation[name].throughput) for name in names), *found])
    return "Programs a second:\n\n" + table(header, lines)
