"""Measurements that a room makes in its own process: a script of its ``benchmarks/`` that prints rows as JSON."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from treeline_bench.context import ROOT, BenchmarkError
from treeline_bench.processes import before_exec


class _Printed(msgspec.Struct):
    metric: str
    value: float


def parse(printed: str, metrics: Sequence[str], what: str) -> dict[str, float]:
    """Values by metric from JSON: a list of rows, or a row a line. Raises BenchmarkError when one is missing."""
    try:
        if printed.lstrip().startswith("["):
            found = msgspec.json.decode(printed, type=list[_Printed])
        else:
            found = msgspec.json.Decoder(_Printed).decode_lines(printed)
    except msgspec.DecodeError as error:
        raise BenchmarkError(f"{what} printed something else than rows: {error}") from error
    values = {each.metric: each.value for each in found}
    if missing := [name for name in metrics if name not in values]:
        raise BenchmarkError(f"{what} did not report {', '.join(missing)}")
    return values


def printed(script: Path, args: Sequence[str], what: str, limit_s: float) -> str:
    """What a script prints. Raises BenchmarkError where it fails or takes longer than ``limit_s``."""
    if not script.exists():
        where = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
        raise BenchmarkError(f"{where} is not here: run this in a checkout of the repository")
    process = subprocess.Popen(
        [sys.executable, str(script), *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=before_exec(None),
    )
    try:
        out, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{what} took over {limit_s:g} s") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise BenchmarkError(f"{what} exited with status {process.returncode}:\n{said[-2000:]}")
    return out
