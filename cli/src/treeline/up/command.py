"""`treeline up`: a model served on this machine, through a real Envoy and the endpoint picker."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import ipaddress
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from rich.console import Console
from treeline_epp.endpoints.discovery import DiscoveryError, parse_flag, unique
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.policies import policy_flag, policy_help
from treeline_operator.envoy import EnvoyConfig, Tracing, bootstrap_json
from treeline_operator.envoy.binary import EnvoyNotFound, envoy_binary
from treeline_operator.envoy.keys import KEY_FORM, read_secret
from treeline_runtime.args import parse_args
from treeline_runtime.download import ModelNotFound, repository
from treeline_runtime.frontend import ServeError
from treeline_runtime.serve import checked_model
from treeline_wire import tracing_env
from treeline_wire.command_line import Parser, ended_at_once, one_of_two
from treeline_wire.tiny_model import tiny_model
from treeline_wire.tracing_env import TracingError

from treeline.printable import printable
from treeline.up.plan import UpOptions, busy_ports, gateway_url, plan, ports_from
from treeline.up.progress import show
from treeline.up.supervisor import ChildFailed, Supervisor

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
        metavar="NAME=HOST:PORT",
        help="put gateway and picker before this running server (vLLM, SGLang or `treeline serve`) and start no "
        "runtime; may be repeated",
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


PROBE = "~treeline-up"
"""Who asks whether everything is ready: a name that no client can have."""
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


def envoy_config(options: UpOptions) -> EnvoyConfig:
    return EnvoyConfig(
        listen_host=options.host,
        listen_port=options.port,
        ext_proc_port=options.ext_proc_port,
        eds_port=options.eds_port,
        console_port=options.picker_admin_port if options.console else None,
        api_keys={**options.api_keys, PROBE: options.probe_key} if options.api_keys else None,
        isolation=options.isolation,
        expose_cached_tokens=options.expose_routing,
        add_endpoint_header=options.expose_routing,
        tracing=options.tracing,
    )


def _model(options: UpOptions) -> str:
    """A name that clients can ask for: of engines that run already, the first that the picker knows."""
    if not options.engines:
        return options.served_model_name or (
            Path(options.model).name if Path(options.model).exists() else repository(options.model)
        )
    headers = {"x-api-key": options.probe_key} if options.api_keys else {}
    with contextlib.suppress(httpx.HTTPError, ValueError, LookupError):
        answer = httpx.get(f"{gateway_url(options)}/v1/models", headers=headers, timeout=2.0, trust_env=False)
        return printable(str(answer.json()["data"][0]["id"]))
    return "NAME"


def _how_to_try(options: UpOptions) -> str:
    url = gateway_url(options)
    model = json.dumps(_model(options)).replace("'", r"\u0027")
    key = " -H 'authorization: Bearer …'" if options.api_keys else ""
    browser = f"\nin a browser: {url}/console/ (chat, load, decisions)\n\nor:" if options.console else "\ntry:"
    return f"""ready: {url}
{browser}
  curl -i {url}/v1/chat/completions -H 'content-type: application/json'{key} \\
    -d '{{"model": {model}, "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

{_pages(options)}    stop: Ctrl-C"""


def _pages(options: UpOptions) -> str:
    picker = f"metrics: http://127.0.0.1:{options.metrics_port}/metrics (picker)"
    if options.engines:
        names = ", ".join(engine.name for engine in options.engines)
        return f"{picker}\nhow requests are routed to {names}: http://127.0.0.1:{options.picker_admin_port}/endpoints"
    return f"""{picker}, http://127.0.0.1:{options.runtime_metrics_port}/metrics (runtime-0)
administration: http://127.0.0.1:{options.runtime_admin_port} (runtime-0)"""


class _Busy(Exception):
    """Ports cannot be had; the message names them."""


MOST_LINES = 10
"""Of ports that cannot be had: a busy one is said."""


def _check(options: UpOptions) -> None:
    """What can be known before anything is started: ports, then the model, which is downloaded here if need be.

    Raises _Busy, EnvoyNotFound, ModelNotFound, ServeError; exits with status 2 for arguments that `treeline serve` does
    not take.
    """
    children = plan(options, envoy_binary(), Path())
    if busy := busy_ports(children):
        fix = "Stop what holds a port, or take others: --port-base 9100 moves all of them, --port the gateway's."
        more = [f"and {len(busy) - MOST_LINES} more"] if len(busy) > MOST_LINES else []
        raise _Busy("\n".join((*busy[:MOST_LINES], *more, fix)))
    if not options.engines:
        _, _, _, *arguments = children[0].argv  # python -m treeline_runtime
        checked_model(parse_args(arguments), copies=options.replicas)


async def _run(options: UpOptions, folder: Path, log_dir: Path, console: Console) -> int:
    bootstrap = folder / "envoy.json"
    children = plan(options, envoy_binary(), bootstrap)
    bootstrap.touch(mode=0o600)  # keys are in it
    bootstrap.write_text(bootstrap_json(envoy_config(options)))
    supervisor = Supervisor(children, log_dir)
    progress = asyncio.create_task(show(supervisor.children, console))
    try:
        status = await supervisor.run(on_ready=lambda: print(_how_to_try(options), flush=True))
    except ChildFailed as failure:
        progress.cancel()
        await asyncio.gather(progress, return_exceptions=True)
        console.print(f"treeline up: {failure}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    finally:
        progress.cancel()
        await asyncio.gather(progress, return_exceptions=True)
    console.print("stopped", highlight=False)
    return status


def _sweep() -> None:
    """Remove the folders that killed processes have left: keys are in them, and none holds their locks."""
    for old in Path(tempfile.gettempdir()).glob(f"{_WORKPLACE}*"):
        with contextlib.suppress(OSError):
            if old.lstat().st_uid == os.getuid():
                with (old / _LOCK).open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(old)


@contextlib.contextmanager
def _workplace() -> Iterator[Path]:
    """A folder of our own, gone at the end."""
    with tempfile.TemporaryDirectory(prefix=_WORKPLACE) as made, (Path(made) / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(made)


_WORKPLACE = "treeline-up-"
_LOCK = "lock"


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM (status 0; 128 + signal before it was ready); status 1 when a child dies, a port is
    busy or Envoy is missing."""
    options, log_dir = _options(argv)
    console = Console(stderr=True)
    try:
        _sweep()
        with ended_at_once():
            _check(options)
        with _workplace() as folder:
            return asyncio.run(_run(options, folder, log_dir or folder, console))
    except (EnvoyNotFound, ModelNotFound, ServeError, _Busy) as error:
        console.print(f"treeline up: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
