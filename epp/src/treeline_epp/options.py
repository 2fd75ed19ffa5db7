"""The picker's settings: its own flags, and those of other endpoint pickers, which it understands or reports."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeline_wire import ports
from treeline_wire.command_line import Parser
from treeline_wire.headers import CREDENTIALS
from treeline_wire.logs import FORMAT_HELP, FORMATS, LEVELS
from treeline_wire.settings import add_flags, namespace, port_setting, setting, values

from treeline_epp.compat.flags import add_foreign, flag_bool, ignored, seconds
from treeline_epp.endpoints.discovery import DiscoveryError, parse_flag, unique
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.flow.settings import FlowSettings, flow_flag, flow_help
from treeline_epp.picking.policies import policy_flag, policy_help
from treeline_epp.tokenizers.sources import ForModel, specs_of

OURS = "treeline"
GIE = "gie"
METRICS_FAMILIES = (OURS, GIE)


def _families(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(text.split(",")))
    if unknown := set(words) - set(METRICS_FAMILIES):
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {', '.join(METRICS_FAMILIES)}")
    return words


GROUPS = ("inference.networking.k8s.io", "treeline.dev")
_RULES_GROUP = "inference.networking.x-k8s.io"
_ENV_IN_CLUSTER = "KUBERNETES_SERVICE_HOST"


def _selector(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in text.split(",")]
    if not all(key and equals and value for key, equals, value in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value,key=value")
    return {key: value.removeprefix("=") for key, _, value in pairs}


def _ports(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and 0 < int(word) < 65536 for word in words) or len(words) > 8:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of one to eight ports")
    return tuple(dict.fromkeys(int(word) for word in words))


def _header_name(text: str) -> str:
    """Parse the name of a header that messages and traces may contain, in lower case."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", text.lower()):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a header")
    if text.lower() in CREDENTIALS:
        raise argparse.ArgumentTypeError(
            f"{text!r} carries a secret, and a client's name appears in messages and traces: choose another header"
        )
    return text.lower()


def _for_model(text: str) -> ForModel:
    try:
        return ForModel.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _peers(text: str) -> tuple[tuple[str, int], ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not 0 < len(words) <= _MOST_PEERS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of 1 to {_MOST_PEERS} of HOST:PORT")
    return tuple(map(_peer, words))


def _peer(word: str) -> tuple[str, int]:
    host, _, port = word.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not host or (":" in host and not bracketed) or not (port.isascii() and port.isdecimal()):
        raise argparse.ArgumentTypeError(f"{word!r} is not HOST:PORT")
    if len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{word!r}: a port is a number from 1 to 65535")
    return host, int(port)


_MOST_PEERS = 64
_WAITING_BODY_BYTES = 512 * 1024 * 1024
_KUBERNETES = "endpoints from Kubernetes"
_FLOW = "flow control"


@dataclass(frozen=True)
class Options:
    """The picker's settings; each is a flag of the same name, explained in `--help`."""

    host: str = setting(None, help="address of all ports of this process (default 127.0.0.1; inside a pod 0.0.0.0)")
    grpc_port: int = port_setting(ports.EXT_PROC, help="ext_proc (default %(default)s)")
    grpc_health_port: int = port_setting(ports.EDS, help="EDS and gRPC health (default %(default)s)")
    metrics_port: int = port_setting(ports.METRICS, help="/metrics only (default %(default)s)")
    admin_port: int = port_setting(
        ports.PICKER_ADMIN, help="/ready, /live, /endpoints and the debug pages (default %(default)s)"
    )
    peers: tuple[tuple[str, int], ...] = setting(
        (),
        metavar="HOST:PORT,…",
        parse=_peers,
        help="other pickers of this pool: addresses, or names with several addresses (a headless Service, its own pod "
        "included). They tell each other over UDP which requests are in flight, encrypted with a key from "
        "--curve-dir",
    )
    peer_port: int = port_setting(ports.PEERS, help="UDP, for other pickers, with --peers (default %(default)s)")
    endpoint: tuple[EndpointSpec, ...] = setting(
        (),
        repeated=True,
        metavar="NAME=HOST:PORT[,ROLE]",
        help="an engine; may be repeated. ROLE: prefill, decode or both",
    )
    endpoints_file: Path | None = setting(
        None,
        metavar="FILE",
        help="YAML or JSON: `endpoints: [{name, address, pool?, engine?, kv_events?, api_key_file?, role?, "
        "kv_transfer?}]`, "
        "with kv_events {port, replay_port?, topic?, ranks?} for engines that do not say where they publish; reloaded "
        "when replaced by renaming",
    )
    engine_key_file: Path | None = setting(
        None,
        metavar="FILE",
        help="API key of the engines (--api-key of vLLM and SGLang), to list their models; reloaded. An endpoint's "
        "own `api_key_file` wins",
    )
    gateway: str = setting(
        "",
        group=_KUBERNETES,
        metavar="NAME",
        help="all InferencePools of treeline.dev that name this gateway",
    )
    pool_name: str = setting("", group=_KUBERNETES, metavar="NAME", help="one InferencePool")
    endpoint_selector: Mapping[str, str] | None = setting(
        None,
        group=_KUBERNETES,
        metavar="K=V,…",
        parse=_selector,
        help="pods with these labels, without an InferencePool",
    )
    pool_namespace: str = setting(
        "default",
        group=_KUBERNETES,
        metavar="NS",
        parse=namespace,
        env="NAMESPACE",
        help="its namespace (default $NAMESPACE, then `default`)",
    )
    pool_group: str = setting(
        GROUPS[0],
        group=_KUBERNETES,
        choices=GROUPS,
        help="API group of the pool of --pool-name (default %(default)s)",
    )
    conformance_headers: bool = setting(
        False,
        help="only for conformance tests of Gateways: clients choose the endpoint by the header "
        "test-epp-endpoint-selection (a list of IP or IP:port), and responses name it in "
        "x-conformance-test-served-endpoint",
    )
    rules_group: str = setting(
        None,
        group=_KUBERNETES,
        metavar="GROUP",
        help="API group of the InferenceObjectives and InferenceModelRewrites (v1alpha2), for example llm-d.ai; '' "
        "for none (default: inference.networking.x-k8s.io with --pool-name of an upstream group, else none). "
        "They need list and watch, and may be missing",
    )
    trust_request_headers: bool = setting(
        None,
        metavar="BOOL",
        parse=flag_bool,
        help="believe x-gateway-inference-objective and x-gateway-model-name-rewrite, and llm-d's spellings: clients "
        "then choose a request's priority and model (default: only with --pool-name of an upstream group)",
    )
    endpoint_target_ports: tuple[int, ...] = setting(
        (), group=_KUBERNETES, metavar="PORT,…", parse=_ports, help="ports of the pods of --endpoint-selector"
    )
    kubeconfig: Path | None = setting(
        None,
        group=_KUBERNETES,
        metavar="FILE",
        help="default: $KUBECONFIG, the pod's own service account, or ~/.kube/config",
    )
    policy: str = setting("predicted_ttft", metavar="NAME[:KEY=VALUE,…]", parse=policy_flag, help=policy_help())
    max_ttft_seconds: float = setting(
        30.0,
        metavar="SECONDS",
        above=0,
        help="an endpoint with a longer queue is saturated; if all are, requests for Sheddable models get 429 "
        "(default %(default)s)",
    )
    tokenizer: tuple[ForModel, ...] = setting(
        (),
        repeated=True,
        metavar="[MODEL=]URI",
        parse=_for_model,
        help="tokenizer and chat template of MODEL, by the engines' name for it, or of all models: "
        "hf://org/name[@revision] (with HF_TOKEN and HF_ENDPOINT) or a directory; may be repeated (default: asks "
        "the engines; vLLM and SGLang serve none)",
    )
    chat_template: tuple[ForModel, ...] = setting(
        (),
        repeated=True,
        metavar="[MODEL=]FILE",
        parse=_for_model,
        help="chat template of MODEL's engines, if it is not the one beside its --tokenizer; may be repeated",
    )
    tokenizer_cache: Path = setting(
        None,
        metavar="DIR",
        help="where tokenizers of the Hub are kept, so that a picker can start without it (default: "
        "treeline/tokenizers in $XDG_CACHE_HOME or ~/.cache)",
    )
    max_body_bytes: int = setting(
        32 * 1024 * 1024,
        metavar="BYTES",
        at_least=1024,
        help="larger request bodies get 413 (default %(default)s)",
    )
    max_client_requests: int | None = setting(
        None,
        metavar="N",
        at_least=1,
        help="requests of one client at once; more get 429. With an API key they count until their answers end, and "
        "bodies in transit may add up to 8 times --max-body-bytes; by address they count until their answers "
        "begin. Needs a proxy that sets x-treeline-client or x-forwarded-for itself, as our Envoy does (default: "
        "no limit)",
    )
    drain_timeout: float = setting(
        5.0,
        metavar="SECONDS",
        at_least=0,
        parse=seconds,
        help="time for open streams after SIGTERM, such as 30s or 1m30s (default %(default)s)",
    )
    console: bool = setting(
        False,
        help="serve the page /console/ on the admin port: a playground, and for clients on this machine (in this pod) "
        "load, decisions and prefixes",
    )
    enable_debug_endpoints: bool = setting(
        False,
        help="serve /debug/endpoints, /debug/tree, /debug/decisions, /debug/explain and /console/ on the admin port, "
        "only to clients on this machine (in this pod)",
    )
    show_prompts: bool = setting(
        False,
        help="let /console/ show beginnings of prompts to clients on this machine (with --console or "
        "--enable-debug-endpoints)",
    )
    log_level: str = setting(
        None,
        choices=LEVELS,
        help="debug logs one line per decision, without prompt text (default info)",
    )
    log_format: str | None = setting(None, choices=FORMATS, help=FORMAT_HELP)
    curve_dir: Path | None = setting(None, metavar="DIR", help="CURVE key pair for engines that publish with keys")
    secure_serving: bool = setting(
        None,
        metavar="BOOL",
        parse=flag_bool,
        help="TLS on the ext_proc port, with a certificate made at start unless --cert-path gives one (default: only "
        "with --pool-name of an upstream group or --endpoint-selector)",
    )
    trust_edge: bool = setting(
        False,
        help="the proxy is Treeline's Envoy with API keys: believe its headers x-treeline-client and "
        "x-treeline-isolation. Engines that do not read them get a salt for each client in the body (needs a "
        "proxy that shows bodies and refuses requests without a picker)",
    )
    cert_path: Path | None = setting(None, metavar="DIR", help="tls.crt and tls.key; reloaded when replaced")
    require_client_certificates: bool = setting(
        False,
        help="mutual TLS on the ext_proc and EDS ports: clients need a certificate signed by ca.crt in --cert-path; "
        "reloaded when replaced",
    )
    metrics_families: tuple[str, ...] = setting(
        ("treeline",),
        metavar="NAME,…",
        parse=_families,
        help="names on /metrics: treeline, and gie for those of GIE 1.5 (inference_objective_…; docs/migrating.md); "
        "default treeline",
    )
    tracing: bool = setting(
        False,
        metavar="BOOL",
        parse=flag_bool,
        help="OpenTelemetry traces over OTLP/gRPC, as the variables OTEL_… say (docs/operations.md)",
    )
    flow_control: FlowSettings = setting(
        FlowSettings(), group=_FLOW, metavar="MODE[:KEY=VALUE,…]", parse=flow_flag, help=flow_help()
    )
    fairness_header: str | None = setting(
        None,
        group=_FLOW,
        metavar="NAME",
        parse=_header_name,
        help="request header that names the client; clients can set it freely. It replaces those of "
        "--trust-request-headers; API keys (--trust-edge) win",
    )
    quotas_file: Path | None = setting(
        None,
        group=_FLOW,
        metavar="FILE",
        help="YAML or JSON: `clients: {NAME: {tokens_per_minute?, tokens_per_day?, requests_per_minute?, "
        "requests_per_day?}}`, and `default:` for each other client; requests beyond get 429 with Retry-After. "
        "Clients are named by API keys (--trust-edge), else by --fairness-header, else by the fairness id of "
        "--trust-request-headers, else default-flow. Reloaded when changed",
    )
    ignored: tuple[str, ...] = ()
    """A sentence for each flag of other pickers that has no effect."""

    @property
    def max_waiting_body_bytes(self) -> int:
        """The most bytes of request bodies that are kept until they are decided, without the first 64 KiB of each."""
        return max(_WAITING_BODY_BYTES, self.max_body_bytes)

    @property
    def kubernetes(self) -> bool:
        """Whether endpoints come from a Kubernetes namespace."""
        return bool(self.gateway or self.pool_name or self.endpoint_selector)

    @property
    def own_proxy(self) -> bool:
        """Whether the proxy is ours, which tries destinations in order and hides our response headers from clients.
        Gateways take the destination for one address, and are strangers, reached by TLS. Over TLS the proxy is ours if
        it shows a certificate and other settings already trust its headers about clients.
        """
        says_clients = self.trust_edge or self.max_client_requests is not None
        return not self.secure_serving or (self.require_client_certificates and bool(self.gateway) and says_clients)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = Parser(
        prog="treeline pick",
        description="Treeline's endpoint picker. A proxy asks it over ext_proc where each request goes; it answers "
        "by the cached prefixes and the load of every endpoint. Endpoints are engines with an OpenAI-compatible "
        "server; those of Treeline push events and load, others are asked for their load or routed by history.",
        epilog="Example: treeline pick --endpoint a=127.0.0.1:8000 --endpoint b=127.0.0.1:8001; on Kubernetes: "
        "treeline pick --gateway treeline --pool-namespace team",
        allow_abbrev=False,
    )
    kubernetes = p.add_argument_group(
        _KUBERNETES,
        "Needs the rights to list and watch pods, inferencepools and (optional) inferencemodels of the group in use.",
    )
    add_flags(p, Options)
    add_flags(kubernetes, Options, _KUBERNETES)
    words = "Requests that find no room wait in the picker: docs/flow-control.md."
    add_flags(p.add_argument_group(_FLOW, words), Options, _FLOW)
    add_foreign(p)
    return p


def options_of(argv: Sequence[str]) -> Options:
    """Parse a command line; exit with status 2 and a message if it is wrong."""
    p = parser()
    given = p.parse_args(argv)
    found = values(Options, given)
    try:
        found["endpoint"] = unique(parse_flag(text) for text in given.endpoint)
    except DiscoveryError as error:
        p.error(str(error))
    try:
        specs_of(found["tokenizer"], found["chat_template"])
    except ValueError as error:
        p.error(str(error))
    _check_source(p, found)
    found["log_level"] = found["log_level"] or given.verbosity or "info"
    _fill(found)
    _check_together(p, found)
    try:
        return Options(**found, ignored=ignored(given))
    except ValueError as error:
        p.error(str(error))


def _fill(found: dict[str, Any]) -> None:
    """Fill in settings that follow from others."""
    if found["tokenizer_cache"] is None:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        found["tokenizer_cache"] = Path(caches, "treeline", "tokenizers")
    if found["host"] is None:
        found["host"] = "0.0.0.0" if _ENV_IN_CLUSTER in os.environ else "127.0.0.1"
    if found["secure_serving"] is None:
        upstream = bool(found["pool_name"] or found["endpoint_selector"]) and found["pool_group"] != GROUPS[1]
        found["secure_serving"] = upstream or found["cert_path"] is not None
    extended = bool(found["pool_name"]) and found["pool_group"] != GROUPS[1]
    if found["rules_group"] is None:
        found["rules_group"] = _RULES_GROUP if extended else ""
    if found["trust_request_headers"] is None:
        found["trust_request_headers"] = extended


def _check_together(p: argparse.ArgumentParser, found: dict[str, Any]) -> None:
    """Check settings that need or exclude one another."""
    if found["show_prompts"] and not (found["console"] or found["enable_debug_endpoints"]):
        p.error("--show-prompts needs --console (or --enable-debug-endpoints), which serves the page that shows them")
    if found["rules_group"] and not (found["gateway"] or found["pool_name"]):
        p.error("--rules-group needs --pool-name or --gateway: objectives and rewrites name their pool")
    if found["peers"] and found["curve_dir"] is None:
        p.error("--peers needs --curve-dir: pickers believe each other by a key that is made from it")
    if found["cert_path"] is not None and not found["secure_serving"]:
        p.error("--cert-path needs --secure-serving")
    if found["require_client_certificates"] and found["cert_path"] is None:
        p.error("--require-client-certificates needs --cert-path, with ca.crt beside tls.crt and tls.key")


def _check_source(p: argparse.ArgumentParser, found: dict[str, object]) -> None:
    """Check that there is one source of endpoints; for Kubernetes, one way to select them."""
    scopes = {f"--{name.replace('_', '-')}" for name in ("gateway", "pool_name", "endpoint_selector") if found[name]}
    fixed = bool(found["endpoint"]) or found["endpoints_file"] is not None
    if len(scopes) > 1:
        p.error(f"{' and '.join(sorted(scopes))}: give one of them")
    if scopes and fixed:
        p.error("--endpoint and --endpoints-file do not go together with endpoints from Kubernetes")
    if not scopes and not fixed:
        p.error(
            "no endpoints: give --endpoint NAME=HOST:PORT or --endpoints-file FILE, or on Kubernetes --gateway NAME"
        )
    if found["endpoint_selector"] and not found["endpoint_target_ports"]:
        p.error("--endpoint-selector needs --endpoint-target-ports")
    if found["gateway"]:
        found["pool_group"] = GROUPS[1]
