"""The output of a run: JSON, and rows like other benchmarks'."""

from __future__ import annotations

import datetime
import os
import re
import shlex
from collections.abc import Sequence
from errno import EISDIR
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec

from treeline_bench.machine import this_machine, versions
from treeline_bench.metrics import row
from treeline_bench.report import measured, publish
from treeline_bench.results import Result, Row, write_whole
from treeline_bench.serving.figures import figures, medians, ratios
from treeline_bench.serving.measure import Measured, Run
from treeline_bench.serving.plan import Plan

PREFIX = "serving-"
"""Results in bench/results: one per dataset."""
LEFT_OUT = ("--api-key", "--output", "--results")
ROW_FIGURES = (
    "requests_s",
    "output_tokens_s",
    "goodput_s",
    "cached_share",
    "errors",
    *(
        f"{name}.{quantile}"
        for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
        for quantile in ("p50", "p90", "p99")
    ),
)


def command_of(argv: Sequence[str], *, public: bool) -> str:
    """The command without the key. `public`: also without paths, and hosts other than this one."""
    words: list[str] = []
    skip = False
    for word in argv:
        name = word.partition("=")[0]
        if skip:
            skip = False
        elif name in LEFT_OUT and (public or name == "--api-key"):
            skip = word == name
        else:
            words.append(_public(word) if public else word)
    return shlex.join(["treeline", "bench", "serving", *words])


def _public(word: str) -> str:
    def host(found: re.Match[str]) -> str:
        kept = found[2] in ("127.0.0.1", "localhost", "[::1]")
        return found[0] if kept else f"{found[1]}SERVER"

    if "://" in word:
        return re.sub(r"(https?://)(\[[^\]]*\]|[^:/?#]+)", host, word)
    flag, equals, value = word.rpartition("=")
    return f"{flag}{equals}{Path(value).name}" if "/" in value and Path(value).exists() else word


def check_writable(path: Path) -> None:
    """Creates the folder of an output file. Raises OSError before the run if that is impossible."""
    if path.is_dir():
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=path.parent):
        pass


def write_json(path: Path, run: Run, plan: Plan, argv: Sequence[str]) -> None:
    """Writes the whole result, each round of each server; `path` is replaced atomically."""
    first = run.measured[0].rounds
    document = {
        "benchmark": "serving",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_of(argv, public=False),
        "interrupted": run.interrupted,
        "machine": this_machine(),
        "versions": versions(),
        "workload": _workload(plan),
        "servers": [_server(one) for one in run.measured],
        "ratios": {other.server.name: ratios(first, other.rounds) for other in run.measured[1:]},
    }
    text = msgspec.json.format(msgspec.json.encode(document), indent=2)
    write_whole(path, text + b"\n")


def _workload(plan: Plan) -> dict[str, Any]:
    return {
        "dataset": plan.dataset.name,
        **{name: value for name, value in vars(plan.shape).items() if value is not None},
        "seed": plan.seed,
        "request_rate": plan.rate_per_s,
        "concurrency": plan.concurrency if plan.rate_per_s is None else None,
        "duration_s": plan.duration_s,
        "rounds": plan.rounds,
        "processes": plan.processes,
        "chat": plan.chat,
        "body": plan.body,
    }


def _server(one: Measured) -> dict[str, Any]:
    server = one.server
    return {
        "name": server.name,
        "url": server.url,
        "model": server.model,
        "engine": server.engine,
        "version": server.version,
        "medians": medians(one.rounds),
        "rounds": [msgspec.to_builtins(summary) | {"figures": figures(summary)} for summary in one.rounds],
    }


def write_results(folder: Path, run: Run, plan: Plan, argv: Sequence[str]) -> Result:
    """JSON, Markdown and SVG like `make bench`. Needs whole rounds of every server."""
    engines = {one.server.name: f"{one.server.engine} {one.server.version}".strip() for one in run.measured}
    more = {name: engine for name, engine in engines.items() if engine}
    result = measured(PREFIX + plan.dataset.name, command_of(argv, public=True), rows(run, plan), more)
    publish(result, f"Serving: {plan.dataset.name}", folder)
    return result


def rows(run: Run, plan: Plan) -> list[Row]:
    """Each server's rows; the first one's have the second's as reference. Then, for each other server, how much better
    the first is: throughput ÷ the other's, and the other's p90 to the first token ÷ its own."""
    ours, *others = run.measured
    beside = medians(others[0].rounds) if others else {}
    found = []
    for one in run.measured:
        values = medians(one.rounds)
        found += [
            row(f"serving.{name}.{one.server.name}", values[name], beside.get(name) if one is ours else None)
            for name in ROW_FIGURES
            if name in values
        ]
    for other in others:
        against = ratios(ours.rounds, other.rounds)
        vs = f"serving.vs_{other.server.name}.{plan.dataset.name}"
        if "output_tokens_s" in against:
            found.append(row(f"{vs}.throughput", against["output_tokens_s"]))
        if against.get("ttft_ms.p90"):
            found.append(row(f"{vs}.ttft_p90", 1 / against["ttft_ms.p90"]))
    return found
