"""`treeline up`: a model served on this machine, through a real Envoy and the endpoint picker."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from treeline_epp.endpoints.discovery import DiscoveryError, parse_flag, unique
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.policies import policy_flag, policy_help
from treeline_operator.envoy import Tracing
from treeline_operator.envoy.keys import KEY_FORM, read_secret
from treeline_wire import tracing_env
from treeline_wire.command_line import Parser, ended_at_once, one_of_two
from treeline_wire.tiny_model import tiny_model
from treeline_wire.tracing_env import TracingError

from treeline.up.plan import UpOptions, ports_from

MOST_REPLICAS = 100
"""Then the ports of one kind would meet those of the next."""
EPILOG = """examples:
  treeline up                                   the tiny model that comes with Treeline, two runtimes
  treeline up ./Qwen3-0.6B --replicas 1         a checkpoint in Hugging Face layout
  treeline up Qwen/Qwen3-0.6B                   a Hugging Face id (downloaded; HF_TOKEN is used when set)
  treeline up --policy round_robin              compare with routing that ignores prefixes
  treeline up --port-base 9100                  beside another one: all ports from 9100 on
  treeline up ./Qwen3-0.6B -- --context-length 4096
  treeline up --engine a=127.0.0.1:8001 --engine b=127.0.0.1:8002 -- --tokenizer hf://Qwen/Qwen3-0.6B
                                                before two servers (vLLM, SGLang, ours) that run already

Arguments after `--` go to every runtime (see `treeline serve --help`); with --engine, to the picker (see
`treeline pick --help`). vLLM and SGLang do not tell their tokenizer: name it by --tokenizer, so that prompts
are matched with what their caches hold (docs/engines.md)."""


def parser() -> argparse.ArgumentParser:
    defaults = UpOptions(model="")
    up = Parser(
        prog="treeline up",
        usage="%(prog)s [MODEL] [FLAG …] [-- FLAG …]\n       %(prog)s --engine NAME=HOST:PORT … [FLAG …] [-- FLAG …]",
        description=__doc__.replace("`", ""),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    up.add_argument(
        "word", nargs="?", metavar="MODEL", help="checkpoint folder or Hugging Face id (default: the tiny model)"
    )
    up.add_argument("--model", help=argparse.SUPPRESS)
    up.add_argument(
        "--engine",
        action="append",
        default=[],
        type=_engine,
        metavar="NAME=HOST:PORT[,ROLE]",
        help="put gateway and picker before this running server (vLLM, SGLang or `treeline serve`) and start no "
        "runtime; may be repeated. ROLE is prefill or decode for engines that compute one part of a request",
    )
    up.add_argument("--served-model-name", metavar="NAME", help="the name clients use (default: the folder's name)")
    up.add_argument(
        "--replicas",
        type=_positive,
        metavar="N",
        help=f"runtimes to start (default: {defaults.replicas})",
    )
    up.add_argument(
        "--threads", type=_positive, metavar="N", help="torch threads per runtime (default: the cores shared out)"
    )
    up.add_argument(
        "--host", type=_address, default=defaults.host, help="address of the gateway (default: %(default)s)"
    )
    up.add_argument("--port", type=_port, metavar="PORT", help=f"port of the gateway (default: {defaults.port})")
    up.add_argument(
        "--port-base",
        type=_port,
        metavar="PORT",
        help="first of all ports: the gateway's, four of the picker, six of each runtime (default: those of "
        "docs/operations.md)",
    )
    _add_access(up, defaults)
    _add_insights(up, defaults)
    return up


def _add_access(up: argparse.ArgumentParser, defaults: UpOptions) -> None:
    """How requests are routed, and for whom."""
    up.add_argument(
        "--policy",
        metavar="NAME[:KEY=VALUE,…]",
        type=policy_flag,
        default=defaults.policy,
        help=policy_help(),
    )
    up.add_argument(
        "--api-keys",
        type=Path,
        metavar="DIR",
        help="serve only clients with a key: one file per client, named by it, containing its key (default: serve "
        "everybody)",
    )
    up.add_argument(
        "--isolation",
        choices=("PerKey", "Shared"),
        help=f"with --api-keys: a cache for each client, or one for all (default: {defaults.isolation})",
    )
    up.add_argument(
        "--expose-routing",
        action=argparse.BooleanOptionalAction,
        default=defaults.expose_routing,
        help="show clients which runtime served them and how much of the prompt was cached (default: %(default)s)",
    )


def _add_insights(up: argparse.ArgumentParser, defaults: UpOptions) -> None:
    """What one wants to see of it."""
    up.add_argument(
        "--debug-endpoints",
        action="store_true",
        help="serve /debug/radix and /debug/tree on the admin ports (they show prompts)",
    )
    up.add_argument(
        "--no-console",
        dest="console",
        action="store_false",
        help="no page for browsers: use it where a proxy in front of the gateway serves other people "
        "(docs/console.md#behind-a-proxy)",
    )
    up.add_argument(
        "--show-prompts",
        action="store_true",
        help="let the console show beginnings of prompts to browsers on this machine",
    )
    up.add_argument(
        "--tracing",
        action="store_true",
        help="OpenTelemetry traces of Envoy, picker and runtimes over OTLP/gRPC, as the variables OTEL_… say "
        f"(default: a tenth of the requests, to http://localhost:{tracing_env.PORT})",
    )
    up.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default=defaults.log_level)
    up.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="keep the children's logs here (default: a temporary folder)"
    )


def _engine(text: str) -> EndpointSpec:
    try:
        return parse_flag(text)
    except DiscoveryError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def _address(text: str) -> str:
    """Envoy resolves no names."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address("127.0.0.1" if text == "localhost" else text))
    raise argparse.ArgumentTypeError(f"{text!r} is no IP address: give 127.0.0.1, or 0.0.0.0 for all of this machine")


def _split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    argv = list(argv)
    if "--" not in argv:
        return argv, ()
    at = argv.index("--")
    return argv[:at], tuple(argv[at + 1 :])


def _options(argv: Sequence[str]) -> tuple[UpOptions, Path | None]:
    own, passed_on = _split(argv)
    up = parser()
    args = vars(up.parse_args(own))
    log_dir = args.pop("log_dir")
    args["model"] = one_of_two(up, args.pop("word"), args["model"], "model")
    if engines := args.pop("engine"):
        args |= {"engines": _engines(up, args, engines), "picker_args": passed_on, "model": ""}
    else:
        args["runtime_args"] = passed_on
        if args["model"] is None:
            if (tiny := tiny_model()) is None:
                up.error("the tiny model is not installed: pip install 'treeline-llm[runtime]', or name a model")
            args |= {"model": str(tiny), "served_model_name": args["served_model_name"] or "tiny"}
    replicas = args["replicas"] = args["replicas"] or UpOptions.replicas
    if replicas > MOST_REPLICAS:
        up.error(f"--replicas {replicas}: at most {MOST_REPLICAS} on one machine; use Kubernetes for more")
    if (base := args.pop("port_base")) is not None:
        args |= {name: port for name, port in ports_from(base, replicas).items() if args.get(name) is None}
    args["port"] = args["port"] or UpOptions.port
    try:
        args["api_keys"] = _api_keys(args["api_keys"])
    except ValueError as error:
        up.error(f"--api-keys: {error}")
    if (isolation := args.pop("isolation")) is not None:
        if not args["api_keys"]:
            up.error("--isolation: without keys there are no clients to keep apart: add --api-keys, or leave it out")
        args["isolation"] = isolation
    if args["show_prompts"] and not args["console"]:
        up.error("--show-prompts: with --no-console no page could show them: leave out one of the two")
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=log_dir):
                pass
        except OSError as error:
            up.error(f"--log-dir: cannot write to {log_dir} ({error.strerror}): name a folder of yours")
    try:
        args["tracing"] = _tracing() if args["tracing"] else None
    except TracingError as error:
        up.error(f"--tracing: {error}")
    args["threads"] = args["threads"] or max(1, (os.cpu_count() or 1) // replicas)
    return UpOptions(**args), log_dir


def _engines(
    up: argparse.ArgumentParser, args: Mapping[str, object], engines: Sequence[EndpointSpec]
) -> tuple[EndpointSpec, ...]:
    """Exits with status 2 where a flag is given that is about runtimes of our own."""
    for name in ("model", "served_model_name", "replicas", "threads"):
        if args[name] is not None:
            flag = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            up.error(f"{flag}: with --engine no runtime is started: leave it out, or leave out --engine")
    try:
        return unique(engines)
    except DiscoveryError as error:
        up.error(f"--engine: {error}")


def _tracing() -> Tracing | None:
    """Where Envoy is to send its spans, as the variables say it to everybody. Raises TracingError."""
    name = tracing_env.exporter_name()
    if name == "none":
        return None
    if name != "otlp":
        raise TracingError(f"{tracing_env.EXPORTER}={name}: Envoy sends to a collector alone (otlp)")
    host, port = tracing_env.collector(tracing_env.endpoint())
    return Tracing(host, port, tracing_env.ratio())


_CLIENT = re.compile(r"[-._A-Za-z0-9]{1,253}")


def _api_keys(folder: Path | None) -> dict[str, str]:
    """Client → key from a folder like a mounted Secret. Raises ValueError."""
    if folder is None:
        return {}
    try:
        found = read_secret(folder)
    except OSError as error:
        why = f"cannot read {folder} ({error.strerror})"
        raise ValueError(f"{why}: name a folder with a file for each client, its key in it") from error
    if not found:
        raise ValueError(f"{folder} has no file, so nobody could be served: add one for each client")
    for client, keys in found.items():
        if not _CLIENT.fullmatch(client):
            raise ValueError(f"{client!r} is no client's name: use letters, digits, '-', '_' and '.'")
        if len(keys) != 1:
            raise ValueError(f"the file of client {client} must hold one key: {KEY_FORM}")
    return {client: keys[0] for client, keys in found.items()}


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM (status 0; 128 + signal before it was ready); status 1 when a child dies, a port is
    busy or Envoy is missing."""
    options, log_dir = _options(argv)
    with ended_at_once():
        from treeline.up import run  # with the runtime's own code: a second
    return run.up(options, log_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
