"""`--peers` of `treeline bench routing-sim`: which routers, where they are, which trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from treeline_sim.traces import TRACES, trace_named

from treeline_bench.context import Benchmark, BenchmarkError
from treeline_bench.peers.benchmark import RESULT, benchmark
from treeline_bench.peers.routers import PEERS

TRACE = "generated-shared-prefix"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A group of their own."""
    add = parser.add_argument_group("routing-sim beside other routers").add_argument
    add("--peers", metavar="P[,P2]", help=f"our picker and these over simulated engines: {', '.join(PEERS)}")
    add(
        "--peer-path",
        action="append",
        default=[],
        metavar="P=PROGRAM",
        help="where a peer is, if not on the PATH; may be given again",
    )
    add("--peer-trace", metavar="NAME", help=f"what is played (default: {TRACE}): {', '.join(TRACES)}")


def asked(args: argparse.Namespace) -> bool:
    """Whether peers are to be measured. Raises ValueError for options that would change nothing."""
    if args.peers is None and (args.peer_path or args.peer_trace):
        raise ValueError("--peer-path and --peer-trace mean nothing without --peers")
    return args.peers is not None


def chosen(args: argparse.Namespace, console: Console) -> Benchmark:
    """The benchmark that was asked for; `console` is told which peers are left out and how to have them. Raises
    ValueError and KeyError, which say what to write, BenchmarkError where no peer is here."""
    if args.names != ["routing-sim"]:
        raise ValueError("--peers belongs to routing-sim alone: treeline bench routing-sim --peers smg")
    names = list(dict.fromkeys(name.strip() for name in args.peers.split(",")))
    paths = dict(_path(text) for text in args.peer_path)
    for name in (*names, *paths):
        if name not in PEERS:
            raise ValueError(f"unknown peer {name!r}; there are: {', '.join(PEERS)}")
    trace = trace_named(args.peer_trace or TRACE)
    programs: dict[str, Path] = {}
    for name in names:
        try:
            programs[name] = PEERS[name].find(paths)
        except BenchmarkError as error:
            console.print(f"left out: {error}", markup=False, highlight=False, soft_wrap=True)
    if not programs:
        raise BenchmarkError(f"{RESULT}: there is no peer to compare with")
    return benchmark(programs, trace)


def _path(text: str) -> tuple[str, Path]:
    name, given, path = text.partition("=")
    if not given or not path:
        raise ValueError(f"--peer-path {text}: write P=PROGRAM, as in smg=DIR/bin/smg")
    return name, Path(path)
