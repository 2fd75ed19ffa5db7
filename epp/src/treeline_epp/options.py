"""The picker's settings: its flags, and those of other endpoint pickers, which are understood or told to be ignored."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treeline_wire import ports

from treeline_epp.discovery import DiscoveryError, parse_flag, unique
from treeline_epp.endpoint import EndpointSpec
from treeline_epp.policy import POLICIES

GROUPS = ("inference.networking.k8s.io", "inference.networking.x-k8s.io", "treeline.dev")
_NAMESPACE = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_ENV_IN_CLUSTER = "KUBERNETES_SERVICE_HOST"

_IGNORED = {
    "--zap-devel": "?",
    "--zap-encoder": None,
    "--zap-log-level": None,
    "--zap-stacktrace-level": None,
    "--zap-time-encoding": None,
    "-v": None,
    "--v": None,
    "--tracing": "?",
    "--enable-pprof": "?",
    "--enable-cert-reload": "?",
    "--metrics-endpoint-auth": "?",
    "--ha-enable-leader-election": "?",
}
"""Flags of other pickers that change nothing here, with how many values each takes."""


@dataclass(frozen=True)
class Options:
    """The picker's settings; each is a flag of the same name, explained in ``--help``."""

    host: str
    grpc_port: int
    grpc_health_port: int
    metrics_port: int
    endpoint: tuple[EndpointSpec, ...]
    endpoints_file: Path | None
    kubernetes: bool
    gateway: str
    pool_name: str
    pool_namespace: str
    pool_group: str
    endpoint_selector: Mapping[str, str]
    endpoint_target_ports: tuple[int, ...]
    kubeconfig: Path | None
    context: str | None
    policy: str
    max_ttft_seconds: float
    fallback_endpoints: int
    tokenizer: Path | None
    max_body_bytes: int
    curve_dir: Path | None
    secure_serving: bool
    cert_path: Path | None
    health_checking: bool
    drain_timeout: float
    enable_debug_endpoints: bool
    log_level: str
    ignored: tuple[str, ...] = ()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="treeline pick",
        description="Treeline's endpoint picker. A proxy asks it over ext_proc where each request goes; it answers "
        "from what every endpoint has cached and how busy it is. Endpoints are engines with an OpenAI-compatible "
        "server; those of Treeline push all they know, others are routed by history.",
        epilog="Example: treeline pick --endpoint a=127.0.0.1:8000 --endpoint b=127.0.0.1:8001; on Kubernetes: "
        "treeline pick --gateway treeline --pool-namespace team",
        allow_abbrev=False,
    )
    _add_ports(p)
    _add_endpoints(p)
    _add_kubernetes(p)
    _add_behaviour(p)
    _add_security(p)
    group = p.add_argument_group("ignored, with a warning", "Flags of other endpoint pickers.")
    for flag, values in _IGNORED.items():
        group.add_argument(
            flag, nargs=values, dest="ignored", action=_Ignore, default=(), help=argparse.SUPPRESS
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
    _check_source(p, values)
    if values["max_body_bytes"] < 1024:
        p.error("--max-body-bytes must be at least 1024")
    if not values["max_ttft_seconds"] > 0:
        p.error("--max-ttft-seconds must be more than 0")
    if values["host"] is None:
        values["host"] = "0.0.0.0" if _ENV_IN_CLUSTER in os.environ else "127.0.0.1"
    if values["secure_serving"] is None:
        upstream = (
            bool(values["pool_name"] or values["endpoint_selector"]) and values["pool_group"] != GROUPS[2]
        )
        values["secure_serving"] = upstream or values["cert_path"] is not None
    if values["fallback_endpoints"] is None:
        values["fallback_endpoints"] = 0 if values["secure_serving"] else 1
    if values["cert_path"] is not None and not values["secure_serving"]:
        p.error("--cert-path needs --secure-serving")
    return Options(**values)


def _check_source(p: argparse.ArgumentParser, values: dict[str, object]) -> None:
    """Exactly one source of endpoints; from Kubernetes, exactly one way to say which."""
    scopes = {
        f"--{name.replace('_', '-')}"
        for name in ("gateway", "pool_name", "endpoint_selector")
        if values[name]
    }
    fixed = bool(values["endpoint"]) or values["endpoints_file"] is not None
    if len(scopes) > 1:
        p.error(f"{' and '.join(sorted(scopes))}: give one of them")
    if values["kubernetes"] and not scopes:
        p.error("--kubernetes needs --gateway NAME, --pool-name NAME or --endpoint-selector K=V")
    values["kubernetes"] = bool(scopes)
    if scopes and fixed:
        p.error("--endpoint and --endpoints-file do not go together with endpoints from Kubernetes")
    if not scopes and not fixed:
        p.error(
            "no endpoints: give --endpoint NAME=HOST:PORT or --endpoints-file FILE, or on Kubernetes --gateway NAME"
        )
    if values["endpoint_selector"] and not values["endpoint_target_ports"]:
        p.error("--endpoint-selector needs --endpoint-target-ports")
    if values["gateway"]:
        values["pool_group"] = GROUPS[2]
    if not values["pool_namespace"]:
        values["pool_namespace"] = os.environ.get("NAMESPACE") or "default"
    if not _NAMESPACE.fullmatch(str(values["pool_namespace"])):
        p.error(f"--pool-namespace: {values['pool_namespace']!r} is no namespace (a-z, 0-9 and -)")


def _add_ports(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--host", help="address of all ports of this process (default 127.0.0.1; inside a pod 0.0.0.0)"
    )
    p.add_argument("--grpc-port", type=int, default=ports.EXT_PROC, help="ext_proc (default %(default)s)")
    p.add_argument(
        "--grpc-health-port", type=int, default=ports.EDS, help="EDS and gRPC health (default %(default)s)"
    )
    p.add_argument(
        "--metrics-port",
        type=int,
        default=ports.METRICS,
        help="/metrics, /ready, /live, /endpoints (default %(default)s)",
    )


def _add_endpoints(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--endpoint", action="append", default=[], metavar="NAME=HOST:PORT", help="an engine; may be repeated"
    )
    p.add_argument(
        "--endpoints-file",
        type=Path,
        metavar="FILE",
        help="YAML or JSON: `endpoints: [{name, address, pool?}]`; watched, replace it by renaming",
    )


def _add_kubernetes(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group(
        "endpoints from Kubernetes",
        "Pods and models are followed live. Rights needed in the namespace: list and watch pods, inferencepools and "
        "(optional) inferencemodels of the group in use.",
    )
    add = group.add_argument
    add("--kubernetes", action="store_true", help="implied by the next three")
    add(
        "--gateway",
        default="",
        metavar="NAME",
        help="all InferencePools of treeline.dev that name this gateway",
    )
    add("--pool-name", default="", metavar="NAME", help="one InferencePool")
    add(
        "--endpoint-selector",
        type=_selector,
        default={},
        metavar="K=V,…",
        help="pods with these labels, without an InferencePool",
    )
    add(
        "--pool-namespace",
        default="",
        metavar="NS",
        help="its namespace (default $NAMESPACE, then `default`)",
    )
    add(
        "--pool-group",
        choices=GROUPS,
        default=GROUPS[0],
        help="API group of the pool of --pool-name (default %(default)s)",
    )
    add(
        "--endpoint-target-ports",
        type=_ports,
        default=(),
        metavar="PORT,…",
        help="ports of the pods of --endpoint-selector",
    )
    add(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="default: the pod's own service account, or ~/.kube/config",
    )
    add("--context", metavar="NAME", help="of the kubeconfig")


def _add_behaviour(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--policy", choices=tuple(POLICIES), default="treeline", help="how to choose (default %(default)s)"
    )
    p.add_argument(
        "--max-ttft-seconds",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="an endpoint whose queue alone takes longer is saturated; a request for a Sheddable model is answered 429 "
        "when all are (default %(default)s)",
    )
    p.add_argument(
        "--fallback-endpoints",
        type=int,
        choices=range(4),
        metavar="0..3",
        help="endpoints that are named after the chosen one, for a proxy that tries them in order (default 1; 0 with "
        "--secure-serving, since Gateways whose proxies take the destination for one address refuse a list)",
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


def _add_security(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--curve-dir", type=Path, metavar="DIR", help="CURVE key pair for engines that publish with keys"
    )
    p.add_argument(
        "--secure-serving",
        nargs="?",
        const=True,
        type=_bool,
        metavar="BOOL",
        help="TLS on the ext_proc port, with a certificate made at start unless --cert-path gives one (default: only "
        "with --pool-name of an upstream group or --endpoint-selector, as gateways expect it of such pickers)",
    )
    p.add_argument(
        "--cert-path", type=Path, metavar="DIR", help="tls.crt and tls.key; read again when they are replaced"
    )
    p.add_argument(
        "--health-checking",
        nargs="?",
        const=True,
        default=False,
        type=_bool,
        metavar="BOOL",
        help="serve gRPC health on the ext_proc port too",
    )


class _Ignore(argparse.Action):
    """Takes a flag and its value, and remembers that it was there."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        _values: object,
        option_string: str | None = None,
    ) -> None:
        namespace.ignored = (*namespace.ignored, option_string)


def _bool(text: str) -> bool:
    """As Go's flags spell it."""
    if text.lower() in ("1", "t", "true"):
        return True
    if text.lower() in ("0", "f", "false"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _selector(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in text.split(",")]
    if not all(key and equals and value for key, equals, value in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value,key=value")
    return {key: value.removeprefix("=") for key, _, value in pairs}


def _ports(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if (
        not all(word.isascii() and word.isdecimal() and 0 < int(word) < 65536 for word in words)
        or len(words) > 8
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of one to eight ports")
    return tuple(int(word) for word in words)
