"""The `treeline` command: one parser, one function a word; the rooms do the work."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treeline_wire.command_line import Parser


@dataclass(frozen=True)
class Word:
    """One word of the command. `run` takes the arguments behind the word and returns the exit status."""

    help: str
    run: Callable[[Sequence[str]], int]


# Each imports its room when it is called: `treeline pick` must not load torch.


def _up(argv: Sequence[str]) -> int:
    from treeline.up.command import main as up

    return up(argv)


def _serve(argv: Sequence[str]) -> int:
    from treeline_runtime.serve import main as serve

    return serve(list(argv))


def _pick(argv: Sequence[str]) -> int:
    from treeline_epp.main import main as pick

    return pick(list(argv))


def _operate(argv: Sequence[str]) -> int:
    from treeline_operator.operate import main as operate

    return operate(list(argv))


def _bench(argv: Sequence[str]) -> int:
    try:
        from treeline_bench.cli import main as bench
    except ModuleNotFoundError as error:  # images and clusters have no need of it
        print(f"treeline bench: {error.name} is not installed: pip install treeline-bench", file=sys.stderr)
        return 1
    return bench(argv, prog="treeline bench")


def _sim(argv: Sequence[str]) -> int:
    try:
        from treeline_sim.command import main as sim
    except ModuleNotFoundError as error:
        print(f"treeline sim: {error.name} is not installed: pip install treeline-sim", file=sys.stderr)
        return 1
    return sim(argv)


def _conformance(argv: Sequence[str]) -> int:
    try:
        from treeline_conformance.command import main as conformance
    except ModuleNotFoundError as error:
        print(f"treeline conformance: {error.name} is not installed: pip install treeline-conformance", file=sys.stderr)
        return 1
    return conformance(argv)


def _doctor(argv: Sequence[str]) -> int:
    from treeline.doctor import main as doctor

    return doctor(argv)


def _version(argv: Sequence[str]) -> int:
    from treeline.version import main as version

    return version(argv)


WORDS = {
    "up": Word("serve a model on this machine: Envoy, the endpoint picker and some runtimes", _up),
    "serve": Word("run one runtime: an OpenAI-compatible server for one model", _serve),
    "pick": Word("run the endpoint picker that Envoy asks where each request goes, or ask it why: pick explain", _pick),
    "operate": Word("run the Kubernetes operator, or show what it would do: operate plan", _operate),
    "bench": Word("measure a server that is running (bench serving), or Treeline itself", _bench),
    "sim": Word("let the picker route to simulated engines, and compare policies", _sim),
    "conformance": Word("ask an endpoint picker, any that speaks the protocol, whether it keeps it", _conformance),
    "doctor": Word("what this machine can run, and what is missing", _doctor),
    "version": Word("the version of Treeline and of what it stands on", _version),
}


def parser() -> argparse.ArgumentParser:
    words = "\n".join(f"  {name:<9} {word.help}" for name, word in WORDS.items())
    top = Parser(
        prog="treeline",
        usage="treeline WORD [OPTIONS]",
        description="Treeline serves large language models where their prefixes already live.",
        epilog=f"words:\n{words}\n\n`treeline WORD --help` tells more. To begin: treeline up",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("word", choices=WORDS, metavar="WORD", help="what to do, see below")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one word; returns its exit status. A wrong command line exits with 2, as argparse does."""
    argv = list(sys.argv[1:] if argv is None else argv)
    top = parser()
    if not argv:
        top.print_help(sys.stderr)
        return 2
    if argv == ["--version"]:
        argv = ["version"]
    word = top.parse_args(argv[:1]).word
    try:
        status = WORDS[word].run(argv[1:])
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output, `head` for one, has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # while it was still loading: once it runs, each word ends in its own way
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
