"""The picker's objects: Deployment, Service, identity and rights, disruption budget."""

from __future__ import annotations

from typing import Any, Final

from treeline_wire import ports

from treeline_operator import names, rbac
from treeline_operator.plan.anchored import (
    LINGER_S,
    SECRET_MODE,
    Ground,
    Making,
    deployment,
    disruption_budget,
    resources,
    service_account,
)
from treeline_operator.plan.canonical import canonical

KEYS_DIR: Final = "/etc/treeline/kv-keys"
_REQUESTS: Final = {"cpu": "100m", "memory": "256Mi"}
_RBAC: Final = "rbac.authorization.k8s.io"


def inputs(ground: Ground) -> str:
    """Hash of everything in the pools' specs that the picker's pods are made from.

    Fields that have their default are left out: a field that a later version of the API adds changes no hash.
    """
    picker = ground.shared.picker.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        exclude_none=True,
        # Envoy decides what happens without a picker, and replicas are no part of a pod.
        exclude={"failure_mode", "replicas"},
    )
    made_from = {
        "gateway": ground.gateway,
        "picker": picker,
        "mode": ground.shared.mode,
        "drain": ground.drain_s,
    }
    return names.digest(canonical(made_from))


def identity(ground: Ground) -> list[dict[str, Any]]:
    """ServiceAccount, Role and RoleBinding: what a picker may see of the namespace, and nothing it may change."""
    name = names.epp(ground.gateway)
    role = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": ground.meta(name, "epp"),
        "rules": [need.rule() for need in rbac.PICKER],
    }
    binding = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": ground.meta(name, "epp"),
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": ground.namespace}],
    }
    return [service_account(ground, "epp", name), role, binding]


def service(ground: Ground) -> dict[str, Any]:
    """The picker's address, which never changes.

    A cluster address, and not the pods' own by DNS: when a picker is replaced, Envoy's connections come to the new one
    at once, instead of after the next look-up. With several pickers each connection of Envoy goes to one of them, so
    that one may announce the endpoints and another choose. That is sound: every picker sees all events and loads, an
    endpoint is chosen that Envoy does not know yet only in the moment between two announcements, and then Envoy's
    fallback serves the request. Only what a picker learns from its own routing (engines without events) is its own.
    """
    named = (("ext-proc", ports.EXT_PROC), ("control", ports.EDS), ("metrics", ports.METRICS))
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": ground.meta(names.epp(ground.gateway), "epp"),
        "spec": {
            "type": "ClusterIP",
            "selector": ground.pods("epp"),
            "ports": [
                {"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in named
            ],
        },
    }


def workload(ground: Ground, made: Making) -> dict[str, Any]:
    """The picker's Deployment. Its pods alone of all that is made have a token of the API server."""
    gateway, picker = ground.gateway, ground.shared.picker
    named = (("ext-proc", ports.EXT_PROC), ("control", ports.EDS), ("metrics", ports.METRICS))
    container = {
        "command": ["treeline", "pick"],
        "args": arguments(ground),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in named],
        "resources": resources(picker.resources, _REQUESTS),
        "readinessProbe": _probe("/ready", 2, 1),
        "livenessProbe": _probe("/live", 10, 6),
        # Envoy's connections are moved while the picker still answers.
        "lifecycle": {"preStop": {"sleep": {"seconds": LINGER_S}}},
        "volumeMounts": [
            {"name": "kv-keys", "mountPath": KEYS_DIR, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    pod = {
        "automountServiceAccountToken": True,
        "volumes": [
            {
                "name": "kv-keys",
                "secret": {"secretName": names.kv_keys(gateway), "defaultMode": SECRET_MODE},
            },
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    return deployment(
        ground,
        "epp",
        names.epp(gateway),
        replicas=picker.replicas,
        image=made.image,
        inputs=inputs(ground),
        container=container,
        pod=pod,
    )


def arguments(ground: Ground) -> list[str]:
    """The picker's flags."""
    picker = ground.shared.picker
    flags: dict[str, object] = {
        "--gateway": ground.gateway,
        "--pool-namespace": ground.namespace,
        "--host": "0.0.0.0",
        "--policy": picker.policy,
        "--curve-dir": KEYS_DIR,
        "--drain-timeout": ground.drain_s,
    }
    parameters = picker.parameters
    if parameters.max_ttft_seconds is not None:
        flags["--max-ttft-seconds"] = f"{parameters.max_ttft_seconds:g}"
    if parameters.max_body_bytes is not None:
        flags["--max-body-bytes"] = parameters.max_body_bytes
    words = ["--kubernetes", *(f"{flag}={value}" for flag, value in flags.items())]
    if ground.shared.mode == "gateway-api":
        # A Gateway speaks TLS to an endpoint picker and may ask for its health there; our own Envoy does neither.
        words += ["--secure-serving", "--health-checking"]
    return words


def budget(ground: Ground) -> dict[str, Any]:
    """The picker's PodDisruptionBudget."""
    return disruption_budget(ground, "epp", names.epp(ground.gateway))


def _probe(path: str, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "metrics"},
        "periodSeconds": period_s,
        "timeoutSeconds": 2,
        "failureThreshold": failures,
    }
