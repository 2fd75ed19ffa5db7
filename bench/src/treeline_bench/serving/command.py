"""`treeline bench serving`: from arguments to a report."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from treeline_sim.display import RichDisplay
from treeline_wire.command_line import Parser, take_interrupts

from treeline_bench.context import ClientFailed
from treeline_bench.prompts import PromptError, PromptMaker
from treeline_bench.serving.datasets import DATASETS, DatasetError, Ids, Shape, Texts, Words
from treeline_bench.serving.measure import Run, run
from treeline_bench.serving.output import PREFIX, check_writable, write_json, write_results
from treeline_bench.serving.plan import Plan
from treeline_bench.serving.report import show
from treeline_bench.serving.server import Server, ServerError, find, tokenizer
from treeline_bench.serving.summary import parse_limits

NAME = re.compile(r"[A-Za-z0-9_-]+")
LAST_ARRIVALS_S = 1.0
"""A load whose last answer came this long before its end had no more to send."""
DESCRIPTION = """Send load to an OpenAI server (Treeline, vLLM, SGLang, a gateway) and measure it as its clients do.

Latencies count from the moment at which a request was due; token counts are the server's own (usage). The same seed
sends the same prompts, which a second run finds cached: give it another --seed or restart the server."""
EPILOG = """examples:
  treeline bench serving --url http://127.0.0.1:8000
      1,000 random prompts of up to 1,024 tokens in and out, 64 at once
  treeline bench serving --url http://127.0.0.1:8000 --request-rate 8 --duration 60 --goodput ttft:200 tpot:30
      a minute of Poisson arrivals; how many answers had their first token in 200 ms and a token every 30 ms
  treeline bench serving --url http://127.0.0.1:8000 --dataset generated-shared-prefix --against vllm=http://127.0.0.1:8001
      ours and vLLM with the same prompts, three rounds in alternating order, and the ratios
  treeline bench serving --url http://127.0.0.1:8000 --dataset multi-turn --concurrency 128 --output run.json
      128 users in conversations of five turns; every figure of every round as JSON
  treeline bench serving --url http://127.0.0.1:8000 --token-ids --concurrency 256 --processes 4
      prompts as token ids, for a server that has no tokenizer; four load processes

exit status: 0 measured, 1 not (or nothing was answered, or the server went away), 2 wrong arguments, 130 Ctrl-C"""


def parser(prog: str) -> argparse.ArgumentParser:
    top = Parser(
        prog=prog,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # results record all arguments but some flags, by their full names
    )
    _servers(top.add_argument_group("servers"))
    _load(top.add_argument_group("load"))
    _prompts(top.add_argument_group("prompts"))
    _report(top.add_argument_group("report"))
    return top


def _servers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--url", metavar="URL", help="the server, with or without /v1")
    add("--name", default="treeline", help="its name in the report (default: treeline)")
    add(
        "--against",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="another server to compare with, in alternating rounds; repeatable",
    )
    add("--model", default="", help="the model (default: the first in each server's list)")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), metavar="KEY", help="(default: $OPENAI_API_KEY)")
    add("--chat", action="store_true", help="ask /v1/chat/completions, not /v1/completions")
    add("--extra-body", type=_object, default={}, metavar="JSON", help="more fields of requests: '{\"top_p\": 0.9}'")
    add("--temperature", type=float, default=0.0, metavar="T", help="(default: 0)")
    add("--respect-eos", action="store_true", help="let answers end early: do not send ignore_eos")


def _load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--concurrency", type=_whole, metavar="N", help="closed loop: N requests at once (default: 64)")
    add(
        "--request-rate",
        type=_positive,
        metavar="R",
        help="open loop: R requests (multi-turn: new users) a second, Poisson",
    )
    add("--duration", type=_positive, metavar="S", help="send no new requests after S seconds")
    add("--timeout", type=_positive, default=300.0, metavar="S", help="longest wait for an answer (default: 300)")
    add("--warm-up", type=_count, default=1, metavar="N", help="uncounted requests before the measurement (default: 1)")
    add("--rounds", type=_whole, metavar="N", help="rounds, each with other prompts (default: 1, with --against 3)")
    add("--processes", type=_whole, default=1, metavar="N", help="load processes (default: 1)")


def _prompts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    names = "; ".join(f"{dataset.name}: {dataset.summary}" for dataset in DATASETS.values())
    add("--dataset", choices=DATASETS, default="random", help=names.replace("%", "%%"))
    add("--seed", type=int, default=42, help="(default: 42)")
    add("--num-prompts", type=_whole, metavar="N", help="number of prompts or conversations")
    add("--input-len", type=_whole, metavar="TOKENS", help="length of a prompt, or of its unshared part")
    add("--output-len", type=_whole, metavar="TOKENS", help="length of an answer")
    add("--range-ratio", type=_share, metavar="F", help="lengths are uniform from F × length to length")
    add("--groups", type=_whole, metavar="N", help="groups of prompts that share a prefix")
    add("--prompts-per-group", type=_whole, metavar="N")
    add("--prefix-len", type=_whole, metavar="TOKENS", help="length of the shared prefix")
    add("--turns", type=_whole, metavar="N", help="turns per conversation")
    add("--tokenizer", default="", metavar="PATH_OR_HF_ID", help="tokenizer that counts tokens (default: the server's)")
    add("--token-ids", action="store_true", help="send token ids, which needs no tokenizer")


def _report(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--goodput", nargs="+", default=[], metavar="MEASURE:MS", help="limits of a good answer in ms: ttft, tpot, e2e")
    add("--output", type=Path, metavar="FILE", help="write everything as JSON")
    add("--results", type=Path, metavar="DIR", help="write JSON, Markdown and a plot as make bench does")


# ---- values of arguments ------------------------------------------------------------------------------------


def _bounded(kind: Callable[[str], Any], accepts: Callable[[Any], bool], words: str) -> Callable[[str], Any]:
    def convert(word: str) -> Any:
        try:
            value = kind(word)
        except ValueError:
            value = None
        if value is None or not accepts(value):
            raise argparse.ArgumentTypeError(f"must be {words}, not {word!r}")
        return value

    return convert


_whole = _bounded(int, lambda value: value >= 1, "a whole number from 1 on")
_count = _bounded(int, lambda value: value >= 0, "a whole number from 0 on")
_positive = _bounded(float, lambda value: 0 < value < float("inf"), "a number above 0")
_share = _bounded(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
_object = _bounded(lambda word: msgspec.json.decode(word), lambda value: isinstance(value, dict), "a JSON object")


def _shape(args: argparse.Namespace) -> Shape:
    return Shape(**{name: getattr(args, name) for name in Shape.__dataclass_fields__})


def plan_of(args: argparse.Namespace) -> Plan:
    """Raises DatasetError and ValueError for arguments that do not fit together."""
    if args.request_rate is not None and args.concurrency is not None:
        raise ValueError("--request-rate and --concurrency are two kinds of load: give one of them")
    if args.chat and args.token_ids:
        raise ValueError("chats are text: --token-ids goes with /v1/completions alone")
    dataset, shape = DATASETS[args.dataset], _shape(args)
    dataset.check_only(shape)
    return Plan(
        dataset=dataset,
        shape=shape,
        seed=args.seed,
        rate_per_s=args.request_rate,
        concurrency=args.concurrency or 64,
        duration_s=args.duration,
        timeout_s=args.timeout,
        processes=args.processes,
        warm_up=args.warm_up,
        rounds=args.rounds or (3 if args.against else 1),
        chat=args.chat,
        body={"temperature": args.temperature, **({} if args.respect_eos else {"ignore_eos": True}), **args.extra_body},
    )


def named_of(args: argparse.Namespace) -> dict[str, str]:
    """Name → URL, ours first. Raises ValueError."""
    if not args.url:
        raise ValueError("which server? --url http://127.0.0.1:8000")
    named = {args.name: args.url}
    for word in args.against:
        name, equals, url = word.partition("=")
        if not equals:
            raise ValueError(f"--against wants NAME=URL, not {word!r}")
        if name in named:
            raise ValueError(f"two servers are called {name}: give names that differ (--name for the first)")
        named[name] = url
    for name in named:
        if not NAME.fullmatch(name):
            raise ValueError(f"a server's name has letters, digits, - and _, not {name!r}")
    return named


def texts_of(args: argparse.Namespace, server: Server) -> Texts:
    """Raises ServerError, PromptError."""
    if args.token_ids:
        return Ids()
    return Words(PromptMaker(tokenizer(args.tokenizer, server)))


# ---- the command --------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, prog: str = "python -m treeline_bench serving") -> int:
    """Returns the exit status; a wrong command line exits with 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    top = parser(prog)
    args = top.parse_args(argv)
    console = Console(stderr=True)
    take_interrupts()
    try:
        try:
            plan, limits, named = plan_of(args), parse_limits(args.goodput), named_of(args)
        except ValueError as error:
            top.error(str(error))
        if args.output is not None:
            check_writable(args.output)
        if args.results is not None:
            check_writable(args.results / f"{PREFIX}{args.dataset}.json")
        servers = [find(name, url, args.api_key, args.model) for name, url in named.items()]
        texts = texts_of(args, servers[0])
        with RichDisplay("serving", console) as display:
            console.print(plan.words(), highlight=False, markup=False)
            found = run(plan, servers, texts, limits, display)
        return _report_on(found, plan, args, argv, console)
    except (ServerError, DatasetError, PromptError, ClientFailed, OSError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted before anything was measured", highlight=False)
        return 130


def _report_on(found: Run, plan: Plan, args: argparse.Namespace, argv: Sequence[str], console: Console) -> int:
    show(found, Console())
    shortest_s = min((one.duration_s for each in found.measured for one in each.rounds), default=0.0)
    if plan.duration_s is not None and not found.interrupted and shortest_s < plan.duration_s - LAST_ARRIVALS_S:
        console.print(
            f"all prompts were sent after {shortest_s:.1f} s of {plan.duration_s:g}: more of them by --num-prompts",
            highlight=False,
        )
    if args.output is not None:
        write_json(args.output, found, plan, argv)
    complete = not found.interrupted and not found.gone
    if args.results is not None:
        if complete:
            write_results(args.results, found, plan, argv)
        else:
            console.print(f"no results in {args.results}: the run is not whole", highlight=False, markup=False)
    if found.interrupted:
        return 130
    answered = all(any(one.completed for one in each.rounds) for each in found.measured)
    return 0 if answered and complete else 1
