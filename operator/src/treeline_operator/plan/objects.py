"""Kubernetes objects as plain data: the parts that the builders of pools and gateways have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from treeline_operator import names
from treeline_operator.world import Observed

Object = dict[str, Any]

USER: Final = 65532
"""User and group of our containers. The group may read mounted keys, which are closed to everybody else."""
SECRET_MODE: Final = 0o440
"""Readable by the group (fsGroup) and nobody else: what reads keys refuses those that are open to everyone."""


def manifest(api_version: str, kind: str, meta: Object, **fields: Any) -> Object:
    """An object; `fields` are what it has besides its metadata, mostly a `spec`."""
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **fields}


def find(children: Iterable[Observed], kind: str, name: str, group: str | None = None) -> Observed | None:
    """A child by kind and name, and by API group where kinds of several have that name."""
    for child in children:
        ref = child.ref
        if (ref.kind, ref.name) == (kind, name) and group in (None, ref.api_version.rpartition("/")[0]):
            return child
    return None


def label(obj: Mapping[str, Any], name: str) -> str:
    """The value of a label; empty without it."""
    return str((obj["metadata"].get("labels") or {}).get(name, ""))


def annotation(obj: Mapping[str, Any], name: str) -> str:
    """The value of an annotation; empty without it."""
    return str((obj["metadata"].get("annotations") or {}).get(name, ""))


def template_version(deployment: Mapping[str, Any]) -> int:
    """Of the generator that made a Deployment's pods; 0 where somebody removed the annotation."""
    text = annotation(deployment, names.TEMPLATE_VERSION)
    return int(text) if text.isdigit() else 0


def created(obj: Mapping[str, Any]) -> datetime:
    """When an object was made; long ago where it does not say."""
    return datetime.fromisoformat(obj["metadata"].get("creationTimestamp") or "1970-01-01T00:00:00Z")


def is_observed(obj: Mapping[str, Any]) -> bool:
    """Whether its controller has read its spec as it is now."""
    read: int = (obj.get("status") or {}).get("observedGeneration", 0)
    written: int = obj["metadata"].get("generation", 0)
    return read >= written


def since(obj: Mapping[str, Any], kind: str) -> datetime | None:
    """Since when a condition is as it is, or the object where it is not told; None where neither says."""
    told = condition_of(obj, kind).get("lastTransitionTime") or obj["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(told) if told else None


def is_overdue(deployment: Mapping[str, Any]) -> bool:
    """Whether the Deployment's controller has given up waiting for its newest pods."""
    return condition_of(deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded"


def condition_of(obj: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of an object's status by its type; empty where it is not told."""
    reported: Iterable[Mapping[str, Any]] = (obj.get("status") or {}).get("conditions") or ()
    return next((one for one in reported if one["type"] == kind), {})


def deployment(meta: Object, match: dict[str, str], template: Object, replicas: int, **more: Any) -> Object:
    """A Deployment that starts a new pod before it ends an old one, also where there is one."""
    spec = {
        "replicas": replicas,
        **more,
        "selector": {"matchLabels": match},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": template,
    }
    return manifest("apps/v1", "Deployment", meta, spec=spec)


def disruption_budget(meta: Object, match: dict[str, str], max_unavailable: int | str = 1) -> Object:
    """So many pods may be evicted at once, and those that do not work always: a node can be emptied whatever happens.

    It is one at least: a budget that forbids all keeps nodes from draining.
    """
    spec = {
        "maxUnavailable": max_unavailable,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": match},
    }
    return manifest("policy/v1", "PodDisruptionBudget", meta, spec=spec)


def pod_security(*, fixed_user: bool = True, **more: Any) -> Object:
    """A pod's security context. Without `fixed_user` the image says as whom it runs, and root is refused."""
    user = {"runAsUser": USER, "runAsGroup": USER} if fixed_user else {}
    seccomp = {"seccompProfile": {"type": "RuntimeDefault"}}
    return {"runAsNonRoot": True, **user, "fsGroup": USER, **more, **seccomp}


def container_security(*, read_only: bool = True) -> Object:
    """A container's security context, at level restricted."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": read_only,
        "capabilities": {"drop": ["ALL"]},
    }


def secret_volume(name: str, secret: str) -> Object:
    """A mounted Secret that the container's group may read."""
    return {"name": name, "secret": {"secretName": secret, "defaultMode": SECRET_MODE}}


def mount(name: str, path: str, *, read_only: bool = True) -> Object:
    """Where a volume is in a container."""
    return {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})


def port(number: int, last: int | None = None) -> Object:
    """A TCP port of a NetworkPolicy, or those from `number` to `last`."""
    found = {"port": number, "protocol": "TCP"}
    return found if last is None or last == number else {**found, "endPort": last}


def http_get(path: str, port: str) -> Object:
    """What a probe does: an HTTP GET."""
    return {"httpGet": {"path": path, "port": port}}


def probe(handler: Object, period_s: int, failures: int, timeout_s: int = 2) -> Object:
    """A probe, which has failed after so many failures in a row."""
    return {
        **handler,
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def container_port(name: str, number: int) -> Object:
    """A TCP port of a container."""
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def service_port(name: str, number: int, target: str) -> Object:
    """A TCP port of a Service, and the name of the port of the pods that it leads to."""
    return {"name": name, "port": number, "targetPort": target, "protocol": "TCP"}
