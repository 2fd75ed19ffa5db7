"""The command `treeline sim`: routing on simulated engines, on a laptop."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq
from rich.console import Console
from treeline_wire.command_line import Parser, take_interrupts
from treeline_wire.tokenizer import BundleError

from treeline_sim import serve
from treeline_sim.display import RichDisplay
from treeline_sim.figures import HEADER, Figures, compare, endless_hit_rate, lines_of
from treeline_sim.model.presets import DEFAULT, PRESETS
from treeline_sim.picker_core import DEFAULT_POLICY, check_policy
from treeline_sim.routers import ORACLES
from treeline_sim.run import Plan, known_policies, simulate
from treeline_sim.simulation import Faults
from treeline_sim.traces import TRACES, trace_named
from treeline_sim.traces.mooncake import TraceError

_RESTART = re.compile(r"(engine|picker):(\d+)@(\d+(?:\.\d+)?)")
_POLICY_COMMA = re.compile(r",(?![^,:=]*=)")
"""A comma between policies, not between the parameters of one (`NAME:key=value,key=value`)."""
COMPARED = f"{DEFAULT_POLICY},round_robin,random,oracle,hit_oracle"


class Report(msgspec.Struct, frozen=True):
    """The output of `--json`."""

    trace: str
    endpoints: int
    pickers: int
    seed: int
    endless_hit_rate: float
    policies: list[Figures]
    ratios: dict[str, dict[str, float | None]]


_RUN = "treeline sim run --trace multi-turn --policy predicted_ttft,round_robin"
_SERVE = "treeline sim serve --port 8000"


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of all of `treeline sim`."""
    top = Parser(
        prog=prog,
        description="Simulate engines and let the picker's own code route to them: hours of load in a minute.",
        epilog=f"examples:\n  {_RUN}\n  {_SERVE}\n\n`treeline sim WORD --help` has more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = top.add_subparsers(dest="word", required=True, metavar="WORD")
    traces = "\n".join(f"  {trace.name:<24}{trace.summary}" for trace in TRACES.values())
    presets = "\n".join(f"  {name:<24}{preset.summary}" for name, preset in PRESETS.items())
    run = words.add_parser(
        "run",
        help="policies side by side on one trace",
        description="Run a trace through a simulated fleet, once for each policy, and compare.",
        epilog=f"traces:\n{traces}\n\nengines:\n{presets}\n\npolicies:\n  {', '.join(known_policies())}\n"
        f"  (the oracles see the real caches and queues)\n\nexample:\n  {_RUN}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = run.add_argument
    source = run.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="NAME", help="a trace by name, see below")
    source.add_argument("--trace-file", type=Path, metavar="FILE", help="a trace in Mooncake's format (JSON lines)")
    add("--policy", default=COMPARED, metavar="P[,P2…]", help="policies to compare (default: %(default)s)")
    add("--endpoints", type=int, default=8, metavar="N", help="simulated engines (default: %(default)s)")
    add("--pickers", type=int, default=1, metavar="N", help="pickers that take requests in turn (default: %(default)s)")
    add("--seed", type=int, default=1, metavar="S", help="seed of all random numbers (default: %(default)s)")
    add("--requests", type=int, default=0, metavar="N", help="number of requests (default: that of the trace)")
    add("--rate", type=float, default=0.0, metavar="R", help="requests a second (default: the trace's, by endpoints)")
    add("--speedup", type=float, default=1.0, metavar="X", help="factor by which a trace file is played faster")
    add("--engine", default=DEFAULT, choices=PRESETS, metavar="NAME", help="see below (default: %(default)s)")
    add("--kv-tokens", type=int, default=0, metavar="N", help="memory of an engine (default: the trace's or engine's)")
    add("--block-size", type=int, default=0, metavar="N", help="tokens of a block (default: the engine's)")
    add("--news-ms", type=float, default=2.0, metavar="MS", help="delay of events and load (default: %(default)s)")
    add("--event-loss", type=float, default=0.0, metavar="SHARE", help="share of KV and peer messages that get lost")
    add(
        "--restart",
        action="append",
        default=[],
        metavar="WHO:N@T",
        help="restart engine:N or picker:N after T simulated seconds; may be given again",
    )
    add("--json", action="store_true", help="print the figures as JSON instead of a table")
    serve.add_arguments(
        words.add_parser(
            "serve",
            help="simulated engines as servers, for pickers and routers that run",
            description="The engine model behind sockets: OpenAI's completion APIs, KV events, replays, load.",
            epilog=f"example:\n  {_SERVE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    return top


def plan_of(args: argparse.Namespace) -> Plan:
    """Return the plan of a command line. Raises ValueError, which says what to do."""
    restarts: dict[str, list[tuple[int, float]]] = {"engine": [], "picker": []}
    for text in args.restart:
        found = _RESTART.fullmatch(text)
        if found is None:
            raise ValueError(f"--restart {text}: write engine:N@SECONDS or picker:N@SECONDS, as in engine:0@30")
        restarts[found[1]].append((int(found[2]), float(found[3])))
    if not 0 <= args.event_loss < 1:
        raise ValueError(f"--event-loss {args.event_loss:g}: a share from 0 to below 1, as in 0.01")
    for name in ("endpoints", "pickers", "speedup"):
        if not 0 < getattr(args, name) <= 100_000:
            raise ValueError(f"--{name} must be more than 0")
    for name in ("requests", "rate", "kv_tokens", "block_size", "news_ms"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must not be negative")
    if args.trace_file is None and args.speedup != 1.0:
        raise ValueError("--speedup plays a file faster; for a trace by name give --rate")
    if args.trace_file is not None and args.rate:
        raise ValueError("--rate is for a trace by name; a file is played faster by --speedup")
    try:
        trace = args.trace_file or trace_named(args.trace)
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    faults = Faults(args.event_loss, tuple(restarts["engine"]), tuple(restarts["picker"]))
    plan = Plan(
        trace,
        args.endpoints,
        args.pickers,
        args.seed,
        args.engine,
        args.requests,
        args.rate,
        args.speedup,
        args.kv_tokens,
        args.block_size,
        args.news_ms / 1000,
        faults,
    )
    assert plan.fleet  # raises for impossible settings
    return plan


def policies_of(text: str) -> list[str]:
    """Parse the names of policies. Raises ValueError, which lists the valid ones."""
    names = list(dict.fromkeys(name.strip() for name in _POLICY_COMMA.split(text) if name.strip()))
    if not names:
        raise ValueError(f"--policy names none; there are: {', '.join(known_policies())}")
    for name in names:
        if name not in ORACLES:
            check_policy(name)
    return names


def run(args: argparse.Namespace, console: Console) -> int:
    """Simulate and print. After Ctrl-C, the finished policies are printed."""
    plan, names = plan_of(args), policies_of(args.policy)
    found: list[Figures] = []
    status = 0
    title = args.trace or args.trace_file.name
    with RichDisplay(title, console) as display:
        try:
            display.phase("reading the trace")
            endless = endless_hit_rate(plan.generate(), plan.engine.block_size)
            for name in names:
                display.phase(name, plan.total)
                found.append(simulate(plan, name, display.done))
        except KeyboardInterrupt:
            if not found:
                raise
            status = 130
    if args.json:
        ratios = {
            one.figures.policy: {
                "hit_vs_oracle": one.hit_vs_oracle,
                "hit_vs_best": one.hit_vs_best,
                "ttft_p90_vs_best": one.ttft_p90_vs_best,
            }
            for one in compare(found)
        }
        report = Report(title, plan.endpoints, plan.pickers, plan.seed, endless, found, ratios)
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print(found, endless)
    if status:
        console.print(f"interrupted after {len(found)} of {len(names)} policies", highlight=False)
    return status


def _print(found: Sequence[Figures], endless: float) -> None:
    cells = [list(HEADER), *lines_of(found)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))
    print(f"one endless cache of all would have hit {endless:.3f}; {found[0].simulated_s:.0f} s were simulated")


WORDS = {"run": run, "serve": serve.serve}


def main(argv: Sequence[str], prog: str = "treeline sim") -> int:
    """Run the command. Returns 0, 1 for a trace that cannot be read, 130 after Ctrl-C; a wrong command line exits with
    2.
    """
    top = parser(prog)
    args = top.parse_args(argv)
    console = Console(stderr=True)
    take_interrupts()
    try:
        return WORDS[args.word](args, console)
    except (TraceError, BundleError, zmq.ZMQError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        top.error(str(error))
    except KeyboardInterrupt:
        console.print("interrupted", highlight=False)
        return 130
