"""`treeline bench programs`: from arguments to a result."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from treeline_sim.display import RichDisplay
from treeline_wire.command_line import Parser, take_interrupts

from treeline_bench.context import MODEL, ROOT, BenchmarkError
from treeline_bench.processes import ChildFailed
from treeline_bench.programs import speculation
from treeline_bench.programs.ablations import ABLATIONS, CACHE_TOKENS, FULL, PAGE_TOKENS, Serving
from treeline_bench.programs.figures import rows_of, table_of
from treeline_bench.programs.run import WARM_UP, WARM_UP_ON_GPU, Plan, run
from treeline_bench.programs.workloads import WORKLOADS
from treeline_bench.prompts import PromptError
from treeline_bench.report import measured, publish
from treeline_bench.results import Row

SCALE = 0.5
TITLE = "Programs"
DESCRIPTION = """Run the eleven workloads of SGLang's paper with synthetic texts on `treeline serve`, each under the
ablations of its figure 8, and measure how much faster cache, schedule, parallel branches and hints make them.

Each ablation has a fresh server, each workload an empty cache. With the tiny model it runs on a laptop in ten minutes;
its results on cache and schedule hold for any model, its times do not."""
EPILOG = f"""examples:
  treeline bench programs
      all of it, results in bench/results
  treeline bench programs --workload judge tree_of_thought --ablation none no_hint full
      two workloads, three ways to run them; figures are printed and nothing is written
  treeline bench programs --scale 1 --programs 64 --model DIR --device cuda --server-args "--load-format dummy"
      on a GPU with random weights: runtime/benchmarks/dummy_model.py --shape llama8b --out DIR makes the model's folder
  treeline bench programs --server-args "--page-size 16 --max-total-tokens 65536"
      another cache: the default has pages of {PAGE_TOKENS} and {CACHE_TOKENS:,} tokens × --scale, as in the paper

workloads:
{chr(10).join(f"  {workload.name:<20} {workload.title}: {workload.shape}" for workload in WORKLOADS.values())}
  {speculation.NAME:<20} three fields from a black box, with API speculation and without, beside the ablations

ablations:
{chr(10).join(f"  {ablation.name:<20} {ablation.meaning}" for ablation in ABLATIONS.values())}

exit status: 0 measured, 1 not, 2 wrong arguments, 130 Ctrl-C"""


def parser(prog: str) -> argparse.ArgumentParser:
    top = Parser(
        prog=prog, description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = top.add_argument
    names = (*WORKLOADS, speculation.NAME)
    add("--workload", nargs="+", choices=names, metavar="NAME", help="workloads (default: all that the model can run)")
    add("--ablation", nargs="+", choices=ABLATIONS, metavar="NAME", help="ablations (default: all eight)")
    add("--programs", type=_at_least(int, 1), metavar="N", help="programs per workload (default: 3 to 40, by length)")
    add(
        "--scale",
        type=_at_least(float, 0.01),
        default=SCALE,
        metavar="F",
        help=f"factor of text lengths, answer lengths and cache size (default: {SCALE}; 1 = the paper's)",
    )
    add("--seed", type=int, default=1, help="seed of the texts (default: 1)")
    add("--model", type=Path, default=MODEL, metavar="DIR", help="a checkpoint with a tokenizer (default: models/tiny)")
    add("--device", default="auto", help="the server's device: auto, cpu, cuda (default: auto)")
    add(
        "--server-args",
        default="",
        metavar="FLAGS",
        help="more flags of `treeline serve`: --server-args='--page-size 16'",
    )
    add("--out", type=Path, metavar="DIR", help="folder of the results (default: bench/results for a complete run)")
    return top


def _at_least(kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    def convert(word: str) -> Any:
        value = kind(word)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be {least} or more, not {word}")
        return value

    convert.__name__ = kind.__name__ if isinstance(kind, type) else "value"
    return convert


def plan_of(args: argparse.Namespace) -> Plan:
    """Raises ValueError for arguments that do not fit together."""
    # A model with random weights extracts nothing: its folder has another name than the one that comes with us.
    workloads = args.workload or [*WORKLOADS, *([speculation.NAME] if args.model == MODEL else [])]
    ablations = [ABLATIONS[name] for name in args.ablation or ABLATIONS]
    extraction = speculation.NAME in workloads
    if extraction and FULL not in ablations:
        raise ValueError(f"--workload {speculation.NAME} needs --ablation {FULL.name}: it asks that server")
    return Plan(
        [WORKLOADS[name] for name in workloads if name in WORKLOADS],
        ablations,
        args.scale,
        args.programs,
        args.seed,
        extraction,
        WARM_UP_ON_GPU if args.device.startswith("cuda") else WARM_UP,
    )


def main(argv: Sequence[str] | None = None, prog: str = "python -m treeline_bench programs") -> int:
    """Returns the exit status; a wrong command line exits with 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    top, console = parser(prog), Console(stderr=True)
    args = top.parse_args(argv)
    try:
        plan = plan_of(args)
    except ValueError as error:
        top.error(str(error))
    take_interrupts()
    serving = Serving(args.model, args.device, round(CACHE_TOKENS * args.scale), args.server_args)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="treeline-bench-") as folder,
            RichDisplay("programs", console) as display,
        ):
            ran = run(plan, serving, Path(folder), display)
    except (BenchmarkError, ChildFailed, PromptError) as error:
        console.print(f"programs: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything is stopped", highlight=False)
        return 130
    if ran.table:
        print(table_of(ran.table), end="")
    for form, ratio in ran.calls.items():
        print(f"API speculation, {form}: {ratio:.2f} times fewer calls")
    _write(rows_of(ran.table, ran.calls), args, argv, console)
    return 0


def _write(rows: Sequence[Row], args: argparse.Namespace, argv: Sequence[str], console: Console) -> None:
    whole = not args.workload and not args.ablation
    out: Path | None = args.out or (ROOT / "bench" / "results" if whole else None)
    if out is None:
        return
    publish(measured("programs", command_of(argv), rows), TITLE, out)
    console.print(f"results in {out.relative_to(ROOT) if out.is_relative_to(ROOT) else out}", highlight=False)


def command_of(argv: Sequence[str]) -> str:
    """The command, without paths of this machine."""
    words: list[str] = []
    flags = iter(argv)
    for word in flags:
        name, equals, value = word.partition("=")
        if name == "--out":
            if not equals:
                next(flags, None)
        elif name == "--model":
            words += ["--model", Path(value if equals else next(flags, "")).name]
        else:
            words.append(word)
    return shlex.join(["treeline", "bench", "programs", *words])
