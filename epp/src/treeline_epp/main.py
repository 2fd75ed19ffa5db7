"""The picker's process: its servers, its start and its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import uvloop
from treeline_wire.security import CurveKeys, KeyFileError
from treeline_wire.tracing_env import TracingError

from treeline_epp import fleet_report, pages, signals
from treeline_epp.admin import PageServer
from treeline_epp.endpoints.discovery import DiscoveryError, discover, read_endpoints
from treeline_epp.endpoints.prefill_calls import PrefillCalls
from treeline_epp.extproc.clients import Clients
from treeline_epp.extproc.convert import Reader
from treeline_epp.extproc.http2_server import Http2Server, Methods
from treeline_epp.extproc.session import SERVICE, ExtProcSession, SessionLimits, most_message_bytes
from treeline_epp.extproc.tls import Certificate, TlsError, client_checking
from treeline_epp.fleet import Fleet
from treeline_epp.flow.assembly import flow_control, quota_samples
from treeline_epp.flow.quotas import QuotaFile, QuotaFileError
from treeline_epp.health import CHECK, Check, Health
from treeline_epp.metrics import Metrics
from treeline_epp.observing import Observing
from treeline_epp.options import Options
from treeline_epp.peers import driver as peers
from treeline_epp.peers.gossip import Gossip
from treeline_epp.peers.seal import peer_key
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.policies import PoolPolicies
from treeline_epp.requests.body import BodyBudget
from treeline_epp.requests.gateway_rules import GatewayRules
from treeline_epp.requests.isolation import Isolation
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.prefilling import Prefilling
from treeline_epp.requests.router import Router, cost
from treeline_epp.tokenizers.sources import FolderOrigin, SourceError, specs_of
from treeline_epp.tokenizers.watch import TokenizerSources
from treeline_epp.xds.eds import Eds

if TYPE_CHECKING:
    from treeline_epp.kube.source import KubernetesSource

log = logging.getLogger("treeline_epp")

_ENOUGH_FILES = 20_000
_CONTROL = [
    # A busy port should be an error, not a second picker that takes half of the streams.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 1 << 20),
]
_WRONG_HOST = frozenset({errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN})


class StartError(Exception):
    """The picker cannot start; the message says why and what to do."""


def run(options: Options) -> None:
    """Run the picker until SIGTERM or SIGINT. Raises `StartError`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_signal(options))


async def _until_signal(options: Options) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await serve(options, stopping)


async def serve(options: Options, stopping: asyncio.Event) -> None:
    """Run the picker until `stopping` is set. Raises `StartError`."""
    for sentence in options.ignored:
        log.warning("of other endpoint pickers: %s", sentence)
    curve, tokenizers = _read_secrets(options), _tokenizers(options)
    _raise_file_limit()
    metrics, registry, eds = Metrics(), ModelRegistry(), Eds()
    health = await Health.starting()
    picker = _picker(options)
    async with contextlib.AsyncExitStack() as stack:
        observing = await stack.enter_async_context(_observing(options, picker, metrics))
        key, gone = options.engine_key_file, observing.forget
        fleet = Fleet(picker, registry, eds, curve=curve, tokenizers=tokenizers, key_file=key, on_gone=gone)
        metrics.observe(lambda: fleet_report.samples(fleet))
        rules = GatewayRules(trust_headers=options.trust_request_headers, fairness_header=options.fairness_header)
        kube = await _kubernetes(options, registry, rules, metrics, picker.policies, stack)
        quotas = _quotas(options, metrics)
        router = _router(options, picker, registry, metrics, rules, fleet, curve, observing, quotas)
        metrics_pages = pages.metrics_pages(observing)
        look = pages.demand_of(router, fleet)
        metrics.observe(lambda: signals.samples(look()))
        admin_pages = pages.admin_pages(options, health, fleet, router, kube, look)
        ext_proc, control = _servers(options, router, health, eds)
        tasks: list[asyncio.Task[object]] = []
        try:
            await _talk(options, picker, metrics, curve, stack)
            await _listen(options, metrics_pages, admin_pages, ext_proc, control)
            source = discover(options.endpoint, options.endpoints_file) if kube is None else kube.specs()
            following = asyncio.create_task(fleet.run(source))
            opening = asyncio.create_task(_open(fleet, health, metrics))
            opening.add_done_callback(lambda task: None if task.cancelled() or not task.exception() else stopping.set())
            waiting = asyncio.create_task(stopping.wait())
            needed = [following, *([] if quotas is None else [asyncio.create_task(quotas.follow())])]
            tasks += [*needed, waiting, opening]
            await asyncio.wait((*needed, waiting), return_when=asyncio.FIRST_COMPLETED)
            for ended in filter(asyncio.Task.done, (*needed, opening)):
                ended.result()
        finally:
            # In order: announce the end, finish open streams, stop following, stop listening.
            if tasks:
                log.info("stopping")
            await health.set_ready(False)
            metrics.ready.set(0)
            if router.flow is not None:
                router.flow.close()
            await ext_proc.stop(options.drain_timeout)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await control.stop(None)
            await metrics_pages.stop()
            await admin_pages.stop()


def _picker(options: Options) -> Picker:
    seed = time.time_ns() & 0xFFFF_FFFF
    config = PickerConfig(
        options.policy,
        options.max_ttft_seconds,
        1 if options.own_proxy else 0,
        seed,
        options.flow_control.saturation,
        scored=3 if options.console or options.enable_debug_endpoints else 1,
    )
    picker = Picker(config)
    log.info("policy %s", options.policy)
    return picker


async def _talk(
    options: Options,
    picker: Picker,
    metrics: Metrics,
    curve: CurveKeys | None,
    stack: contextlib.AsyncExitStack,
) -> None:
    """Exchange requests in flight with other pickers, until the stack ends. Raises `StartError`."""
    if not options.peers or curve is None:
        return
    gossip = Gossip(picker, peer_key(curve.secret))
    sock = _peer_socket(options.host, options.peer_port)
    metrics.observe(lambda: peers.samples(gossip))
    await stack.enter_async_context(peers.talking(gossip, sock, options.peers))
    picker.elsewhere = gossip.own


def _peer_socket(host: str, port: int) -> socket.socket:
    """Bind the UDP socket for peers. Raises `StartError`."""
    try:
        return peers.bound(host, port)
    except (OSError, UnicodeError) as error:  # the latter for an impossible host name
        where = f"{host}:{port} (UDP)"
        raise StartError(f"cannot listen on {where}: {_words_of(error)}; choose another with --peer-port") from error


def _raise_file_limit() -> None:
    """Raise the soft limit of open files: each endpoint takes about nine, and the usual limit is 1,024."""
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


def _observing(options: Options, picker: Picker, metrics: Metrics) -> Observing:
    """Make the observers that the flags ask for. Raises `StartError`."""
    try:
        return Observing(options, picker, metrics)
    except TracingError as error:
        raise StartError(f"--tracing: {error}") from error


def _router(
    options: Options,
    picker: Picker,
    registry: ModelRegistry,
    metrics: Metrics,
    rules: GatewayRules,
    fleet: Fleet,
    curve: CurveKeys | None,
    observing: Observing,
    quotas: QuotaFile | None,
) -> Router:
    router = Router(
        picker,
        registry,
        metrics,
        on_trouble=fleet.probe_now,
        on_unknown_model=fleet.ask_for_models,
        isolation=Isolation.of(options.trust_edge, curve),
        rules=rules,
        clients_select=options.conformance_headers,
        observers=observing.observers,
        quotas=None if quotas is None else quotas.quotas,
    )
    calls = PrefillCalls(fleet.client)
    router.prefilling = Prefilling(picker.parts, calls, router.clock, on_trouble=fleet.probe_now)
    metrics.observe(router.prefilling.samples)
    router.flow = flow_control(options.flow_control, picker, metrics, router.clock, cost)
    if router.flow is not None:
        router.demand.held = router.flow.held
    return router


async def _kubernetes(
    options: Options,
    registry: ModelRegistry,
    rules: GatewayRules,
    metrics: Metrics,
    policies: PoolPolicies,
    stack: contextlib.AsyncExitStack,
) -> KubernetesSource | None:
    """Start the source that follows Kubernetes, if the flags ask for it. Raises `StartError`."""
    if not options.kubernetes:
        return None
    from treeline_kube.client import Client
    from treeline_kube.errors import NoCluster

    from treeline_epp.kube.source import KubernetesSource, Scope

    try:
        client = await Client.from_config(options.kubeconfig, None)
    except NoCluster as error:
        raise StartError(str(error)) from error
    scope = Scope(
        options.pool_namespace,
        gateway=options.gateway,
        pool=options.pool_name,
        group=options.pool_group,
        selector=options.endpoint_selector or {},
        ports=options.endpoint_target_ports,
        rules_group=options.rules_group,
    )
    source = KubernetesSource(scope, client, registry.set_pools, rules.set, policies.set)
    await stack.enter_async_context(source)
    metrics.observe(source.samples)
    return source


async def _open(fleet: Fleet, health: Health, metrics: Metrics) -> None:
    """Become ready when the endpoints are known."""
    started = time.monotonic()
    await fleet.wait_until_ready()
    await health.set_ready(True)
    metrics.ready.set(1)
    log.info("ready after %.2f s, %d endpoints known", time.monotonic() - started, len(fleet.picker.endpoints))
    # All objects made so far live for ever: the collector need not visit them again. The tree's later objects have no
    # cycles, so the collector may also run seldom; its pauses would be the slowest picks.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)


def _servers(options: Options, router: Router, health: Health, eds: Eds) -> tuple[Http2Server, grpc.aio.Server]:
    """Make the servers `(ext_proc, EDS and health)`, not yet listening."""
    limits = SessionLimits(
        options.max_body_bytes,
        strip_response_headers=not options.own_proxy,
        tell_served=options.conformance_headers,
        clients=None
        if options.max_client_requests is None
        else Clients(options.max_client_requests, options.max_body_bytes),
        waiting=BodyBudget(options.max_waiting_body_bytes),
        reader=Reader([] if options.fairness_header is None else [options.fairness_header]),
    )
    router.metrics.observe(limits.samples)
    control = grpc.aio.server(options=_CONTROL)
    control.add_generic_rpc_handlers((eds.handler(),))
    health.add_to(control)
    methods: Methods = {
        f"/{SERVICE}/Process": lambda fields: ExtProcSession(router, limits, fields),
        CHECK: lambda _fields: Check(health),
    }
    most = most_message_bytes(options.max_body_bytes)
    return Http2Server(methods, most, most_held_bytes=options.max_waiting_body_bytes + most), control


async def _listen(
    options: Options,
    metrics: PageServer,
    admin: PageServer,
    ext_proc: Http2Server,
    control: grpc.aio.Server,
) -> None:
    """Bind every port. Raises `StartError`."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    try:
        port, flag = options.grpc_port, "--grpc-port"
        _can_listen(options.host, port)
        certificate = Certificate(options.cert_path, clients=options.require_client_certificates)
        await ext_proc.start(options.host, port, certificate if options.secure_serving else None)
        port, flag = options.grpc_health_port, "--grpc-health-port"
        _can_listen(options.host, port)
        if options.require_client_certificates and options.cert_path is not None:
            control.add_secure_port(f"{host}:{port}", client_checking(options.cert_path))
        else:
            control.add_insecure_port(f"{host}:{port}")
        port, flag = options.metrics_port, "--metrics-port"
        _can_listen(options.host, port)
        await metrics.start(options.host, port)
        port, flag = options.admin_port, "--admin-port"
        _can_listen(options.host, port)
        await admin.start(options.host, port)
    except TlsError as error:
        raise StartError(str(error)) from error
    except (RuntimeError, OSError, UnicodeError) as error:  # the last for an impossible host name
        why = _words_of(error)
        wrong_host = isinstance(error, UnicodeError) or (isinstance(error, OSError) and error.errno in _WRONG_HOST)
        fix = "correct --host" if wrong_host else f"choose another port with {flag}"
        raise StartError(f"cannot listen on {options.host}:{port}: {why}; {fix}") from error
    await control.start()


def _can_listen(host: str, port: int) -> None:
    """Check that a port is free. Raises `OSError`; gRPC would only log that it failed."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _read_secrets(options: Options) -> CurveKeys | None:
    """Read the key pair, and check the other files. Raises `StartError`."""
    try:
        curve = None if options.curve_dir is None else CurveKeys.load(options.curve_dir)
        if options.endpoints_file is not None:  # a wrong file is an error at start, and only logged later
            read_endpoints(options.endpoints_file)
    except KeyFileError as error:
        raise StartError(f"--curve-dir: {error}") from error
    except (DiscoveryError, OSError) as error:
        raise StartError(f"--endpoints-file {options.endpoints_file}: {_words_of(error)}") from error
    return curve


def _quotas(options: Options, metrics: Metrics) -> QuotaFile | None:
    """Open the quota file, if there is one, to be followed. Raises `StartError`."""
    if options.quotas_file is None:
        return None
    try:
        file = QuotaFile(options.quotas_file)
    except QuotaFileError as error:
        raise StartError(f"--quotas-file {error}") from error
    metrics.observe(lambda: quota_samples(file))
    return file


def _words_of(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


def _tokenizers(options: Options) -> TokenizerSources:
    """Return the tokenizer sources that the flags name. A directory for all models must exist at the start; directories
    of single models, which an operator mounts, may come later. Raises `StartError`.
    """
    specs = specs_of(options.tokenizer, options.chat_template)
    try:
        for spec in specs:
            if isinstance(spec.source, Path) and not spec.model:
                FolderOrigin(spec.source).version()
    except SourceError as error:
        raise StartError(f"--tokenizer: {error}") from error
    return TokenizerSources.of(specs, options.tokenizer_cache)
