"""`treeline sim calibrate`: the constants of the engine model from measured steps of an engine."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from treeline_bench.context import MODEL, ROOT, BenchmarkError
from treeline_bench.results import write_whole
from treeline_bench.scripts import printed
from treeline_bench.sim.model.measured import Measured, anchors_of
from treeline_bench.sim.model.speed import Speed

SCRIPT = ROOT / "runtime" / "benchmarks" / "step_times.py"
CHUNK_TOKENS = 1024
"""The runtime's default on a CPU."""
_PREFILL = re.compile(r"prefill\.(\d+)")
_DECODE = re.compile(r"decode\.b(\d+)\.ctx(\d+)")


class _Row(msgspec.Struct):
    metric: str
    value: float


def fit(anchors_ms: Mapping[str, float], chunk_tokens: int) -> Speed:
    """The constants whose steps come nearest to measured ones (`prefill.N`, `decode.bN.ctxC`, in milliseconds), by the
    squares of relative errors; none is negative. For engines whose products bound a step, as on a CPU: weights are read
    in no time. Raises ValueError where there are too few figures, or none that is positive."""
    rows = []
    for name, value in anchors_ms.items():
        if not value > 0:
            raise ValueError(f"{name} took {value:g} ms: measure again")
        if prefill := _PREFILL.fullmatch(name):
            tokens = int(prefill[1])
            rows.append([-(-tokens // chunk_tokens), 0.0, tokens, tokens**2, 0.0])
        elif decode := _DECODE.fullmatch(name):
            batch, context = int(decode[1]), int(decode[2])
            rows.append([1.0, batch, 0.0, 0.0, batch * context])
        else:
            raise ValueError(f"{name} is neither prefill.N nor decode.bN.ctxC")
    values = np.array(list(anchors_ms.values())) / 1000
    matrix = np.array(rows) / values[:, None]
    used = list(range(5))
    if len(rows) < 6:
        raise ValueError(f"{len(rows)} figures are too few for five constants")
    while True:
        scale = np.abs(matrix[:, used]).max(axis=0)
        found = np.linalg.lstsq(matrix[:, used] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if (found >= 0).all():
            break
        del used[int(np.argmin(found * scale))]
    constants = dict.fromkeys(range(5), 0.0) | dict(zip(used, map(float, found), strict=True))
    return Speed(
        fixed_s=constants[0],
        sequence_s=constants[1],
        token_s=constants[2],
        attention_s=constants[3],
        context_s=constants[4],
    )


def errors(measured: Measured) -> dict[str, float]:
    """How far the model is from each figure: model ÷ measured − 1."""
    return {name: model / measured.anchors_ms[name] - 1 for name, model in anchors_of(measured).items()}


def calibrate(args: argparse.Namespace, console: Console) -> int:
    """Measure, fit, show; write where asked. Raises BenchmarkError and ValueError."""
    console.print("measuring steps of the runtime: a minute or two", highlight=False)
    out = printed(SCRIPT, ["--model", str(args.model), "--rounds", str(args.rounds)], limit_s=1800)
    try:
        rows = msgspec.json.Decoder(_Row).decode_lines(out)
    except msgspec.DecodeError as error:
        raise BenchmarkError(f"{SCRIPT.name} printed something else than rows: {error}") from None
    anchors = {row.metric: round(row.value, 4) for row in rows}
    measured = Measured(CHUNK_TOKENS, anchors, fit(anchors, CHUNK_TOKENS))
    for name, share in errors(measured).items():
        print(f"{name:<20}{anchors[name]:>10.2f} ms   model {100 * share:+.1f} %")
    if args.write is not None:
        write_whole(args.write, msgspec.json.format(msgspec.json.encode(measured), indent=2) + b"\n")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `treeline sim calibrate`."""
    add = parser.add_argument
    add("--model", type=Path, default=MODEL, metavar="DIR", help="a checkpoint (default: the tiny model)")
    add("--rounds", type=int, default=8, metavar="N", help="of each figure, the least counts (default: %(default)s)")
    add("--write", type=Path, metavar="FILE", help="where the constants go, as in sim/model/tiny-cpu.json")
