"""The command `treeline conformance`: its arguments, and the run that makes a matrix."""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from treeline_bench.context import ROOT
from treeline_bench.machine import versions
from treeline_bench.results import versions_line
from treeline_wire.command_line import Parser, take_interrupts

import treeline_conformance.cases  # noqa: F401  registers them
from treeline_conformance import report
from treeline_conformance.case import Case, select
from treeline_conformance.picker import PickerError, Target
from treeline_conformance.report import Column
from treeline_conformance.run import run
from treeline_conformance.verdict import Outcome, Verdict

_NAMED = re.compile(r"([\w(][\w.,()+-]*(?: [\w(][\w.,()+-]*)*)=(.*)", re.DOTALL)
"""A name of words that are no flags, and the rest: a command may have a = further on."""
RESULTS = ROOT / "bench" / "results"
_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.NOT_APPLICABLE: "dim"}
DESCRIPTION = """Ask an endpoint picker everything that its protocol and its users expect, and report the results.

The suite plays the proxy (ext_proc), three pods that speak like vLLM, and a Kubernetes API with an InferencePool. The
suite starts a picker, or tests a running one that knows the pods or the kubeconfig."""
EPILOG = """examples:
  treeline conformance --start "ours=treeline pick --pool-name {pool} --pool-namespace {namespace} --kubeconfig
      {kubeconfig} --secure-serving false --grpc-port {port} --grpc-health-port {health_port}
      --metrics-port {metrics_port} --admin-port {admin_port}"
  treeline conformance --start "one=./a {port}" --against "two=./b {port}" --out results
      a column each; the exit status is that of the first
  treeline conformance --target 127.0.0.1:9002 --kubeconfig folder --health-port 9003 --only P4 P5 @duplex
      a picker that is started by hand with folder/kubeconfig, while this waits for it

In --start: {port}, {health_port}, {metrics_port}, {admin_port}: free ports; {kubeconfig}, {namespace}, {pool}: of the
suite's API ($KUBECONFIG is set too); {pod0}, {pod1}, {pod2}, {pods}: addresses of the pods, for pickers without it.

exit status: 0 no MUST failed, 1 one did, or the picker did not start, 2 wrong arguments, 130 Ctrl-C"""


def parser(prog: str) -> argparse.ArgumentParser:
    top = Parser(
        prog=prog,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = top.add_argument
    add("--target", metavar="[NAME=]HOST:PORT", help="the ext_proc port of a running picker, without TLS")
    add("--start", action="append", default=[], metavar="[NAME=]COMMAND", help="start a picker; repeatable")
    add(
        "--against",
        action="append",
        default=[],
        metavar="[NAME=]COMMAND",
        help="start another picker to compare with; it does not affect the exit status; repeatable",
    )
    add("--kubeconfig", type=Path, metavar="DIR", help="write DIR/kubeconfig for the suite's API, and keep it")
    add("--health-port", type=_port, default=0, metavar="PORT", help="port of gRPC health of --target")
    add("--metrics-port", type=_port, default=0, metavar="PORT", help="port of /metrics of --target")
    add(
        "--pod-port",
        type=_port,
        default=0,
        metavar="PORT",
        help="port of the three pods, on 127.0.0.2 to .4 (default: a free one)",
    )
    add("--only", nargs="+", default=[], metavar="NAME", help="only these cases, groups (P4) or modes (@buffered)")
    add("--list", action="store_true", help="list the cases and exit")
    add(
        "--expect",
        choices=("spec", "gie15"),
        default="spec",
        help="expected results, which decide the exit status (default: spec)",
    )
    add(
        "--timeout",
        type=_seconds,
        default=3.0,
        metavar="S",
        help="longest wait for an answer of the picker (default: 3)",
    )
    add("--out", type=Path, metavar="DIR", help="write conformance.md and conformance.json")
    add("--readme", type=Path, metavar="FILE", help="only write the counts of --out between the markers in FILE")
    add("--verbose", action="store_true", help="name each case, not only failures")
    return top


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def targets_of(args: argparse.Namespace) -> list[Target]:
    """Return the pickers of a command line. Raises ValueError."""
    found = []
    if args.target is not None:
        name, address = _named(args.target)
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"--target wants HOST:PORT, not {address!r}")
        ports = {"health_port": args.health_port, "metrics_port": args.metrics_port}
        found.append(Target(name or address, address=address, **ports))
    for text in (*args.start, *args.against):
        name, command = _named(text)
        words = command.split(maxsplit=1)
        if not words:
            raise ValueError("--start and --against want a command")
        found.append(Target(name or Path(words[0]).name, command=command))
    if len(found) == len(args.against):
        raise ValueError("which picker? --target HOST:PORT, or --start COMMAND")
    names = [target.name for target in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two pickers have the same name ({', '.join(names)}): give others by NAME=")
    return found


def _named(text: str) -> tuple[str, str]:
    match = _NAMED.fullmatch(text)
    return (match.group(1), match.group(2)) if match else ("", text)


def main(argv: Sequence[str] | None = None, prog: str = "treeline conformance") -> int:
    """Run the command; return the exit status. A wrong command line exits with 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    top = parser(prog)
    args = top.parse_args(argv)
    console = Console(stderr=True, highlight=False)
    try:
        cases = select(args.only)
    except KeyError as error:
        top.error(error.args[0])
    if args.list:
        for one in cases:
            print(f"{one.name:<34} {one.level.value:<7} {one.says}")
        return 0
    if args.readme is not None:
        if args.start or args.against or args.target:
            top.error("--readme runs nothing, it quotes what --out wrote: give it alone, after the run")
        return _quote(args, console)
    try:
        targets = targets_of(args)
    except ValueError as error:
        top.error(str(error))
    take_interrupts()
    try:
        with tempfile.TemporaryDirectory(prefix="treeline-conformance-") as scratch:
            folder = args.kubeconfig or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            columns = [_column(target, cases, folder, args, console) for target in targets]
        return _report_on(columns, cases, args, prog, argv)
    except (PickerError, OSError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything is stopped")
        return 130


def _quote(args: argparse.Namespace, console: Console) -> int:
    try:
        report.quote((args.out or RESULTS) / "conformance.json", args.readme)
    except (report.ReportError, OSError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    return 0


def _column(target: Target, cases: Sequence[Case], folder: Path, args: argparse.Namespace, console: Console) -> Column:
    """Test one picker. Raises PickerError, with the picker's name."""

    def told(one: Case, outcome: Outcome) -> None:
        if args.verbose or outcome.verdict is Verdict.FAIL:
            took = f" in {outcome.seconds:.1f} s" if args.verbose else ""
            words = f"{target.name}: {one.name} ({one.level.value}): {outcome.verdict.value}{took} {outcome.why}"
            console.print(words, style=_STYLES[outcome.verdict], markup=False, soft_wrap=True)

    try:
        if not target.command:
            console.print(
                f"waiting for {target.address}; the kubeconfig of the suite's API is in {folder}", markup=False
            )
        work = run(target, cases, folder, patience_s=args.timeout, pod_port=args.pod_port, told=told)
        outcomes = asyncio.run(work)
    except PickerError as error:
        raise PickerError(f"{target.name}: {error}") from None
    return Column(target.name, target.command or target.address, outcomes)


def _report_on(
    columns: Sequence[Column], cases: Sequence[Case], args: argparse.Namespace, prog: str, argv: Sequence[str]
) -> int:
    print(report.counts(columns, report.levels_of(cases)), end="")
    if args.out is not None:
        command, used = shlex.join([*prog.split(), *argv]), versions()
        markdown = report.page(columns, cases, prog, versions_line(used))
        report.write(args.out, markdown, report.as_json(columns, cases, command, used))
    gie15 = args.expect == "gie15"
    judged = columns[: len(columns) - len(args.against)]
    return 1 if any(report.failed(column, cases, gie15=gie15) for column in judged) else 0
