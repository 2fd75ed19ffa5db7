"""Which processes `treeline up` starts, with which arguments and ports: pure, decided before anything starts."""

from __future__ import annotations

import errno
import secrets
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from treeline_epp.endpoints.discovery import as_flag
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_operator import envoy
from treeline_wire import ports

from treeline.up import picker_page


@dataclass(frozen=True)
class UpOptions:
    """What the user asked for. Ports of replica i are the base port + i."""

    model: str = ""
    """Empty where there are `engines`."""
    engines: tuple[EndpointSpec, ...] = ()
    """Servers that run already, in place of runtimes of our own."""
    replicas: int = 2
    host: str = "127.0.0.1"
    port: int = ports.GATEWAY
    policy: str = "predicted_ttft"
    served_model_name: str | None = None
    threads: int = 1
    runtime_port: int = ports.RUNTIME_HTTP
    runtime_metrics_port: int = ports.RUNTIME_METRICS
    runtime_admin_port: int = ports.RUNTIME_ADMIN
    events_port: int = ports.EVENTS
    replay_port: int = ports.REPLAY
    load_port: int = ports.LOAD
    ext_proc_port: int = ports.EXT_PROC
    eds_port: int = ports.EDS
    metrics_port: int = ports.METRICS
    picker_admin_port: int = ports.PICKER_ADMIN
    runtime_args: tuple[str, ...] = ()
    picker_args: tuple[str, ...] = ()
    debug_endpoints: bool = False
    console: bool = True
    show_prompts: bool = False
    log_level: str = "info"
    api_keys: Mapping[str, str] = field(default_factory=dict)
    """Client → its key; empty means open."""
    probe_key: str = field(default_factory=secrets.token_urlsafe)
    """With which we ask ourselves whether everything is ready: no client's, so none is counted for it."""
    isolation: envoy.Isolation = "PerKey"
    expose_routing: bool = True
    tracing: envoy.Tracing | None = None
    """Where Envoy sends its spans; picker and runtimes read the same from the variables `OTEL_…`. None: no traces."""


@dataclass(frozen=True)
class ChildSpec:
    """One process to start; with `engine`, a server that runs already and is only waited for.

    `ready_url` answers 200 to `ready_headers` when it is ready; of an engine it is the picker's list, which says so.
    `after` names the children that must be ready before
    this one is started; `ports` maps what a port is for to (host, port), all of which must be free beforehand.
    """

    name: str
    argv: tuple[str, ...]
    ready_url: str
    ports: Mapping[str, tuple[str, int]]
    after: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    ready_headers: Mapping[str, str] = field(default_factory=dict)
    engine: EndpointSpec | None = None


LOOPBACK = "127.0.0.1"


def ports_from(base: int, replicas: int) -> dict[str, int]:
    """All ports of a run, one behind the other: the gateway's, the picker's four, then six for each of the runtimes."""
    alone = ("port", "ext_proc_port", "eds_port", "metrics_port", "picker_admin_port")
    several = ("runtime_port", "runtime_metrics_port", "runtime_admin_port", "events_port", "replay_port", "load_port")
    found = {name: base + at for at, name in enumerate(alone)}
    return found | {name: base + len(alone) + at * replicas for at, name in enumerate(several)}


def gateway_url(options: UpOptions) -> str:
    """Where clients on this machine reach the gateway; a wildcard address is reached by loopback."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(options.host, options.host)
    return f"http://[{host}]:{options.port}" if ":" in host else f"http://{host}:{options.port}"


def _flags(values: Mapping[str, object]) -> list[str]:
    return [word for flag, value in values.items() for word in (flag, str(value))]


def _runtime(options: UpOptions, index: int) -> ChildSpec:
    own_ports: dict[str, int] = {
        "--port": options.runtime_port + index,
        "--metrics-port": options.runtime_metrics_port + index,
        "--admin-port": options.runtime_admin_port + index,
        "--events-port": options.events_port + index,
        "--replay-port": options.replay_port + index,
        "--load-port": options.load_port + index,
    }
    settings: dict[str, object] = {"--threads": options.threads, "--log-level": options.log_level}
    settings["--log-format"] = "text"  # the logs are files for people, and their last lines are shown on failure
    if options.served_model_name:
        settings["--served-model-name"] = options.served_model_name
    argv = [sys.executable, "-m", "treeline_runtime"]
    argv += [options.model, *_flags({"--host": LOOPBACK, **own_ports, **settings})]
    if options.debug_endpoints:
        argv += ["--enable-debug-endpoints"]
    if options.tracing is not None:
        argv += ["--tracing"]
    return ChildSpec(
        name=f"runtime-{index}",
        argv=(*argv, *options.runtime_args),
        ready_url=f"http://{LOOPBACK}:{own_ports['--port']}/ready",
        ports={flag.removeprefix("--"): (LOOPBACK, port) for flag, port in own_ports.items()},
        # Torch reads it before our own setting comes through, and two runtimes must not fight over the cores.
        env={"OMP_NUM_THREADS": str(options.threads)},
    )


def _engine(options: UpOptions, engine: EndpointSpec) -> ChildSpec:
    """The picker asks it, so the picker is started first."""
    return ChildSpec(
        name=f"engine {engine.name}",
        argv=(),
        ready_url=picker_page.url(options.picker_admin_port),
        ports={},
        after=("picker",),
        engine=engine,
    )


def _picker(options: UpOptions, runtimes: Iterable[ChildSpec]) -> ChildSpec:
    own_ports = {
        "--grpc-port": options.ext_proc_port,
        "--grpc-health-port": options.eds_port,
        "--metrics-port": options.metrics_port,
        "--admin-port": options.picker_admin_port,
    }
    settings = {"--host": LOOPBACK, "--policy": options.policy, "--log-level": options.log_level}
    settings["--log-format"] = "text"
    argv = [sys.executable, "-m", "treeline_epp", *_flags({**settings, **own_ports})]
    for runtime in runtimes:
        host, port = runtime.ports["port"]
        argv += ["--endpoint", f"{runtime.name}={host}:{port}"]
    for engine in options.engines:
        argv += ["--endpoint", as_flag(engine)]
    if options.debug_endpoints:
        argv += ["--enable-debug-endpoints"]
    if options.console:
        argv += ["--console"]
    if options.show_prompts:
        argv += ["--show-prompts"]
    if options.api_keys:
        from treeline_operator.api.gateway import ClientLimits  # with pydantic, which --help does without

        argv += ["--trust-edge", f"--max-client-requests={ClientLimits().unanswered_requests}"]
    if options.tracing is not None:
        argv += ["--tracing"]
    return ChildSpec(
        name="picker",
        argv=(*argv, *options.picker_args),
        ready_url=f"http://{LOOPBACK}:{options.picker_admin_port}/ready",
        ports={flag.removeprefix("--"): (LOOPBACK, port) for flag, port in own_ports.items()},
    )


def _envoy(options: UpOptions, binary: Path, bootstrap: Path, engines: Iterable[ChildSpec]) -> ChildSpec:
    return ChildSpec(
        name="envoy",
        argv=tuple(envoy.command(str(binary), str(bootstrap), concurrency=1, drain_s=5)),
        # Through everything: Envoy asks the picker, the picker names a runtime, the runtime answers. An engine may have
        # no /health; the picker has found it ready, and lists its models.
        ready_url=f"{gateway_url(options)}/{'v1/models' if options.engines else 'health'}",
        ports={"gateway": (options.host, options.port)},
        after=("picker", *(engine.name for engine in engines)),
        ready_headers={"x-api-key": options.probe_key} if options.api_keys else {},
    )


def plan(options: UpOptions, envoy_binary: Path, bootstrap: Path) -> list[ChildSpec]:
    """The children, in the order in which they are shown; Envoy's configuration will be written to `bootstrap`."""
    runtimes = [] if options.engines else [_runtime(options, index) for index in range(options.replicas)]
    engines = [_engine(options, engine) for engine in options.engines]
    return [*runtimes, *engines, _picker(options, runtimes), _envoy(options, envoy_binary, bootstrap, engines)]


def busy_ports(children: Iterable[ChildSpec]) -> list[str]:
    """A line for every port that cannot be bound or that two uses share, naming it and its use; empty when all are
    free."""
    found: list[str] = []
    used: dict[int, str] = {}
    for child in children:
        for use, (host, port) in child.ports.items():
            user = f"{child.name}, {use}"
            if port > 65535:
                found.append(f"port {port} ({user}): there is none beyond 65535")
            elif port in used:
                found.append(f"port {port} ({user}): it is the port of {used[port]} too")
            elif problem := _why_busy(host, port):
                found.append(f"port {port} on {host} ({user}): {problem}")
            used.setdefault(port, user)
    return found


_WHY_BUSY: Final = {
    errno.EADDRINUSE: "another process holds it",
    errno.EADDRNOTAVAIL: "the address is not this machine's",
    errno.EACCES: "ports below 1024 are for who may bind them",
}


def _why_busy(host: str, port: int) -> str | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the children themselves bind: a port in TIME_WAIT is free to them.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return _WHY_BUSY.get(error.errno or 0, error.strerror)
    return None
