"""The picker's process: its servers, its beginning and its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

import grpc
import httpx
import uvloop
from treeline_wire.security import CurveKeys, KeyFileError
from treeline_wire.tokenizer import BundleError, TokenizerBundle

from treeline_epp.admin import Admin, Handler, Page
from treeline_epp.catalog import Catalog
from treeline_epp.discovery import DiscoveryError, discover, parse_file
from treeline_epp.eds import Eds
from treeline_epp.endpoint import EndpointSpec
from treeline_epp.fleet import Fleet
from treeline_epp.health import Health
from treeline_epp.metrics import Metrics
from treeline_epp.options import Options, options_of
from treeline_epp.picker import Picker, PickerConfig
from treeline_epp.routing import Router
from treeline_epp.server import ExtProc, server_options
from treeline_epp.tls import TlsError, credentials

if TYPE_CHECKING:
    from treeline_epp.kube.source import KubernetesSource

log = logging.getLogger("treeline_epp")

_WRONG_HOST = frozenset({errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN})


class StartError(Exception):
    """The picker cannot start; the message says why and what to do."""


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
    for flag in options.ignored:
        log.warning("flag %s of other endpoint pickers is ignored", flag)
    curve, bundle = _read_secrets_and_tokenizer(options)
    metrics, catalog, health, eds = Metrics(), Catalog(), Health(), Eds()
    seed = time.time_ns() & 0xFFFF_FFFF
    config = PickerConfig(options.policy, options.max_ttft_seconds, options.fallback_endpoints, seed)
    picker = Picker(config)
    async with contextlib.AsyncExitStack() as stack:
        # Only loopback and cluster addresses are asked; a proxy from the environment would be in the way.
        http = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=None))
        await stack.enter_async_context(http)
        fleet = Fleet(picker, catalog, eds, http, curve=curve, bundle=bundle, on_gone=metrics.forget)
        metrics.observe(fleet.samples)
        kube = await _kubernetes(options, catalog, metrics, stack)
        router = Router(picker, catalog, metrics, on_trouble=fleet.kick)
        admin = Admin(_pages(options, metrics, health, fleet, picker, kube))
        ext_proc, control = _servers(options, router, health, eds)
        tasks: list[asyncio.Task[object]] = []
        try:
            await _listen(options, admin, ext_proc, control)
            following = asyncio.create_task(fleet.run(_source(options, kube)))
            waiting = asyncio.create_task(stopping.wait())
            tasks += [following, waiting, asyncio.create_task(_open(fleet, health, metrics, picker))]
            await asyncio.wait((following, waiting), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            # In order: say that we leave, finish what is open, stop following, stop listening.
            if tasks:
                log.info("stopping")
            health.set_ready(False)
            metrics.ready.set(0)
            await ext_proc.stop(options.drain_timeout)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await control.stop(None)
            await admin.stop()


def _source(options: Options, kube: KubernetesSource | None) -> AsyncIterator[tuple[EndpointSpec, ...]]:
    return discover(options.endpoint, options.endpoints_file) if kube is None else kube.specs()


async def _kubernetes(
    options: Options, catalog: Catalog, metrics: Metrics, stack: contextlib.AsyncExitStack
) -> KubernetesSource | None:
    """The source that follows Kubernetes, if that is asked for. Raises :class:`StartError`."""
    if not options.kubernetes:
        return None
    from treeline_epp.kube.client import KubeClient, NoCluster
    from treeline_epp.kube.source import KubernetesSource, Scope

    client = KubeClient(options.kubeconfig, options.context)
    try:
        await client.open()
    except NoCluster as error:
        raise StartError(str(error)) from error
    scope = Scope(
        options.pool_namespace,
        gateway=options.gateway,
        pool=options.pool_name,
        group=options.pool_group,
        selector=options.endpoint_selector,
        ports=options.endpoint_target_ports,
    )
    source = await stack.enter_async_context(KubernetesSource(scope, client, catalog.set_pools))
    metrics.observe(source.samples)
    return source


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
    if options.health_checking:
        ext_proc.add_generic_rpc_handlers((health.handler(),))
    control.add_generic_rpc_handlers((eds.handler(), health.handler()))
    return ext_proc, control


async def _listen(
    options: Options, admin: Admin, ext_proc: grpc.aio.Server, control: grpc.aio.Server
) -> None:
    """Bind every port. Raises :class:`StartError`."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        port, flag = options.grpc_port, "--grpc-port"
        _can_listen(options.host, port)
        if options.secure_serving:
            ext_proc.add_secure_port(f"{host}:{port}", credentials(options.cert_path))
        else:
            ext_proc.add_insecure_port(f"{host}:{port}")
        port, flag = options.grpc_health_port, "--grpc-health-port"
        _can_listen(options.host, port)
        control.add_insecure_port(f"{host}:{port}")
        port, flag = options.metrics_port, "--metrics-port"
        _can_listen(options.host, port)
        await admin.start(options.host, port)
    except TlsError as error:
        raise StartError(str(error)) from error
    except (RuntimeError, OSError) as error:
        why = (error.strerror if isinstance(error, OSError) else "") or str(error)
        wrong_host = isinstance(error, OSError) and error.errno in _WRONG_HOST
        fix = "correct --host" if wrong_host else f"choose another port with {flag}"
        raise StartError(f"cannot listen on {options.host}:{port}: {why}; {fix}") from error
    await ext_proc.start()
    await control.start()


def _can_listen(host: str, port: int) -> None:
    """Raises ``OSError``. gRPC would only say that it failed, and write a line of its own to stderr."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


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
    options: Options,
    metrics: Metrics,
    health: Health,
    fleet: Fleet,
    picker: Picker,
    kube: KubernetesSource | None,
) -> Mapping[str, Handler]:
    def detail() -> dict[str, object]:
        return {} if kube is None else {"kubernetes": kube.describe()}

    def ready(_query: Mapping[str, str]) -> Page:
        return Page({"ready": health.ready, **detail()}, 200 if health.ready else 503)

    pages: dict[str, Handler] = {
        "/metrics": lambda _query: Page(
            metrics.render(), content_type="text/plain; version=0.0.4; charset=utf-8"
        ),
        "/ready": ready,
        "/live": lambda _query: Page({"live": True}),
        "/endpoints": lambda _query: Page({**fleet.listing(), "detail": detail()}),
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
