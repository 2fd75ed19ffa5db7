"""The picker's objects: Deployment, Service, identity and rights, disruption budget."""

from __future__ import annotations

from typing import Final

from treeline_wire import ports

from treeline_operator import names, rbac
from treeline_operator.api.gateway import ClientLimits, FlowControl, Quotas
from treeline_operator.plan.canonical import canonical
from treeline_operator.plan.engines import HUNG_GRACE_S
from treeline_operator.plan.gateway_common import (
    LINGER_S,
    GatewayContext,
    deployment,
    resources,
    service_account,
)
from treeline_operator.plan.objects import (
    SECRET_MODE,
    Object,
    container_port,
    http_get,
    manifest,
    mount,
    probe,
    secret_volume,
    service_port,
)
from treeline_operator.plan.tokenizers import Tokenizers

KEYS_DIR: Final = "/etc/treeline/kv-keys"
TLS_DIR: Final = "/etc/treeline/tls"
QUOTAS_DIR: Final = "/etc/treeline/quotas"
_QUOTAS_VOLUME: Final = "quotas"
_QUOTAS_FILE: Final = "quotas.yaml"
_REQUESTS: Final = {"cpu": "100m", "memory": "256Mi"}
_SERVED: Final = (("ext-proc", ports.EXT_PROC), ("control", ports.EDS), ("metrics", ports.METRICS))
_RBAC: Final = "rbac.authorization.k8s.io"


def inputs(context: GatewayContext) -> str:
    """Hash of everything in the pools' specs that the picker's pods are made from.

    Fields that have their default are left out: a field that a later version of the API adds changes no hash.
    """
    picker = context.shared.picker.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        exclude_none=True,
        # Envoy handles the absence of a picker, and replicas are not part of a pod.
        exclude={"failure_mode", "replicas", "template"},
    )
    made_from: Object = {
        "gateway": context.gateway,
        "picker": picker,
        "mode": context.shared.mode,
        "drain": context.drain_s,
        **context.fragments_hash("epp"),
    }
    if context.shared.has_clients:
        made_from["clients"] = True
    unanswered = context.shared.edge.limits.unanswered_requests
    if unanswered != ClientLimits().unanswered_requests:  # left out where it is the default, as all else
        made_from["unanswered"] = unanswered
    if tokenizers := Tokenizers.of(context.shared).inputs:
        made_from["tokenizers"] = tokenizers
    if _shows_console(context):
        made_from["console"] = True
    if (secret := _tls_secret(context)) is not None:
        made_from["tls"] = secret
    if (tracing := context.shared.tracing) is not None:
        made_from["tracing"] = tracing.environment
    if (group := context.platform.rules_group) != rbac.RULES_GROUPS[0]:
        made_from["rulesGroup"] = group
    return names.digest(canonical(made_from))


def identity(context: GatewayContext) -> list[Object]:
    """ServiceAccount, Role and RoleBinding: what a picker may see of the namespace, and nothing it may change."""
    name = names.epp(context.gateway)
    group = context.platform.rules_group
    rules = [need.rule() for need in (*rbac.PICKER, *([rbac.rules_need(group)] if group else ()))]
    role = {"apiGroup": _RBAC, "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": context.namespace}
    return [
        service_account(context, "epp"),
        manifest(f"{_RBAC}/v1", "Role", context.meta_of("epp"), rules=rules),
        manifest(f"{_RBAC}/v1", "RoleBinding", context.meta_of("epp"), roleRef=role, subjects=[subject]),
    ]


def service(context: GatewayContext) -> Object:
    """The picker's address, which never changes.

    It is a cluster address, not the pods' addresses by DNS: when a picker is replaced, Envoy's connections reach the
    new one at once. With several pickers each connection of Envoy goes to one of them, so one may announce endpoints
    and another choose. That is safe: every picker sees all events and loads, and if Envoy does not know an endpoint
    yet, its fallback serves the request. Pickers exchange requests in flight and sent prompts (`peers_service`).
    """
    console = ((names.PICKER_ADMIN_PORT, ports.PICKER_ADMIN),) if _shows_console(context) else ()
    spec = {
        "type": "ClusterIP",
        "selector": context.pods("epp"),
        "ports": [service_port(name, number, name) for name, number in (*_SERVED, *console)],
    }
    return manifest("v1", "Service", context.meta_of("epp"), spec=spec)


def peers_service(context: GatewayContext) -> Object:
    """The pickers' own addresses, for exchanging requests in flight; includes pods that are not ready, since a starting
    one needs its peers."""
    spec = {
        "type": "ClusterIP",
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": context.pods("epp"),
        "ports": [{"name": "peers", "port": ports.PEERS, "targetPort": ports.PEERS, "protocol": "UDP"}],
    }
    return manifest("v1", "Service", context.meta(names.epp_peers(context.gateway), "epp"), spec=spec)


def workload(context: GatewayContext, image: str) -> Object:
    """The picker's Deployment. Its pods alone of all that is made have a token of the API server."""
    gateway, picker = context.gateway, context.shared.picker
    tokenizers = Tokenizers.of(context.shared)
    named = (*_SERVED, (names.PICKER_ADMIN_PORT, ports.PICKER_ADMIN))
    container: Object = {
        "command": ["treeline", "pick"],
        "args": arguments(context),
        "ports": [container_port(name, number) for name, number in named],
        "resources": resources(picker.resources, _REQUESTS),
        "readinessProbe": probe(http_get("/ready", names.PICKER_ADMIN_PORT), 2, 1),
        "livenessProbe": {
            **probe(http_get("/live", names.PICKER_ADMIN_PORT), 10, 6),
            "terminationGracePeriodSeconds": HUNG_GRACE_S,
        },
        # Envoy's connections are moved while the picker still answers.
        "lifecycle": {"preStop": {"sleep": {"seconds": LINGER_S}}},
        "volumeMounts": [
            mount("kv-keys", KEYS_DIR),
            mount("tmp", "/tmp", read_only=False),
            *tokenizers.mounts,
        ],
    }
    tracing = context.shared.tracing
    traces = [] if tracing is None else [{"name": name, "value": value} for name, value in tracing.environment]
    if env := [*tokenizers.env, *traces]:
        container["env"] = env
    pod: Object = {
        "automountServiceAccountToken": True,
        "volumes": [
            secret_volume("kv-keys", names.kv_keys(gateway)),
            {"name": "tmp", "emptyDir": {}},
            *tokenizers.volumes,
        ],
    }
    if picker.flow_control is not None and (quotas := picker.flow_control.quotas) is not None:
        container["volumeMounts"].append(mount(_QUOTAS_VOLUME, QUOTAS_DIR))
        pod["volumes"].append(_quota_volume(quotas))
    if (tls := _tls_secret(context)) is not None:
        container["volumeMounts"].append(mount("tls", TLS_DIR))
        pod["volumes"].append(secret_volume("tls", tls))
    return deployment(
        context,
        "epp",
        replicas=picker.replicas,
        image=image,
        inputs=inputs(context),
        container=container,
        pod=pod,
    )


def arguments(context: GatewayContext) -> list[str]:
    """The picker's flags."""
    picker = context.shared.picker
    flags: dict[str, object] = {
        "--gateway": context.gateway,
        "--pool-namespace": context.namespace,
        "--host": "0.0.0.0",
        "--policy": picker.chosen,
        "--curve-dir": KEYS_DIR,
        "--peers": f"{names.epp_peers(context.gateway)}.{context.namespace}.svc:{ports.PEERS}",
        "--drain-timeout": context.drain_s,
    }
    if group := context.platform.rules_group:
        flags["--rules-group"] = group
    parameters = picker.parameters
    if parameters.max_ttft_seconds is not None:
        flags["--max-ttft-seconds"] = f"{parameters.max_ttft_seconds:g}"
    if parameters.max_body_bytes is not None:
        flags["--max-body-bytes"] = parameters.max_body_bytes
    if parameters.trust_request_headers:
        flags["--trust-request-headers"] = "true"
    words = ["--kubernetes", *(f"{flag}={value}" for flag, value in flags.items())]
    if context.shared.mode == "gateway-api":
        # A Gateway speaks TLS to an endpoint picker and may ask for its health there; our own Envoy does neither.
        words += ["--secure-serving", "--health-checking"]
    else:
        # Our own Envoy sets the client's name; through a Gateway any client could.
        words.append(f"--max-client-requests={context.shared.edge.limits.unanswered_requests}")
        if _shows_console(context):
            words.append("--console")
        if _tls_secret(context) is not None:
            words += ["--secure-serving", f"--cert-path={TLS_DIR}", "--require-client-certificates"]
    if context.shared.has_clients:
        words.append("--trust-edge")
    if context.shared.tracing is not None:
        words.append("--tracing")
    return [*words, *_flow_flags(picker.flow_control), *Tokenizers.of(context.shared).flags]


def _shows_console(context: GatewayContext) -> bool:
    return context.shared.mode == "standalone" and context.shared.edge.console


def _tls_secret(context: GatewayContext) -> str | None:
    """The Secret of mutual TLS with our own Envoy, if any."""
    tls = context.shared.edge.picker_tls if context.shared.mode == "standalone" else None
    return None if tls is None else tls.secret_ref.name


def _flow_flags(settings: FlowControl | None) -> list[str]:
    """The picker's flags for flow control."""
    if settings is None:
        return []
    mode = "off" if not settings.enabled else "wait" if settings.endpoint_requests is None else "requests"
    given = {
        "wait_seconds": settings.wait_seconds,
        "endpoint_requests": settings.endpoint_requests,
        "max_requests": settings.max_requests,
        "max_bytes": settings.max_bytes,
        "ttl_seconds": settings.ttl_seconds,
        "hold_empty_pool_seconds": settings.hold_empty_pool_seconds,
    }
    parameters = ",".join(f"{name}={_text(value)}" for name, value in given.items() if value is not None)
    found: dict[str, object] = {
        "--flow-control": ":".join(filter(None, (mode, parameters))) if settings.enabled or parameters else None,
        "--fairness-header": settings.fairness_header,
        "--quotas-file": None if settings.quotas is None else f"{QUOTAS_DIR}/{_QUOTAS_FILE}",
    }
    return [f"{flag}={_text(value)}" for flag, value in found.items() if value is not None]


def _quota_volume(quotas: Quotas) -> Object:
    """The volume at QUOTAS_DIR: a folder, because the kubelet never updates a single mounted file."""
    if (ref := quotas.config_map_ref) is not None:
        source: Object = {"configMap": {"name": ref.name}}
    else:
        ref = quotas.secret_ref
        assert ref is not None, "the API server admits quotas with one of the two alone"
        source = {"secret": {"secretName": ref.name, "defaultMode": SECRET_MODE}}
    (kind, settings), items = source.popitem(), [{"key": ref.key, "path": _QUOTAS_FILE}]
    return {"name": _QUOTAS_VOLUME, kind: {**settings, "items": items}}


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
