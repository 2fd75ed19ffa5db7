"""The picker's process: its flags, its servers, its beginning and its end."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import uvloop
from treeline_wire import ports
from treeline_wire.security import CurveKeys, KeyFileError
from treeline_wire.tokenizer import BundleError, TokenizerBundle

from treeline_epp.admin import Admin, Handler, Page
from treeline_epp.catalog import Catalog
from treeline_epp.discovery import DiscoveryError, discover, parse_file, parse_flag, unique
from treeline_epp.eds import Eds
from treeline_epp.endpoint import EndpointSpec
from treeline_epp.fleet import Fleet
from treeline_epp.health import Health
from treeline_epp.metrics import Metrics
from treeline_epp.picker import Picker, PickerConfig
from treeline_epp.routing import Router
from treeline_epp.server import ExtProc, server_options

log = logging.getLogger("treeline_epp")

POLICIES = ("treeline", "round_robin", "random")


class StartError(Exception):
    """The picker cannot start; the message says why and what to do."""


@dataclass(frozen=True)
class Options:
    """The picker's settings; each is a flag of the same name, explained in ``--help``."""

    host: str
    grpc_port: int
    grpc_health_port: int
    metrics_port: int
    endpoint: tuple[EndpointSpec, ...]
    endpoints_file: Path | None
    policy: str
    tokenizer: Path | None
    max_body_bytes: int
    curve_dir: Path | None
    drain_timeout: float
    enable_debug_endpoints: bool
    log_level: str


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="treeline pick",
        description="Treeline's endpoint picker. A proxy asks it over ext_proc where each request goes; it answers "
        "from what every endpoint has cached and how busy it is. Endpoints are engines with an OpenAI-compatible "
        "server; those of Treeline push all they know, others are routed by history.",
        epilog="Example: treeline pick --endpoint a=127.0.0.1:8000 --endpoint b=127.0.0.1:8001",
    )
    p.add_argument(
        "--host", default="127.0.0.1", help="address of all ports of this process (default %(default)s)"
    )
    p.add_argument("--grpc-port", type=int, default=ports.EXT_PROC, help="ext_proc (default %(default)s)")
    p.add_argument(
        "--grpc-health-port", type=int, default=ports.EDS, help="EDS and gRPC health (default %(default)s)"
    )
    p.add_argument(
        "--metrics-port",
        type=int,
        default=ports.METRICS,
        help="/metrics, /ready, /live (default %(default)s)",
    )
    p.add_argument(
        "--endpoint", action="append", default=[], metavar="NAME=HOST:PORT", help="an engine; may be repeated"
    )
    p.add_argument(
        "--endpoints-file",
        type=Path,
        metavar="FILE",
        help="YAML or JSON: `endpoints: [{name, address, pool?}]`; watched, replace it by renaming",
    )
    p.add_argument(
        "--policy", choices=POLICIES, default="treeline", help="how to choose (default %(default)s)"
    )
    p.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="model directory whose tokenizer and chat template are used for every endpoint; by default each engine "
        "is asked for its own",
    )
    p.add_argument(
        "--max-body-bytes",
        type=int,
        default=32 * 1024 * 1024,
        help="larger request bodies are answered 413 (default %(default)s)",
    )
    p.add_argument(
        "--curve-dir", type=Path, metavar="DIR", help="CURVE key pair for engines that publish with keys"
    )
    p.add_argument(
        "--drain-timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long open streams may go on after SIGTERM (default %(default)s)",
    )
    p.add_argument(
        "--enable-debug-endpoints",
        action="store_true",
        help="serve /debug/endpoints and /debug/tree on the metrics port",
    )
    p.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="debug logs one line for every decision, without prompt text (default %(default)s)",
    )
    return p


def options_of(argv: Sequence[str]) -> Options:
    """Parse a command line; exits with status 2 and a message where it is wrong."""
    p = parser()
    values = vars(p.parse_args(argv))
    try:
        values["endpoint"] = unique(parse_flag(text) for text in values["endpoint"])
    except DiscoveryError as error:
        p.error(str(error))
    if not values["endpoint"] and values["endpoints_file"] is None:
        p.error("no endpoints: give --endpoint NAME=HOST:PORT or --endpoints-file FILE")
    if values["max_body_bytes"] < 1024:
        p.error("--max-body-bytes must be at least 1024")
    return Options(**values)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the picker until SIGTERM or SIGINT; returns the exit status."""
    options = options_of(sys.argv[1:] if argv is None else argv)
    _log_as_json(options.log_level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_signal(options))
    except StartError as error:
        log.error("%s", error)
        return 1
    return 0


async def _until_signal(options: Options) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await serve(options, stopping)


async def serve(options: Options, stopping: asyncio.Event) -> None:
    """The picker's whole life, until ``stopping`` is set. Raises :class:`StartError`."""
    curve, bundle = _read_secrets_and_tokenizer(options)
    metrics, catalog, health, eds = Metrics(), Catalog(), Health(), Eds()
    picker = Picker(PickerConfig(policy=options.policy, seed=time.time_ns() & 0xFFFF_FFFF))
    # Only loopback and cluster addresses are asked; a proxy from the environment would be in the way.
    async with httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=None)) as http:
        fleet = Fleet(picker, catalog, eds, http, curve=curve, bundle=bundle, on_gone=metrics.forget)
        metrics.observe(fleet.samples)
        router = Router(picker, catalog, metrics, on_trouble=fleet.kick)
        admin = Admin(_pages(options, metrics, health, fleet, picker))
        ext_proc, control = _servers(options, router, health, eds)
        tasks: list[asyncio.Task[object]] = []
        try:
            await _listen(options, admin, ext_proc, control)
            following = asyncio.create_task(fleet.run(discover(options.endpoint, options.endpoints_file)))
            waiting = asyncio.create_task(stopping.wait())
            tasks += [following, waiting, asyncio.create_task(_open(fleet, health, metrics, picker))]
            await asyncio.wait((following, waiting), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            # In order: say that we leave, finish what is open, stop following, stop listening.
            log.info("stopping")
            health.set_ready(False)
            metrics.ready.set(0)
            await ext_proc.stop(options.drain_timeout)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await control.stop(None)
            await admin.stop()


async def _open(fleet: Fleet, health: Health, metrics: Metrics, picker: Picker) -> None:
    """Become ready."""
    started = time.monotonic()
    await fleet.settle()
    health.set_ready(True)
    metrics.ready.set(1)
    log.info("ready after %.2f s, %d endpoints known", time.monotonic() - started, len(picker.endpoints))
    # Everything imported so far lives for ever: the collector need not look at it again. What the tree allocates later
    # has no cycles, so the collector may also come seldom; its pauses would be the slowest picks.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


def _servers(
    options: Options, router: Router, health: Health, eds: Eds
) -> tuple[grpc.aio.Server, grpc.aio.Server]:
    """``(ext_proc, EDS and health)``, not yet listening."""
    limits = server_options(options.max_body_bytes)
    ext_proc, control = grpc.aio.server(options=limits), grpc.aio.server(options=limits)
    ext_proc.add_generic_rpc_handlers((ExtProc(router, options.max_body_bytes).handler(),))
    control.add_generic_rpc_handlers((eds.handler(), health.handler()))
    return ext_proc, control


async def _listen(
    options: Options, admin: Admin, ext_proc: grpc.aio.Server, control: grpc.aio.Server
) -> None:
    """Bind every port. Raises :class:`StartError`."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        port, flag = options.grpc_port, "--grpc-port"
        ext_proc.add_insecure_port(f"{host}:{port}")
        port, flag = options.grpc_health_port, "--grpc-health-port"
        control.add_insecure_port(f"{host}:{port}")
        port, flag = options.metrics_port, "--metrics-port"
        await admin.start(options.host, port)
    except (RuntimeError, OSError) as error:
        raise StartError(
            f"cannot listen on {options.host}:{port}: is another process using that port? Choose another with {flag}"
        ) from error
    await ext_proc.start()
    await control.start()


def _read_secrets_and_tokenizer(options: Options) -> tuple[CurveKeys | None, TokenizerBundle | None]:
    try:
        curve = None if options.curve_dir is None else CurveKeys.load(options.curve_dir)
        bundle = None if options.tokenizer is None else TokenizerBundle.from_dir(options.tokenizer)
        if options.endpoints_file is not None:  # wrong at start is an error; wrong later is only said
            parse_file(options.endpoints_file.read_text(encoding="utf-8"))
    except (KeyFileError, BundleError, DiscoveryError, OSError, UnicodeDecodeError) as error:
        raise StartError(str(error)) from error
    return curve, bundle


def _pages(
    options: Options, metrics: Metrics, health: Health, fleet: Fleet, picker: Picker
) -> Mapping[str, Handler]:
    def ready(_query: Mapping[str, str]) -> Page:
        return Page({"ready": health.ready}, 200 if health.ready else 503)

    pages: dict[str, Handler] = {
        "/metrics": lambda _query: Page(
            metrics.render(), content_type="text/plain; version=0.0.4; charset=utf-8"
        ),
        "/ready": ready,
        "/live": lambda _query: Page({"live": True}),
    }
    if options.enable_debug_endpoints:
        pages["/debug/endpoints"] = lambda _query: Page({"endpoints": fleet.describe()})
        pages["/debug/tree"] = lambda query: _tree(picker, query.get("pod"))
    return pages


def _tree(picker: Picker, name: str | None) -> Page:
    if name is None:
        return Page({"totals": picker.index.totals(), "pods": sorted(picker.endpoints)})
    endpoint = picker.endpoints.get(name)
    if endpoint is None:
        return Page({"error": f"no endpoint {name!r}", "pods": sorted(picker.endpoints)}, 404)
    return Page(
        {"pod": name, "blocks": [str(block) for block in sorted(picker.index.blocks_of(endpoint.pod))]}
    )


class _JsonLines(logging.Formatter):
    """One JSON object a line; ``extra={"fields": {...}}`` adds members."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _log_as_json(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("treeline_epp").setLevel(level.upper())
