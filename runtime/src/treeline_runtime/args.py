"""`treeline serve`: its arguments, what they mean, and how they are read."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from treeline_wire import ports

EPILOG = """\
examples:
  treeline serve --model ./models/tiny                       a checkpoint on this disk, http://127.0.0.1:8000
  treeline serve --model Qwen/Qwen3-0.6B --port 9000         downloaded from the Hugging Face Hub (HF_TOKEN if gated)
  treeline serve --model ./m --port 8001 --no-events         a second server on this machine, nothing published
  treeline serve --model ./m --host 0.0.0.0 --curve-dir /keys   in a pod: events encrypted, open to the endpoint picker

try it:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "tiny", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'

signals: SIGTERM drains (--pre-stop, then --drain-timeout), exit status 0; Ctrl-C ends in seconds; a second one at once.
Logs go to standard error. Exit status: 0 stopped as asked, 1 something failed, 2 wrong arguments.
"""


@dataclass(frozen=True)
class ServerArgs:
    """Everything `treeline serve` was told. None = decided from the checkpoint or the machine."""

    model: str
    served_model_name: str | None = None
    revision: str | None = None
    host: str = "127.0.0.1"
    port: int = ports.RUNTIME_HTTP
    api_key: str | None = None
    sampling_defaults: str = "model"
    enable_debug_endpoints: bool = False

    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    threads: int | None = None
    context_length: int | None = None
    page_size: int = 16
    max_total_tokens: int | None = None
    mem_fraction: float | None = None
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    chunked_prefill_size: int | None = None
    schedule_policy: str = "fcfs"
    eviction_policy: str = "lru"

    no_events: bool = False
    events_host: str | None = None
    events_port: int = ports.EVENTS
    replay_port: int = ports.REPLAY
    load_port: int = ports.LOAD
    curve_dir: str | None = None
    allow_insecure_events: bool = False

    drain_timeout: float = 30.0
    pre_stop: float = 0.0
    start_timeout: float = 1800.0
    watchdog_timeout: float = 300.0
    log_level: str = "info"

    def public(self) -> dict[str, Any]:
        """The arguments as `/server_info` shows them: without secrets."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        shown["api_key"] = None if self.api_key is None else "(set)"
        return shown


DTYPES = ("auto", "float32", "bfloat16", "float16")


class _Parser(argparse.ArgumentParser):
    """Errors in one line that names the argument, without the page of usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")


def _int_from(low: int, high: int | None = None) -> Any:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if value < low or (high is not None and value > high):
            upper = "" if high is None else f" and at most {high}"
            raise argparse.ArgumentTypeError(f"must be at least {low}{upper}, got {value}")
        return value

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more seconds, got {text}")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


PORT = _int_from(0, 65535)


def build_parser(prog: str = "treeline serve") -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description="Serve one model: an OpenAI-compatible API (and SGLang's /generate) over a radix prefix cache.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_serving(parser.add_argument_group("serving"))
    _add_engine(parser.add_argument_group("engine and memory"))
    _add_scheduling(parser.add_argument_group("scheduling"))
    _add_publishing(parser.add_argument_group("KV events and load, for a prefix-aware router"))
    _add_lifetime(parser.add_argument_group("life and death"))
    return parser


def _add_serving(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--model",
        required=True,
        metavar="PATH_OR_HF_ID",
        help="a checkpoint folder, or org/name on the Hugging Face Hub",
    )
    add(
        "--served-model-name",
        metavar="NAME",
        help="the name requests use (default: the folder's or the Hub id)",
    )
    add("--revision", metavar="REV", help="branch, tag or commit on the Hub")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s; 0.0.0.0 = every interface)",
    )
    add(
        "--port",
        type=PORT,
        default=ports.RUNTIME_HTTP,
        help="HTTP port (default: %(default)s; 0 = any free one)",
    )
    add("--api-key", metavar="KEY", help="demand 'Authorization: Bearer KEY' (probes and metrics stay open)")
    add(
        "--sampling-defaults",
        choices=("model", "openai"),
        default="model",
        help="where unset sampling values come from: the checkpoint's generation_config.json, or OpenAI's defaults "
        "(default: %(default)s)",
    )
    add(
        "--enable-debug-endpoints",
        action="store_true",
        help="serve /debug/radix: it shows the prompts in the cache",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dtype", choices=DTYPES, default="auto", help="(default: auto: float32 on CPU, bfloat16 on CUDA)")
    add(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="auto, cpu, cuda or cuda:N (default: what the machine has)",
    )
    add(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy = random weights (default: auto)",
    )
    add("--threads", type=_int_from(1), metavar="N", help="CPU threads of the model (default: all cores)")
    add(
        "--context-length",
        type=_int_from(8),
        metavar="TOKENS",
        help="prompt + output limit (default: the model's)",
    )
    add(
        "--page-size",
        type=_int_from(1),
        default=16,
        metavar="TOKENS",
        help="cache page = event block (default: %(default)s)",
    )
    add(
        "--max-total-tokens",
        type=_int_from(16),
        metavar="TOKENS",
        help="size of the KV cache (default: from memory)",
    )
    add(
        "--mem-fraction",
        type=_fraction,
        metavar="F",
        help="share of free memory for the KV cache (default: auto)",
    )


def _add_scheduling(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-running-requests",
        type=_int_from(1),
        metavar="N",
        help="requests computed at once (default: auto)",
    )
    add(
        "--max-queued-requests",
        type=_int_from(0),
        metavar="N",
        help="requests waiting before 503 (default: no limit)",
    )
    add(
        "--chunked-prefill-size",
        type=_int_from(1),
        metavar="TOKENS",
        help="prompt tokens per step (default: auto)",
    )
    add(
        "--schedule-policy",
        default="fcfs",
        metavar="NAME",
        help="order of the waiting queue, e.g. fcfs or lpm (default: fcfs)",
    )
    add(
        "--eviction-policy",
        default="lru",
        metavar="NAME",
        help="what the cache forgets first, e.g. lru or lfu (default: lru)",
    )


def _add_publishing(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--no-events", action="store_true", help="publish nothing")
    add(
        "--events-host",
        metavar="HOST",
        help="address of the three sockets (default: loopback, or all with --curve-dir)",
    )
    add(
        "--events-port",
        type=PORT,
        default=ports.EVENTS,
        help="KV events, ZMQ PUB (default: %(default)s; 0 = any)",
    )
    add(
        "--replay-port",
        type=PORT,
        default=ports.REPLAY,
        help="replay and snapshot, ZMQ ROUTER (default: %(default)s)",
    )
    add("--load-port", type=PORT, default=ports.LOAD, help="load reports, ZMQ PUB (default: %(default)s)")
    add(
        "--curve-dir",
        metavar="DIR",
        help="folder with the CURVE key pair; without it only loopback may be bound",
    )
    add(
        "--allow-insecure-events",
        action="store_true",
        help="bind to the network without keys: everyone who can connect reads every cached prompt",
    )


def _add_lifetime(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--pre-stop",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="after SIGTERM, still accept for S seconds (default: 0)",
    )
    add(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="then finish requests for up to S seconds (default: 30)",
    )
    add(
        "--start-timeout",
        type=_seconds,
        default=1800.0,
        metavar="S",
        help="give up loading after S seconds (default: 1800)",
    )
    add(
        "--watchdog-timeout",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="a process that has not moved for S seconds ends the server; 0 = never (default: 300)",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="(default: %(default)s)",
    )


def parse_args(argv: Sequence[str] | None = None) -> ServerArgs:
    """Reads the command line. Exits with status 2 and one clear line on a wrong one."""
    parser = build_parser()
    values = vars(parser.parse_args(argv))
    if values["api_key"] is None:
        values["api_key"] = os.environ.get("TREELINE_API_KEY") or None
    elif not values["api_key"]:
        parser.error("argument --api-key: must not be empty")
    args = ServerArgs(**values)
    _check_ports(parser, args)
    return args


def _check_ports(parser: argparse.ArgumentParser, args: ServerArgs) -> None:
    named = [("--port", args.port)]
    if not args.no_events:
        named += [
            ("--events-port", args.events_port),
            ("--replay-port", args.replay_port),
            ("--load-port", args.load_port),
        ]
    seen: dict[int, str] = {}
    for flag, port in named:
        if port and port in seen:
            parser.error(f"argument {flag}: port {port} is also {seen[port]}'s")
        seen[port] = flag
