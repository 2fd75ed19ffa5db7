"""`python -m treeline_bench`: runs benchmarks, writes their results, quotes them in the README."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from treeline_sim.display import RichDisplay
from treeline_wire.command_line import Parser, perhaps, take_interrupts

from treeline_bench import scripts
from treeline_bench.context import ROOT, Benchmark, BenchmarkError, ClientFailed, Context
from treeline_bench.envoy import EnvoyMissing
from treeline_bench.peers import benchmark as peers
from treeline_bench.processes import ChildFailed
from treeline_bench.prompts import PromptError
from treeline_bench.registry import BENCHMARKS, ELSEWHERE, select
from treeline_bench.report import MarkersMissing, measured, missed_page, publish, replace_between_markers, summary
from treeline_bench.results import Result, ResultError, number, read_results, write_whole
from treeline_bench.serving.command import main as serving

RESULTS = ROOT / "bench" / "results"
MISSED = "missed.md"
QUICK_RESULTS = ROOT / ".cache" / "bench-quick"
PROG = "python -m treeline_bench"
EPILOG = """examples:
  python -m treeline_bench                      all of them, results in bench/results
  python -m treeline_bench tree picker          two of them
  python -m treeline_bench --quick              does everything work? (figures of seconds, kept apart)
  python -m treeline_bench --readme             the summary of bench/results as Markdown
  python -m treeline_bench --readme README.md   the same, written between the markers in that file
  python -m treeline_bench serving --help       load for any OpenAI server, and what its clients see
  python -m treeline_bench programs --help      programs of the frontend language, and what speeds them up

Measure on a quiet machine: anything else that runs is in the figures. bench/README.md says what each figure means."""


def parser(prog: str = PROG) -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<8} {benchmark.summary}" for name, benchmark in BENCHMARKS.items())
    bench = Parser(
        prog=prog,
        description="Treeline's benchmarks. Each writes NAME.json, NAME.md and NAME.svg.",
        epilog=f"benchmarks:\n{names}\n\n{EPILOG.replace(PROG, prog)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = bench.add_argument
    add("names", nargs="*", metavar="NAME", help="which benchmarks (default: all)")
    add("--quick", action="store_true", help="a few seconds each: checks that they work")
    add("--list", action="store_true", help="list the benchmarks and exit")
    add("--out", type=Path, metavar="DIR", help="folder of the results (default: bench/results, or .cache for --quick)")
    add(
        "--readme",
        nargs="?",
        const="-",
        metavar="FILE",
        help="only write the results' summary between the markers in FILE, and missed.md beside the results "
        "(without FILE: print it)",
    )
    add("--corpus", type=Path, metavar="DIR", help="with structured: a folder of schemas from `make corpora`")
    add("--every", type=int, default=1, metavar="N", help="with --corpus: every Nth schema (default: %(default)s)")
    peers.add_arguments(bench)
    return bench


def _out(args: argparse.Namespace) -> Path:
    given: Path | None = args.out
    return given or (QUICK_RESULTS if args.quick else RESULTS)


def _quote(target: str, folder: Path, console: Console) -> int:
    try:
        results = read_results(folder, [*BENCHMARKS, *ELSEWHERE])
        if not results:
            console.print("There are no results yet: run the benchmarks first.", style="red")
            return 1
        text = summary(results)
        if target == "-":
            print(text, end="")
        else:
            path = Path(target)
            write_whole(path, replace_between_markers(path.read_text(), text).encode())
            write_whole(folder / MISSED, missed_page(results).encode())
    except (ResultError, MarkersMissing, OSError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    return 0


def _measure(benchmark: Benchmark, args: argparse.Namespace, console: Console) -> Result:
    with (
        tempfile.TemporaryDirectory(prefix="treeline-bench-") as folder,
        RichDisplay(benchmark.name, console) as display,
    ):
        rows = benchmark.run(Context(display, Path(folder), quick=args.quick))
    command = f"python -m treeline_bench {benchmark.command or benchmark.name}" + (" --quick" if args.quick else "")
    return measured(benchmark.name, command, rows, benchmark.versions)


def _run(benchmarks: Sequence[Benchmark], args: argparse.Namespace, console: Console) -> int:
    out, failed = _out(args), 0
    for benchmark in benchmarks:
        try:
            result = _measure(benchmark, args, console)
        except (BenchmarkError, ChildFailed, ClientFailed, EnvoyMissing, PromptError) as error:
            console.print(f"{benchmark.name}: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            failed += 1
            continue
        publish(result, benchmark.title, out)
        for row in result.rows:
            ratio = "" if row.ratio is None else f"  ({row.ratio:.2f} × {number(float(row.reference or 0))})"
            console.print(f"  {row.metric:<34} {number(row.value):>10} {row.unit}{ratio}", highlight=False)
    shown = out.relative_to(ROOT) if out.is_relative_to(ROOT) else out
    console.print(f"results in {shown}" if failed < len(benchmarks) else "no results", highlight=False)
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None, prog: str = "treeline bench") -> int:
    """Returns 0, 1 when a benchmark failed, 130 after Ctrl-C or SIGTERM; a wrong command line exits with 2.

    `serving` measures any server, `programs` runs the frontend language; both have their own arguments.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["programs"]:
        from treeline_bench.programs.command import main as programs

        return programs(argv[1:], prog=f"{prog} programs")
    if argv[:1] == ["serving"]:
        return serving(argv[1:], prog=f"{prog} serving")
    bench = parser(prog)
    args = bench.parse_args(argv)
    console = Console(stderr=True)
    if args.list:
        for name, benchmark in BENCHMARKS.items():
            print(f"{name:<8} {benchmark.summary}")
        return 0
    if args.readme is not None:
        return _quote(args.readme, _out(args), console)
    if not (ROOT / "bench").is_dir():  # installed from a wheel
        bench.error(
            "these benchmarks measure a checkout: clone Treeline and run `make bench`; any server: bench serving"
        )
    try:
        chosen = [peers.chosen(args, console)] if peers.asked(args) else select(args.names)
        if args.corpus is not None:
            if args.names != ["structured"]:
                raise ValueError("--corpus belongs to structured alone: treeline bench structured --corpus DIR")
            chosen = [scripts.corpus(args.corpus, args.every)]
    except (KeyError, ValueError) as error:
        meant = next(filter(None, (perhaps(name, [*BENCHMARKS, "serving", "programs"]) for name in args.names)), "")
        bench.error(f"{error.args[0]}{meant if isinstance(error, KeyError) else ''}")
    except BenchmarkError as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    take_interrupts()
    try:
        return _run(chosen, args, console)
    except KeyboardInterrupt:
        console.print("interrupted; everything is stopped", highlight=False)
        return 130
