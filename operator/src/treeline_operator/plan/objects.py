"""Kubernetes objects as plain data: the parts that the builders of pools and gateways have in common."""

from __future__ import annotations

from typing import Any, Final

from treeline_operator import names
from treeline_operator.world import Platform

Object = dict[str, Any]

USER: Final = 65532
"""User and group of our containers. The group may read mounted keys, which are closed to everybody else."""
SECRET_MODE: Final = 0o440
"""Readable by the group (fsGroup) alone: programs refuse keys that everyone can read."""

POD_MONITOR: Final = "monitoring.coreos.com/v1/PodMonitor"


def manifest(api_version: str, kind: str, meta: Object, **fields: Any) -> Object:
    """An object; `fields` are its other fields, usually a `spec`."""
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **fields}


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


LEADER_WORKER_SET: Final = "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet"


def leader_worker_set(meta: Object, leader: Object, worker: Object, size: int, replicas: int) -> Object:
    """A LeaderWorkerSet: groups of `size` pods that start, restart and are replaced together, a new one before an old
    one ends."""
    template = {
        "size": size,
        # A rank that comes back alone finds no others: they ended with it.
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": leader,
        "workerTemplate": worker,
    }
    surge = {"type": "RollingUpdate", "rollingUpdateConfiguration": {"maxSurge": 1, "maxUnavailable": 0}}
    # The leader gets ready with its workers, so they must not wait for that.
    more = {"startupPolicy": "LeaderCreated", "rolloutStrategy": surge}
    spec = {"replicas": replicas, "leaderWorkerTemplate": template, **more}
    return manifest("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", meta, spec=spec)


def disruption_budget(meta: Object, match: dict[str, str], max_unavailable: int | str = 1) -> Object:
    """A budget for draining nodes: `max_unavailable` pods may be evicted at once, and broken ones always. It must be at
    least 1: 0 would block draining."""
    spec = {
        "maxUnavailable": max_unavailable,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": match},
    }
    return manifest("policy/v1", "PodDisruptionBudget", meta, spec=spec)


def pod_monitor(meta: Object, match: dict[str, str], port: str, platform: Platform, *, ours: bool) -> Object:
    """A PodMonitor for this port of the pods.

    For `ours` the program's labels stay: a picker's `endpoint` is not a port of a pod. Other engines cannot override
    target labels. `treeline_component` marks our targets, for alerts on `up`.
    """
    marks = [{"targetLabel": "treeline_component", "replacement": meta["labels"][names.COMPONENT]}]
    endpoint: Object = {"port": port, "path": "/metrics", "relabelings": marks}
    if ours:
        endpoint["honorLabels"] = True
    if platform.monitor_interval:
        endpoint["interval"] = platform.monitor_interval
    labelled = {**meta, "labels": {**dict(platform.monitor_labels), **meta["labels"]}}
    spec = {"selector": {"matchLabels": match}, "podMetricsEndpoints": [endpoint]}
    return manifest("monitoring.coreos.com/v1", "PodMonitor", labelled, spec=spec)


def pod_security(*, fixed_user: bool = True, **more: Any) -> Object:
    """A pod's security context. Without `fixed_user` the image sets the user, and root is refused."""
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


TEMPLATE_FILE: Final = "chat_template.jinja"


def template_volume(name: str, config_map: str, key: str, *, optional: bool) -> Object:
    """A mounted chat template, as TEMPLATE_FILE for any key: SGLang checks the file's extension."""
    items = [{"key": key, "path": TEMPLATE_FILE}]
    return {"name": name, "configMap": {"name": config_map, "items": items, "optional": optional}}


def mount(name: str, path: str, *, read_only: bool = True) -> Object:
    """A volume mount."""
    return {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})


def port(number: int, last: int | None = None) -> Object:
    """A TCP port of a NetworkPolicy, or those from `number` to `last`."""
    found = {"port": number, "protocol": "TCP"}
    return found if last is None or last == number else {**found, "endPort": last}


def http_get(path: str, port: str) -> Object:
    """The action of a probe: an HTTP GET."""
    return {"httpGet": {"path": path, "port": port}}


def probe(handler: Object, period_s: int, failures: int, timeout_s: int = 2) -> Object:
    """A probe with its number of failures."""
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
