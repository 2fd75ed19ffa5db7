"""The picker's process: its servers, its beginning and its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import uvloop
from treeline_wire.logs import set_up
from treeline_wire.security import CurveKeys, KeyFileError

from treeline_epp import fleet_report
from treeline_epp.admin import Handler, Page, PageServer
from treeline_epp.endpoints.discovery import DiscoveryError, discover, parse_file
from treeline_epp.endpoints.scraper import Scraping
from treeline_epp.extproc.clients import Clients
from treeline_epp.extproc.server import ExtProcService, server_options
from treeline_epp.extproc.session import SessionLimits
from treeline_epp.extproc.tls import TlsError, credentials
from treeline_epp.fleet import Fleet
from treeline_epp.health import Health
from treeline_epp.metrics import Metrics
from treeline_epp.options import Options, options_of
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.requests.body import BodyBudget
from treeline_epp.requests.isolation import Isolation
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import Router
from treeline_epp.tokenizers.sources import FolderOrigin, SourceError, specs_of
from treeline_epp.tokenizers.watch import TokenizerSources
from treeline_epp.xds.eds import Eds

if TYPE_CHECKING:
    from treeline_epp.kube.source import KubernetesSource

log = logging.getLogger("treeline_epp")

_ENOUGH_FILES = 20_000
_WRONG_HOST = frozenset({errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN})


class StartError(Exception):
    """The picker cannot start; the message says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the picker until SIGTERM or SIGINT; returns the exit status."""
    options = options_of(sys.argv[1:] if argv is None else argv)
    set_up(options.log_level, "treeline_epp", "treeline_kube")
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
    """The picker's whole life, until `stopping` is set. Raises `StartError`."""
    for flag in options.ignored:
        log.warning("flag %s of other endpoint pickers is ignored", flag)
    curve, tokenizers = _read_secrets(options), _tokenizers(options)
    _raise_file_limit()
    metrics, registry, eds = Metrics(), ModelRegistry(), Eds()
    health = await Health.starting()
    seed = time.time_ns() & 0xFFFF_FFFF
    picker = Picker(PickerConfig(options.policy, options.max_ttft_seconds, options.fallback_endpoints, seed))
    async with contextlib.AsyncExitStack() as stack:
        # Only loopback and cluster addresses are asked; a proxy from the environment would be in the way.
        scraping = Scraping(
            options.metric_names, path=options.model_server_metrics_path, port=options.model_server_metrics_port
        )
        fleet = Fleet(
            picker,
            registry,
            eds,
            curve=curve,
            tokenizers=tokenizers,
            scraping=scraping,
            key_file=options.engine_key_file,
            on_gone=metrics.forget,
        )
        metrics.observe(lambda: fleet_report.samples(fleet))
        kube = await _kubernetes(options, registry, metrics, stack)
        isolation = Isolation.of(options.trust_edge, curve)
        router = Router(picker, registry, metrics, on_trouble=fleet.probe_now, isolation=isolation)
        metrics_pages = _metrics_pages(metrics)
        admin_pages = _admin_pages(options, health, fleet, picker, kube)
        ext_proc, control = _servers(options, router, health, eds)
        tasks: list[asyncio.Task[object]] = []
        try:
            await _listen(options, metrics_pages, admin_pages, ext_proc, control)
            source = discover(options.endpoint, options.endpoints_file) if kube is None else kube.specs()
            following = asyncio.create_task(fleet.run(source))
            waiting = asyncio.create_task(stopping.wait())
            tasks += [following, waiting, asyncio.create_task(_open(fleet, health, metrics, picker))]
            await asyncio.wait((following, waiting), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            # In order: say that we leave, finish what is open, stop following, stop listening.
            if tasks:
                log.info("stopping")
            await health.set_ready(False)
            metrics.ready.set(0)
            await ext_proc.stop(options.drain_timeout)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await control.stop(None)
            await metrics_pages.stop()
            await admin_pages.stop()


def _raise_file_limit() -> None:
    """Each endpoint takes about nine file descriptors; the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < _ENOUGH_FILES:
        log.warning(
            "the limit of open files is %d, enough for about %d endpoints; raise it (ulimit -Hn, or the container "
            "runtime's default) if there are to be more",
            hard,
            (hard - 100) // 10,
        )


async def _kubernetes(
    options: Options, registry: ModelRegistry, metrics: Metrics, stack: contextlib.AsyncExitStack
) -> KubernetesSource | None:
    """The source that follows Kubernetes, if that is asked for. Raises `StartError`."""
    if not options.kubernetes:
        return None
    from treeline_kube.client import Client
    from treeline_kube.errors import NoCluster

    from treeline_epp.kube.source import KubernetesSource, Scope

    try:
        client = await Client.from_config(options.kubeconfig, options.context)
    except NoCluster as error:
        raise StartError(str(error)) from error
    scope = Scope(
        options.pool_namespace,
        gateway=options.gateway,
        pool=options.pool_name,
        group=options.pool_group,
        selector=options.endpoint_selector or {},
        ports=options.endpoint_target_ports,
    )
    source = await stack.enter_async_context(KubernetesSource(scope, client, registry.set_pools))
    metrics.observe(source.samples)
    return source


async def _open(fleet: Fleet, health: Health, metrics: Metrics, picker: Picker) -> None:
    """Become ready."""
    started = time.monotonic()
    await fleet.wait_until_ready()
    await health.set_ready(True)
    metrics.ready.set(1)
    log.info("ready after %.2f s, %d endpoints known", time.monotonic() - started, len(picker.endpoints))
    # Everything imported so far lives for ever: the collector need not look at it again. What the tree allocates later
    # has no cycles, so the collector may also come seldom; its pauses would be the slowest picks.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


def _servers(options: Options, router: Router, health: Health, eds: Eds) -> tuple[grpc.aio.Server, grpc.aio.Server]:
    """`(ext_proc, EDS and health)`, not yet listening."""
    limits = server_options(options.max_body_bytes)
    ext_proc, control = grpc.aio.server(options=limits), grpc.aio.server(options=limits)
    service = ExtProcService(
        router,
        SessionLimits(
            options.max_body_bytes,
            strip_response_headers=not options.expose_routing,
            clients=None if options.max_client_requests is None else Clients(options.max_client_requests),
            waiting=BodyBudget(options.max_waiting_body_bytes),
        ),
    )
    ext_proc.add_generic_rpc_handlers((service.handler(),))
    if options.health_checking:
        health.add_to(ext_proc)
    control.add_generic_rpc_handlers((eds.handler(),))
    health.add_to(control)
    return ext_proc, control


async def _listen(
    options: Options,
    metrics: PageServer,
    admin: PageServer,
    ext_proc: grpc.aio.Server,
    control: grpc.aio.Server,
) -> None:
    """Bind every port. Raises `StartError`."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        port, flag = options.grpc_port, "--grpc-port"
        _can_listen(options.host, port)
        _add_port(ext_proc, f"{host}:{port}", options, tls=options.secure_serving)
        port, flag = options.grpc_health_port, "--grpc-health-port"
        _can_listen(options.host, port)
        _add_port(control, f"{host}:{port}", options, tls=options.require_client_certificates)
        port, flag = options.metrics_port, "--metrics-port"
        _can_listen(options.host, port)
        await metrics.start(options.host, port)
        port, flag = options.admin_port, "--admin-port"
        _can_listen(options.host, port)
        await admin.start(options.host, port)
    except TlsError as error:
        raise StartError(str(error)) from error
    except (RuntimeError, OSError) as error:
        why = _words_of(error)
        wrong_host = isinstance(error, OSError) and error.errno in _WRONG_HOST
        fix = "correct --host" if wrong_host else f"choose another port with {flag}"
        raise StartError(f"cannot listen on {options.host}:{port}: {why}; {fix}") from error
    await ext_proc.start()
    await control.start()


def _add_port(server: grpc.aio.Server, address: str, options: Options, *, tls: bool) -> None:
    if tls:
        keys = credentials(options.cert_path, clients=options.require_client_certificates)
        server.add_secure_port(address, keys)
    else:
        server.add_insecure_port(address)


def _can_listen(host: str, port: int) -> None:
    """Raises `OSError`. gRPC would only say that it failed, and write a line of its own to stderr."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _read_secrets(options: Options) -> CurveKeys | None:
    """The key pair, after a look at what else is read from files. Raises `StartError`."""
    try:
        curve = None if options.curve_dir is None else CurveKeys.load(options.curve_dir)
        if options.endpoints_file is not None:  # wrong at start is an error; wrong later is only said
            parse_file(options.endpoints_file.read_text(encoding="utf-8"))
    except KeyFileError as error:
        raise StartError(f"--curve-dir: {error}") from error
    except (DiscoveryError, OSError, UnicodeDecodeError) as error:
        raise StartError(f"--endpoints-file {options.endpoints_file}: {_words_of(error)}") from error
    return curve


def _words_of(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


def _tokenizers(options: Options) -> TokenizerSources:
    """What the flags ask for. A directory for all models must be there at the start; those of single models, which an
    operator mounts, may come later. Raises `StartError`."""
    specs = specs_of(options.tokenizer, options.chat_template)
    try:
        for spec in specs:
            if isinstance(spec.source, Path) and not spec.model:
                FolderOrigin(spec.source).version()
    except SourceError as error:
        raise StartError(f"--tokenizer: {error}") from error
    return TokenizerSources.of(specs, options.tokenizer_cache)


def _metrics_pages(metrics: Metrics) -> PageServer:
    """What Prometheus reads."""
    page = "text/plain; version=0.0.4; charset=utf-8"
    return PageServer({"/metrics": lambda _query: Page(metrics.render(), content_type=page)})


def _admin_pages(
    options: Options, health: Health, fleet: Fleet, picker: Picker, kube: KubernetesSource | None
) -> PageServer:
    """What the kubelet, the operator and whoever looks for a fault read."""

    def detail() -> dict[str, object]:
        return {} if kube is None else {"kubernetes": kube.describe()}

    def ready(_query: Mapping[str, str]) -> Page:
        return Page({"ready": health.ready, **detail()}, 200 if health.ready else 503)

    pages: dict[str, Handler] = {
        "/ready": ready,
        "/live": lambda _query: Page({"live": True}),
        "/endpoints": lambda _query: Page({**fleet_report.listing(fleet), "detail": detail()}),
    }
    debug: dict[str, Handler] = {}
    if options.enable_debug_endpoints:
        debug["/debug/endpoints"] = lambda _query: Page({"endpoints": fleet_report.describe(fleet)})
        debug["/debug/tree"] = lambda query: _tree(picker, query.get("pod"))
    return PageServer(pages | debug, private=debug)


def _tree(picker: Picker, name: str | None) -> Page:
    if name is None:
        return Page({"totals": picker.index.totals(), "pods": sorted(picker.endpoints)})
    endpoint = picker.endpoints.get(name)
    if endpoint is None:
        return Page({"error": f"no endpoint {name!r}", "pods": sorted(picker.endpoints)}, 404)
    blocks = set().union(*(picker.index.blocks_of(pod) for pod in endpoint.pods))
    return Page({"pod": name, "blocks": [str(block) for block in sorted(blocks)]})
