"""`treeline size`: its arguments and its output."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.download import ModelNotFound
from treeline_runtime.models.config import ModelError
from treeline_wire.command_line import Parser

from treeline.printable import printable
from treeline.size.estimate import BUSY, Fit, Load, Replicas, Speed, fit, replicas, smallest_tp_size, with_fp8
from treeline.size.gpus import GIB, GPUS, Gpu, gpu
from treeline.size.source import Source, read_source

EPILOG = """\
examples:
  treeline size meta-llama/Llama-3.1-8B-Instruct                     on each GPU that is known
  treeline size ./models/mine --gpu h100 --context 32768             sequences of 32,768 tokens on an H100
  treeline size Qwen/Qwen3-30B-A3B --gpu 48 --concurrency 500        GPUs of 48 GiB for 500 sequences at once
  treeline size meta-llama/Llama-3.1-70B-Instruct --quantization fp8 --gpu h200 \\
    --requests-per-s 5 --prompt-tokens 2000 --output-tokens 300 --prefix-share 0.5
                                                                     replicas for a load

From a Hugging Face id only config.json and the index of the weights are fetched (HF_TOKEN if gated). What fits is
computed as `treeline serve` computes it; speeds are estimates (docs/capacity.md). Exit status 1: it does not fit on
--gpu."""


def parser() -> argparse.ArgumentParser:
    size = Parser(
        prog="treeline size",
        usage="%(prog)s [OPTIONS] MODEL",
        description="Which GPUs a model needs, and how many sequences fit: from its config.json alone.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size.add_argument("model", metavar="MODEL", help="a checkpoint folder, a Hugging Face id (org/name), or tiny")
    size.add_argument("--gpu", type=gpu, metavar="NAME", help=f"{', '.join(GPUS)}, or GiB (default: each of them)")
    size.add_argument("--count", type=_positive, metavar="N", help="available GPUs")
    size.add_argument("--context", type=_positive, metavar="TOKENS", help="length of a sequence (default: the longest)")
    size.add_argument("--concurrency", type=_positive, metavar="N", help="sequences that must fit at once")
    size.add_argument("--json", action="store_true", help="print JSON")
    serve = size.add_argument_group("as for treeline serve")
    serve.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    serve.add_argument("--quantization", choices=("auto", "fp8"), default="auto", help="fp8 = quantised at load")
    serve.add_argument("--kv-dtype", choices=("auto", "fp8_e4m3"), default="auto", help="type of the KV cache")
    serve.add_argument("--tp-size", type=_positive, metavar="N", default=1, help="GPUs that share the model")
    serve.add_argument("--pp-size", type=_positive, metavar="N", default=1, help="stages, each on --tp-size GPUs")
    serve.add_argument(
        "--ep-size", type=_positive, metavar="N", default=1, help="these N GPUs share its experts as a whole"
    )
    serve.add_argument("--mem-fraction", type=float, metavar="F", help="share of the GPU's memory (default: 0.85)")
    load = size.add_argument_group("replicas for a load")
    load.add_argument("--requests-per-s", type=_above_0, metavar="R", help="load to size for")
    load.add_argument(
        "--prompt-tokens", type=_positive, metavar="N", default=1000, help="per request (default: %(default)s)"
    )
    load.add_argument(
        "--output-tokens", type=_positive, metavar="N", default=200, help="per request (default: %(default)s)"
    )
    load.add_argument("--prefix-share", type=_share, metavar="S", default=0.0, help="cached share of prompts, 0 to 1")
    return size


def _positive(text: str) -> int:
    if text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 40:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")


def _above_0(text: str) -> float:
    if (value := _number(text)) > 0:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def _share(text: str) -> float:
    if 0 <= (value := _number(text)) <= 1:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


@dataclass(frozen=True)
class Row:
    """A GPU and its answer to the question."""

    fit: Fit
    tokens: int
    """Tokens of a sequence."""
    speed: Speed | None
    replicas: Replicas | None
    gpus: int | None
    """GPUs that `--concurrency` needs."""

    @property
    def sequences(self) -> int:
        return self.fit.sequences(self.tokens)


def main(argv: Sequence[str]) -> int:
    """Print what fits. Status 1: the model does not fit on the named GPU, or cannot be read."""
    arguments = parser()
    args = arguments.parse_args(argv)
    try:
        config = SchedulerConfig(
            model=args.model,
            dtype=args.dtype,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_dtype,
            mem_fraction=args.mem_fraction,
            tp_size=args.tp_size,
            pp_size=args.pp_size,
            ep_size=args.ep_size,
        )
        source = read_source(args.model)
        tokens = args.context or source.model.max_position
        if tokens > source.model.longest_context:
            raise ConfigError(f"--context {tokens} is more than the model's {source.model.longest_context} positions")
        wanted = [args.gpu] if args.gpu else [gpu for gpu in GPUS.values() if gpu.has_fp8 or args.kv_dtype == "auto"]
        rows = [_row(source, config, gpu, tokens, args) for gpu in wanted]
    except (ConfigError, ModelError, ModelNotFound) as error:
        print(f"treeline size: error: {printable(str(error))}", file=sys.stderr)
        return 1
    advice = _advice(source, config, rows) if not any(row.fit.cache_tokens for row in rows) else ""
    if args.json:
        print(json.dumps(_as_json(args.model, source, rows, advice), indent=2))
    else:
        _show(args, source, rows, advice)
    return 1 if args.gpu and not rows[0].sequences else 0


def _row(source: Source, config: SchedulerConfig, gpu: Gpu, tokens: int, args: argparse.Namespace) -> Row:
    found = fit(source.model, config, gpu)
    speed = Speed(source.model, found) if gpu.tb_s is not None and found.cache_tokens else None
    needed = None
    if args.requests_per_s and speed is not None:
        load = Load(args.requests_per_s, args.prompt_tokens, args.output_tokens, args.prefix_share)
        needed = replicas(load, found, speed)
    sequences = found.sequences(tokens)
    gpus = -(-args.concurrency // sequences) * found.gpus if args.concurrency and sequences else None
    return Row(found, tokens, speed, needed, gpus)


def _advice(source: Source, config: SchedulerConfig, rows: Sequence[Row]) -> str:
    """Says what is missing, and which GPU or setting would do, if the model fits on none of the GPUs."""
    least = min(rows, key=lambda row: row.fit.shortage).fit
    one = f"one {least.gpu.name}" if least.gpus == 1 else f"{least.gpus} {least.gpu.name}"
    each = "" if least.gpus == 1 else " on each"
    said = f"It does not fit on {one}: {_gib(least.shortage)} are missing{each}."
    if tp_size := smallest_tp_size(source.model, config, least.gpu):
        said += f" With --tp-size {tp_size} it fits on {tp_size * least.pp_size} of them."
    together = "" if least.gpus == 1 else f"{least.gpus} of "
    kinds = [gpu for gpu in GPUS.values() if gpu.has_fp8 or config.kv_cache_dtype == "auto"]
    larger = [gpu.name for gpu in kinds if fit(source.model, config, gpu).cache_tokens]
    if larger:
        said += f" It fits on {together}{', '.join(larger)}."
    if source.model.moe is None and source.model.quantization is None and config.quantization == "auto":
        smaller = [gpu.name for gpu in kinds if fit(source.model, with_fp8(config), gpu).cache_tokens]
        if smaller:
            said += f" With --quantization fp8 it fits on {together}{', '.join(smaller)}."
    return said


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.1f} MiB"


def _count(parameters: int) -> str:
    """Short scale, as people say it: 70.55 B."""
    for letter, unit in (("B", 1e9), ("M", 1e6)):
        if parameters >= unit / 10:
            return f"{parameters / unit:.2f} {letter}"
    return f"{parameters / 1e3:.1f} K" if parameters else "0"


def _show(args: argparse.Namespace, source: Source, rows: Sequence[Row], advice: str) -> None:
    console = Console(highlight=False, soft_wrap=True)
    model, some = source.model, rows[0].fit
    console.print(f"[bold]{escape(printable(args.model))}[/]: {model.architecture}, {model.max_position:,} positions\n")
    parts = Table(box=None, pad_edge=False)
    for title in ("weights", "parameters", "for a token", "memory"):
        parts.add_column(title, justify="left" if title == "weights" else "right")
    for part in some.parts:
        parts.add_row(part.name, _count(part.parameters), _count(part.active), _gib(part.bytes))
    total, active = (sum(getattr(part, name) for part in some.parts) for name in ("parameters", "active"))
    parts.add_row("[bold]all[/]", _count(total), _count(active), _gib(some.weights))
    console.print(parts)
    if some.gpus > 1:
        console.print(f"Memory, here and below, is that of each of {some.gpus} GPUs that share the model.")
    if source.stored_bytes is not None:
        console.print(f"In files: {_gib(source.stored_bytes)}.")
    each = some.kv_bytes_per_token
    console.print(
        f"\nKV cache in {some.kv_dtype}: {each / 1024:g} KiB a token, {_gib(each * rows[0].tokens)} for a sequence of "
        f"{rows[0].tokens:,} tokens."
    )
    if model.scoring.windows:
        console.print("Layers with a window keep all tokens: windows save time here, not memory.")
    console.print()
    console.print(_gpu_table(args, rows))
    for line in _remarks(args, rows, advice):
        console.print(line)


def _gpu_table(args: argparse.Namespace, rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    titles = ["\n\nGPU", "\nmemory,\nGiB", "tokens\nin the\ncache", f"sequences\nof {rows[0].tokens:,}\ntokens"]
    titles += ["tokens/s,\none\nsequence", "tokens/s,\nall\ntogether", "\nprompt\ntokens/s"]
    titles += ["\n\nGPUs"] if args.concurrency else []
    titles += ["\n\nreplicas"] if args.requests_per_s else []
    for title in titles:
        table.add_column(title, justify="left" if title.endswith("GPU") else "right", no_wrap=True)
    for row in rows:
        found = row.fit
        cells = [found.gpu.name, f"{found.gpu.memory / GIB:.1f}"]
        if found.cache_tokens:
            cells += [f"{found.cache_tokens:,}", f"{row.sequences:,}"]
            cells += _speeds(row) if row.speed is not None and row.sequences else ["-"] * 3
            cells += [_or_dash(row.gpus)] if args.concurrency else []
            cells += [_or_dash(row.replicas.count if row.replicas else None)] if args.requests_per_s else []
        else:
            cells += ["none", "0"]
        table.add_row(*cells, style="" if row.sequences else "dim")
    return table


def _speeds(row: Row) -> list[str]:
    figures = _figures(row)
    return [f"{figures[name]:,.0f}" for name in ("tokens_s_one", "tokens_s_all", "prompt_tokens_s")]


def _figures(row: Row) -> dict[str, float]:
    """Estimates, of sequences that are half as long as they may become."""
    assert row.speed is not None
    half = row.tokens / 2
    prompt = min(row.tokens, 4096)
    return {
        "tokens_s_one": 1 / row.speed.step_s(1, half),
        "tokens_s_all": row.sequences / row.speed.step_s(row.sequences, half),
        "prompt_tokens_s": prompt / row.speed.prefill_s(prompt),
    }


def _or_dash(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _remarks(args: argparse.Namespace, rows: Sequence[Row], advice: str) -> list[str]:
    said = [f"\n{advice}"] if advice else []
    first = rows[0]
    if any(row.speed for row in rows):
        said.append(
            "\nWhat fits is what `treeline serve` allocates. Speeds are estimates, for sequences that are half full: "
            + (
                "on an H200 they are within a quarter of what was measured."
                if first.fit.gpus == 1
                else "with several GPUs they assume NVLink, and were not compared with measurements."
            )
        )
    if args.gpu and first.fit.cache_tokens and not first.sequences:
        said.append(
            f"A sequence of {first.tokens:,} tokens does not fit: the longest has {first.fit.cache_tokens:,} "
            f"(--context {first.fit.cache_tokens})."
        )
    if args.count and first.sequences and args.gpu:
        served = args.count // first.fit.gpus
        said.append(
            f"{args.count} GPUs are {served} replicas: {served * first.sequences:,} sequences at once."
            if served
            else f"{args.count} GPUs are too few for one replica."
        )
    if args.gpu and (needed := first.replicas):
        said.append(
            f"{needed.count} replicas for {args.requests_per_s:g} requests/s, {BUSY:.0%} busy: each has about "
            f"{needed.batch:.0f} sequences at once, {needed.token_s * 1000:.0f} ms from token to token, and "
            f"{needed.prefill_s:.2f} s for a prompt."
        )
    elif args.gpu and args.requests_per_s and first.speed:
        said.append("A request of this load does not fit.")
    elif args.requests_per_s and first.fit.gpu.tb_s is None:
        said.append("Replicas need the GPU's name: of a size alone the speed is not known.")
    return said


def _as_json(name: str, source: Source, rows: Sequence[Row], advice: str) -> dict[str, Any]:
    some = rows[0].fit
    return {
        "model": name,
        "architecture": source.model.architecture,
        "parameters": sum(part.parameters for part in some.parts),
        "active_parameters": sum(part.active for part in some.parts),
        "stored_bytes": source.stored_bytes,
        "parts": [
            {"name": part.name, "parameters": part.parameters, "active": part.active, "bytes": part.bytes}
            for part in some.parts
        ],
        "sequence_tokens": rows[0].tokens,
        "gpus": [_row_as_json(row) for row in rows],
        "advice": advice or None,
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    found, needed = row.fit, row.replicas
    return {
        "gpu": found.gpu.name,
        "memory_bytes": found.gpu.memory,
        "dtype": found.dtype,
        "kv_dtype": found.kv_dtype,
        "tp_size": found.tp_size,
        "pp_size": found.pp_size,
        "weight_bytes": found.weights,
        "reserved_bytes": found.reserved,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "cache_tokens": found.cache_tokens,
        "missing_bytes": found.shortage,
        "sequences": row.sequences,
        "gpus_for_concurrency": row.gpus,
        "estimate": _figures(row) if row.speed is not None and row.sequences else None,
        "load": None
        if needed is None
        else {
            "replicas": needed.count,
            "batch": needed.batch,
            "token_s": needed.token_s,
            "prefill_s": needed.prefill_s,
        },
    }
