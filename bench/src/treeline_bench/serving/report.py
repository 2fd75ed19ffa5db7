"""Tables on stdout."""

from __future__ import annotations

import statistics
from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from treeline_bench.results import number
from treeline_bench.serving.figures import QUANTILES, RATES, TIMES, Line, medians, ratios
from treeline_bench.serving.measure import Measured, Run

WORDS = {
    "ttft_ms": "time to first token",
    "itl_ms": "between chunks (itl)",
    "tpot_ms": "per output token (tpot)",
    "e2e_ms": "whole answer (e2e)",
}


def show(run: Run, console: Console) -> None:
    """Tables of everything measured, with notes."""
    measured = [one for one in run.measured if one.rounds]
    if len(measured) == 1:
        _one(measured[0], console)
    elif measured:
        _several(measured, console)
    for one in measured:
        for note in notes(one):
            console.print(f"{one.server.name}: {note}", highlight=False, markup=False, soft_wrap=True)
    if run.interrupted:
        said = "interrupted: figures until then" if measured else "interrupted before anything was sent"
        console.print(said, style="yellow", highlight=False)


def described(one: Measured) -> str:
    server = one.server
    return escape(" ".join(part for part in (server.name, server.engine, server.version, server.model) if part))


def _heading(one: Measured) -> str:
    said = f"{one.server.engine} {one.server.version}".strip()
    return escape(f"{one.server.name}\n{said}" if said else one.server.name)


def _one(measured: Measured, console: Console) -> None:
    values = medians(measured.rounds)
    last = measured.rounds[-1]
    answered = sum(summary.completed for summary in measured.rounds)
    requests = sum(summary.requests for summary in measured.rounds)
    rates = Table(title=described(measured), title_justify="left", box=None, show_header=False)
    rates.add_row("answered", f"{answered} of {requests} requests")
    rates.add_row("in", f"{number(last.duration_s)} s" + _rounds(measured))
    for line in RATES:
        if line.name in values:
            rates.add_row(line.words, f"{_shown(line, values[line.name])} {line.unit}")
    rates.add_row("this client", last.client.words)
    console.print(rates)
    times = Table(title="milliseconds", title_justify="left", box=None)
    times.add_column("")
    for quantile in QUANTILES:
        times.add_column(quantile, justify="right")
    for name in TIMES:
        if f"{name}.mean" in values:
            times.add_row(WORDS[name], *(number(values[f"{name}.{quantile}"]) for quantile in QUANTILES))
    console.print(times)


def _several(measured: list[Measured], console: Console) -> None:
    """A column per server; each but the first has the first's ratio to it."""
    ours, *others = measured
    table = Table(title=_rounds(ours).removeprefix(", ") or None, title_justify="left", box=None)
    table.add_column("", no_wrap=True)
    table.add_column(_heading(ours), justify="right")
    for other in others:
        table.add_column(_heading(other), justify="right")
        table.add_column("ratio", justify="right")
    values = [medians(one.rounds) for one in measured]
    all_ratios = [ratios(ours.rounds, other.rounds) for other in others]
    lines = [
        *RATES,
        *(
            Line(f"{name}.{quantile}", f"{name.removesuffix('_ms')} {quantile}", "ms", "lower")
            for name in TIMES
            for quantile in QUANTILES[:-1]
        ),
    ]
    for line in lines:
        if not any(line.name in one for one in values):
            continue
        cells = [_cell(line, values[0])]
        for theirs, ratio in zip(values[1:], all_ratios, strict=True):
            cells += [_cell(line, theirs), _ratio(line, ratio.get(line.name))]
        table.add_row(f"{line.words} {line.unit}".strip(), *cells)
    console.print(table)
    console.print(f"ratio: {ours.server.name} ÷ the other; green is better", highlight=False, markup=False)


def _cell(line: Line, values: dict[str, float]) -> str:
    return _shown(line, values[line.name]) if line.name in values else "–"


def _shown(line: Line, value: float) -> str:
    return f"{100 * value:.1f}" if line.share else number(value)


def _ratio(line: Line, ratio: float | None) -> str:
    if ratio is None:
        return "–"
    if line.better is None or ratio == 1:
        return f"{ratio:.2f}"
    good = ratio > 1 if line.better == "higher" else ratio < 1
    return f"[{'green' if good else 'red'}]{ratio:.2f}[/]"


def _rounds(measured: Measured) -> str:
    return "" if len(measured.rounds) == 1 else f", medians of {len(measured.rounds)} rounds"


def notes(measured: Measured) -> list[str]:
    """Notes that readers of the figures need, over all rounds."""
    rounds = measured.rounds
    failed: Counter[str] = Counter()
    for summary in rounds:
        failed.update(summary.errors)
    found = []
    for kind, count in failed.most_common():
        said = next(summary.examples[kind] for summary in rounds if kind in summary.examples).strip()
        found.append(f"{count} × {kind}" + (f": {said}" if said else ""))
    found += [f"gave up: {summary.gone}" for summary in rounds if summary.gone]
    if unfinished := sum(summary.unfinished for summary in rounds):
        found.append(f"{unfinished} requests were under way at the end and are not counted")
    if short := sum(summary.short for summary in rounds):
        found.append(f"{short} answers are shorter than asked for (does it know ignore_eos?)")
    if more := sum(summary.prompt_difference for summary in rounds):
        found.append(f"it counts {more:+d} prompt tokens over all first prompts (template, BOS)")
    per_chunk = statistics.median(summary.tokens_per_chunk for summary in rounds)
    if per_chunk and not 0.95 <= per_chunk <= 1.05:
        found.append(f"{per_chunk:.2f} tokens a chunk: itl is the time between chunks, not tokens")
    clients = (summary.client for summary in rounds if summary.client.trouble)
    busiest = max(clients, key=lambda client: max(client.late_ms_p99, client.lag_ms_p99), default=None)
    if busiest is not None:
        found.append(
            f"the client itself did not keep up: {busiest.trouble}; take more --processes, or a machine of its own"
        )
    return found
