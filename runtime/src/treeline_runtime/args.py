"""`treeline serve`: its arguments and their parsing. The fields document them."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from treeline_wire import ports
from treeline_wire.command_line import Parser, one_of_two
from treeline_wire.logs import FORMAT_HELP, FORMATS
from treeline_wire.settings import add_flags, port_setting, setting, settings_of, shown, values

from treeline_runtime.config import ConfigError, SchedulerConfig

EPILOG = """\
examples:
  treeline serve tiny                                the tiny model that comes along, http://127.0.0.1:8000
  treeline serve Qwen/Qwen3-0.6B --port 9000         downloaded from the Hugging Face Hub (HF_TOKEN if gated)
  treeline serve ./m --port 8001 --no-events --metrics-port off --admin-port off
                                                     a second server on this machine, inference alone
  treeline serve ./m --host 0.0.0.0 --curve-dir /keys   in a pod: events encrypted, open to the endpoint picker

try it:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "tiny", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'

signals: SIGTERM drains (--pre-stop, then --drain-timeout), exit status 0; Ctrl-C ends in seconds; a second one at once.
Logs go to standard error. Exit status: 0 stopped as asked, 1 something failed, 2 wrong arguments.
"""

GROUPS = {
    "serving": "serving",
    "surfaces": "metrics, traces and administration",
    "engine": "engine and memory",
    "scheduling": "scheduling",
    "publishing": "KV events and load, for a prefix-aware router",
    "lifetime": "start, stop and logs",
}
"""Groups of `--help`, in order: name → title."""


MAX_RANKS = 64


def _origin(text: str) -> str:
    if text == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9.\[\]:-]+", text):
        return text
    raise argparse.ArgumentTypeError(f"expected '*' or scheme://host[:port] without a path, got {text!r}")


def _topic(text: str) -> str:
    if len(text) <= 256 and text.isprintable():
        return text
    raise argparse.ArgumentTypeError(f"expected at most 256 printable characters, got {text!r}")


def _port_or_off(text: str) -> int | None:
    return None if text == "off" else int(text)


@dataclass(frozen=True, kw_only=True)
class ServerArgs(SchedulerConfig):
    """All settings of `treeline serve`. None: derived from the checkpoint or the machine."""

    served_model_name: str | None = setting(
        None,
        group="serving",
        metavar="NAME",
        help="the name requests use (default: the folder's or the Hub id)",
    )
    host: str = setting(
        "127.0.0.1",
        group="serving",
        help="address to listen on (default: %(default)s; 0.0.0.0 = every interface)",
    )
    port: int = port_setting(
        ports.RUNTIME_HTTP, group="serving", help="HTTP port (default: %(default)s; 0 = any free one)"
    )
    grpc_port: int | None = port_setting(
        None,
        group="serving",
        metavar="PORT",
        parse=_port_or_off,
        help="port of KServe's and SGLang's protocols over gRPC (default: off; 0 = any free one)",
    )
    api_key: str | None = setting(
        None,
        group="serving",
        metavar="KEY",
        env="TREELINE_API_KEY",
        secret=True,
        help="demand 'Authorization: Bearer KEY' (probes and information stay open); better in the environment as "
        "TREELINE_API_KEY, since others can see the arguments of processes",
    )
    sampling_defaults: Literal["model", "openai"] = setting(
        "model",
        group="serving",
        rare=True,
        help="defaults of sampling: the checkpoint's generation_config.json, or OpenAI's (default: %(default)s)",
    )
    tool_call_parser: str = setting(
        "auto",
        group="serving",
        metavar="NAME",
        help="format of tool calls, by SGLang's and vLLM's names (hermes, llama3, mistral, …); none = refuse "
        "requests with tools (default: auto: found in the chat template)",
    )
    reasoning_parser: str = setting(
        "auto",
        group="serving",
        metavar="NAME",
        help="format of reasoning (deepseek_r1, …); none = leave it in the text (default: auto: by template)",
    )
    strict_schemas: bool = setting(
        False,
        group="serving",
        rare=True,
        help="refuse a JSON Schema with strict: true and unknown keywords or formats; else a header of the answer "
        "names them",
    )
    enable_debug_endpoints: bool = setting(
        False,
        group="surfaces",
        rare=True,
        help="serve /debug/radix on the admin port; it shows cached prompts",
    )
    cors_allow_origin: tuple[str, ...] = setting(
        (),
        group="serving",
        rare=True,
        metavar="ORIGIN",
        repeated=True,
        parse=_origin,
        help="let web pages of this origin, e.g. https://chat.example.org, call the API; repeatable, '*' = any "
        "(default: none)",
    )
    max_bytes_in_flight: int = setting(
        512 << 20,
        group="serving",
        rare=True,
        metavar="BYTES",
        at_least=1 << 20,
        help="memory for bodies and prompts of all requests, half of it for one client; beyond it 503 (default: "
        "%(default)s)",
    )

    allowed_media_domains: tuple[str, ...] = setting(
        (),
        group="serving",
        rare=True,
        metavar="DOMAIN",
        several=True,
        help="fetch images of requests from these: [http://]HOST[:PORT], or *.HOST for all below it; never from "
        "addresses that are not public (default: images come in bodies alone)",
    )
    max_images: int = setting(
        8, group="serving", rare=True, metavar="N", at_least=0, help="images of a request (default: %(default)s)"
    )
    max_image_pixels: int = setting(
        64 << 20,
        group="serving",
        rare=True,
        metavar="N",
        at_least=1,
        help="pixels of an image or a video's frame, known before it is decoded (default: %(default)s)",
    )
    max_audio_seconds: int = setting(
        1200,
        group="serving",
        rare=True,
        metavar="S",
        at_least=1,
        help="length of a recording (default: %(default)s)",
    )
    max_video_seconds: int = setting(
        600,
        group="serving",
        rare=True,
        metavar="S",
        at_least=1,
        help="length of a video (default: %(default)s)",
    )
    media_timeout: float = setting(
        30.0,
        group="serving",
        rare=True,
        metavar="S",
        above=0,
        help="503 for a request whose images are not fetched and decoded after S seconds (default: 30)",
    )

    dp_size: int = setting(
        1,
        group="engine",
        metavar="N",
        at_least=1,
        at_most=MAX_RANKS,
        help="run N engines behind this server, each with the whole model, a cache and ports of its own: the ports of "
        "events count up by rank, and so do CUDA devices; a router names a request's rank in the header "
        "X-data-parallel-rank (default: %(default)s)",
    )

    node_rank: int = setting(
        0,
        group="engine",
        rare=True,
        metavar="K",
        at_least=0,
        env="LWS_WORKER_INDEX",
        help="this machine's number among --nnodes; that with 0 serves, the others compute for it (default: "
        "LWS_WORKER_INDEX, or 0)",
    )

    metrics_host: str = setting(
        "127.0.0.1",
        group="surfaces",
        rare=True,
        metavar="HOST",
        help="address of /metrics, which has no key (default: %(default)s)",
    )
    metrics_port: int | None = port_setting(
        ports.RUNTIME_METRICS,
        group="surfaces",
        metavar="PORT",
        parse=_port_or_off,
        help="port of /metrics (default: %(default)s; 0 = any free one; off = none)",
    )
    admin_host: str = setting(
        "127.0.0.1",
        group="surfaces",
        metavar="HOST",
        help="address of administration; beyond loopback it needs the key of TREELINE_ADMIN_KEY as "
        "'Authorization: Bearer KEY' (default: %(default)s)",
    )
    admin_port: int | None = port_setting(
        ports.RUNTIME_ADMIN,
        group="surfaces",
        metavar="PORT",
        parse=_port_or_off,
        help="port of administration (default: %(default)s; 0 = any free one; off = none)",
    )
    admin_key: str | None = setting(None, group=None, secret=True, help="of administration, from TREELINE_ADMIN_KEY")
    tracing: bool = setting(
        False,
        group="surfaces",
        help="OpenTelemetry traces over OTLP/gRPC, as the variables OTEL_… say (docs/operations.md)",
    )

    no_events: bool = setting(False, group="publishing", help="publish nothing")
    events_port: int = port_setting(
        ports.EVENTS,
        group="publishing",
        rare=True,
        metavar="PORT",
        help="KV events, ZMQ PUB (default: %(default)s; 0 = any)",
    )
    replay_port: int = port_setting(
        ports.REPLAY,
        group="publishing",
        rare=True,
        metavar="PORT",
        help="replay and snapshot, ZMQ ROUTER (default: %(default)s)",
    )
    load_port: int = port_setting(
        ports.LOAD, group="publishing", rare=True, metavar="PORT", help="load reports, ZMQ PUB (default: %(default)s)"
    )
    kv_transfer_port: int | None = port_setting(
        None,
        group="publishing",
        rare=True,
        metavar="PORT",
        parse=_port_or_off,
        help="give cached pages to other runtimes at this port, ZMQ ROUTER; needs --host-cache (default: none; 0 = any "
        "free one; off = none)",
    )
    kv_events_topic: str = setting(
        "",
        group="publishing",
        rare=True,
        metavar="TOPIC",
        parse=_topic,
        help="first frame of KV events, for subscribers that filter (default: none)",
    )
    curve_dir: str | None = setting(
        None,
        group="publishing",
        metavar="DIR",
        help="folder with the CURVE key pair: publish events and pages on --host; without it on loopback only",
    )

    pre_stop: float = setting(
        0.0,
        group="lifetime",
        metavar="S",
        at_least=0,
        help="accept requests for S seconds after SIGTERM (default: 0)",
    )
    drain_timeout: float = setting(
        30.0,
        group="lifetime",
        metavar="S",
        at_least=0,
        help="then finish requests for up to S seconds (default: 30)",
    )
    start_timeout: float = setting(
        1800.0,
        group="lifetime",
        rare=True,
        metavar="S",
        at_least=0,
        help="give up loading after S seconds (default: 1800)",
    )
    watchdog_timeout: float = setting(
        300.0,
        group="lifetime",
        rare=True,
        metavar="S",
        at_least=0,
        help="end the server if a process hangs for S seconds; 0 = never (default: 300)",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", group="lifetime", help="(default: %(default)s)"
    )
    log_format: str | None = setting(None, group="lifetime", choices=FORMATS, help=FORMAT_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"--node-rank {self.node_rank} is none of the {self.nnodes} machines (--nnodes), from 0")
        if self.nnodes > 1 and self.dp_size > 1:
            raise ConfigError("--dp-size is for one machine: with --nnodes start more servers instead")
        if self.kv_transfer_port is not None and self.host_cache is None:
            raise ConfigError("--kv-transfer-port needs --host-cache, from which pages are sent")

    @property
    def expert_ranks(self) -> int:
        return self.tp_size if self.ranks > 1 else self.dp_size

    @property
    def shares_experts(self) -> bool:
        """Whether data-parallel ranks do, and so take every step together."""
        return self.ep_size > self.tp_size

    def public(self) -> dict[str, Any]:
        """The arguments for `/server_info`, without secrets."""
        return shown(self)


class _HelpAll(argparse.Action):
    """Prints the help of all flags and exits."""

    def __call__(self, *_: object) -> NoReturn:
        build_parser().print_help()
        raise SystemExit(0)


def build_parser(prog: str = "treeline serve", *, short: bool = False) -> argparse.ArgumentParser:
    """`short`: its help omits the rare flags, which still work."""
    parser = Parser(
        prog=prog,
        usage="%(prog)s MODEL [FLAG …]",
        description="Serve one model: an OpenAI-compatible API (and SGLang's /generate) over a radix prefix cache.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = settings_of(ServerArgs)["model"][1]
    parser.add_argument("word", nargs="?", metavar="MODEL", help=model.help)
    said = "show these and the rarer flags (docs/serve.md)" if short else argparse.SUPPRESS
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help=said)
    for group, title in GROUPS.items():
        add_flags(parser.add_argument_group(title), ServerArgs, group, short=short)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> ServerArgs:
    """Parses the command line. Exits with status 2 and a clear line if it is wrong."""
    parser = build_parser(short=True)
    given = parser.parse_args(argv)
    if given.api_key == "":
        parser.error("argument --api-key: must not be empty")
    model = one_of_two(parser, given.word, given.model, "model")
    if not model:
        parser.error("which model? Give a checkpoint folder, or org/name on the Hugging Face Hub")
    try:
        return ServerArgs(**values(ServerArgs, given) | {"model": model, "admin_key": _admin_key(parser)})
    except ConfigError as error:
        parser.error(str(error))


def _admin_key(parser: argparse.ArgumentParser) -> str | None:
    """The admin key from the environment: one word of printable ASCII, so that a header can carry it."""
    key = os.environ.get("TREELINE_ADMIN_KEY") or None
    if key is not None and not all("!" <= character <= "~" for character in key):
        parser.error("TREELINE_ADMIN_KEY: a key is one word of printable ASCII")
    return key
