"""The picker's settings: its flags, and those of other endpoint pickers, which are understood or told to be ignored."""

# ruff: noqa: RUF009 - what is called makes a dataclass field
from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from treeline_wire import ports

from treeline_epp.endpoints.discovery import DiscoveryError, parse_flag, unique
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.policies import POLICIES

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


def _flag(help: str, *, group: str = "", **argument: Any) -> Any:
    """A field of `Options` that is a flag: its help, and what else `add_argument` takes."""
    return field(metadata={"group": group, "argument": {"help": help, **argument}})


def _truth(help: str, **argument: Any) -> Any:
    """A flag that may be given without a value, or with one as Go spells it."""
    return _flag(help, nargs="?", const=True, type=_bool, metavar="BOOL", **argument)


_KUBERNETES = "endpoints from Kubernetes"


@dataclass(frozen=True)
class Options:
    """The picker's settings; each is a flag of the same name, explained in `--help`."""

    host: str = _flag("address of all ports of this process (default 127.0.0.1; inside a pod 0.0.0.0)")
    grpc_port: int = _flag("ext_proc (default %(default)s)", type=int, default=ports.EXT_PROC)
    grpc_health_port: int = _flag("EDS and gRPC health (default %(default)s)", type=int, default=ports.EDS)
    metrics_port: int = _flag(
        "/metrics, and nothing else (default %(default)s)", type=int, default=ports.METRICS
    )
    admin_port: int = _flag(
        "/ready, /live, /endpoints and the debug pages (default %(default)s)",
        type=int,
        default=ports.PICKER_ADMIN,
    )
    endpoint: tuple[EndpointSpec, ...] = _flag(
        "an engine; may be repeated", action="append", default=[], metavar="NAME=HOST:PORT"
    )
    endpoints_file: Path | None = _flag(
        "YAML or JSON: `endpoints: [{name, address, pool?}]`; watched, replace it by renaming",
        type=Path,
        metavar="FILE",
    )
    kubernetes: bool = _flag("implied by the next three", group=_KUBERNETES, action="store_true")
    gateway: str = _flag(
        "all InferencePools of treeline.dev that name this gateway",
        group=_KUBERNETES,
        default="",
        metavar="NAME",
    )
    pool_name: str = _flag("one InferencePool", group=_KUBERNETES, default="", metavar="NAME")
    endpoint_selector: Mapping[str, str] = _flag(
        "pods with these labels, without an InferencePool",
        group=_KUBERNETES,
        type=_selector,
        default={},
        metavar="K=V,…",
    )
    pool_namespace: str = _flag(
        "its namespace (default $NAMESPACE, then `default`)", group=_KUBERNETES, default="", metavar="NS"
    )
    pool_group: str = _flag(
        "API group of the pool of --pool-name (default %(default)s)",
        group=_KUBERNETES,
        choices=GROUPS,
        default=GROUPS[0],
    )
    endpoint_target_ports: tuple[int, ...] = _flag(
        "ports of the pods of --endpoint-selector",
        group=_KUBERNETES,
        type=_ports,
        default=(),
        metavar="PORT,…",
    )
    kubeconfig: Path | None = _flag(
        "default: $KUBECONFIG, the pod's own service account, or ~/.kube/config",
        group=_KUBERNETES,
        type=Path,
        metavar="FILE",
    )
    context: str | None = _flag("of the kubeconfig", group=_KUBERNETES, metavar="NAME")
    policy: str = _flag("how to choose (default %(default)s)", choices=tuple(POLICIES), default="treeline")
    max_ttft_seconds: float = _flag(
        "an endpoint whose queue alone takes longer is saturated; a request for a Sheddable model is answered 429 "
        "when all are (default %(default)s)",
        type=float,
        default=30.0,
        metavar="SECONDS",
    )
    fallback_endpoints: int = _flag(
        "endpoints that are named after the chosen one, for a proxy that tries them in order (default 1; 0 with "
        "--secure-serving, since Gateways whose proxies take the destination for one address refuse a list)",
        type=int,
        choices=range(4),
        metavar="0..3",
    )
    expose_routing: bool = _truth(
        "leave the response headers x-treeline-cached-tokens and x-treeline-prompt-tokens to clients (default: "
        "not with --secure-serving; our own Envoy sees to it by itself)"
    )
    tokenizer: Path | None = _flag(
        "model directory whose tokenizer and chat template are used for every endpoint; by default each engine "
        "is asked for its own",
        type=Path,
        metavar="DIR",
    )
    max_body_bytes: int = _flag(
        "larger request bodies are answered 413 (default %(default)s)", type=int, default=32 * 1024 * 1024
    )
    max_client_requests: int | None = _flag(
        "requests of one client whose answer has not begun; more are answered 429. Only behind a proxy that sets "
        "x-treeline-client or x-forwarded-for itself, as our own Envoy does (default: any number)",
        type=int,
        metavar="N",
    )
    max_waiting_body_bytes: int = _flag(
        "request bodies that are kept at one time until they are decided, the first 64 KiB of each not counted; "
        "what comes beyond is answered 503 (default %(default)s)",
        type=int,
        default=512 * 1024 * 1024,
    )
    drain_timeout: float = _flag(
        "how long open streams may go on after SIGTERM (default %(default)s)",
        type=float,
        default=5.0,
        metavar="SECONDS",
    )
    enable_debug_endpoints: bool = _flag(
        "serve /debug/endpoints and /debug/tree on the admin port, to clients on this machine (in this pod) alone",
        action="store_true",
    )
    log_level: str = _flag(
        "debug logs one line for every decision, without prompt text (default %(default)s)",
        choices=("debug", "info", "warning", "error"),
        default="info",
    )
    curve_dir: Path | None = _flag(
        "CURVE key pair for engines that publish with keys", type=Path, metavar="DIR"
    )
    secure_serving: bool = _truth(
        "TLS on the ext_proc port, with a certificate made at start unless --cert-path gives one (default: only "
        "with --pool-name of an upstream group or --endpoint-selector, as gateways expect it of such pickers)"
    )
    trust_edge: bool = _flag(
        "the proxy is Treeline's own Envoy with API keys: believe its headers x-treeline-client and "
        "x-treeline-isolation, which it removes from what callers send. Engines that do not read them get a salt for "
        "each client, written into the body (needs a proxy that shows bodies and refuses requests without a picker)",
        action="store_true",
    )
    cert_path: Path | None = _flag(
        "tls.crt and tls.key; read again when they are replaced", type=Path, metavar="DIR"
    )
    require_client_certificates: bool = _flag(
        "mutual TLS on the ext_proc port and on the EDS port: who connects must show a certificate signed by "
        "ca.crt in --cert-path; the file is read again when it is replaced",
        action="store_true",
    )
    health_checking: bool = _truth("serve gRPC health on the ext_proc port too", default=False)
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
    kubernetes = p.add_argument_group(
        _KUBERNETES,
        "Pods and models are followed live. Rights needed in the namespace: list and watch pods, inferencepools and "
        "(optional) inferencemodels of the group in use.",
    )
    for each in fields(Options):
        if each.metadata:
            target = kubernetes if each.metadata["group"] else p
            target.add_argument(f"--{each.name.replace('_', '-')}", **each.metadata["argument"])
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
    if values["max_client_requests"] is not None and values["max_client_requests"] < 1:
        p.error("--max-client-requests must be at least 1")
    if values["max_waiting_body_bytes"] < values["max_body_bytes"]:
        p.error(
            "--max-waiting-body-bytes must be at least --max-body-bytes, or no body of that size could come"
        )
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
    if values["expose_routing"] is None:
        values["expose_routing"] = not values["secure_serving"]
    if values["cert_path"] is not None and not values["secure_serving"]:
        p.error("--cert-path needs --secure-serving")
    if values["require_client_certificates"] and values["cert_path"] is None:
        p.error("--require-client-certificates needs --cert-path, with ca.crt beside tls.crt and tls.key")
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
