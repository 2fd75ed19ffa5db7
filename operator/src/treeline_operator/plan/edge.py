"""Envoy's objects in a cluster without Gateway API: bootstrap, Deployment, the Service behind the URL."""

from __future__ import annotations

import functools
import math
from typing import Any, Final

from treeline_operator import envoy, names
from treeline_operator.api.pool import Standalone
from treeline_operator.plan.anchored import (
    SECRET_MODE,
    Ground,
    Making,
    deployment,
    disruption_budget,
    resources,
    service_account,
)
from treeline_operator.plan.canonical import canonical, quantity

LISTEN_PORT: Final = 8080
ADMIN_PORT: Final = 9901
HEALTH_PORT: Final = 8081
CONFIG_DIR: Final = "/etc/treeline/envoy"
TLS_DIR: Final = "/etc/treeline/tls"
KEYS_DIR: Final = "/etc/treeline/api-keys"
RUN_DIR: Final = "/run/treeline"
KEYS_FILE: Final = f"{RUN_DIR}/api-keys.json"
_REQUESTS: Final = {"cpu": "50m", "memory": "64Mi"}
_BODY_LIMIT: Final = 32 * 1024 * 1024
_WORKERS: Final = 2
_LINGER_S: Final = 10
"""Longer than it takes until a pod in the place of the only one is ready: nobody else accepts connections meanwhile."""
_HOST: Final = "picker.host.placeholder"


def inputs(ground: Ground) -> str:
    """Hash of everything in the pools' specs that Envoy's pods and their configuration are made from."""
    settings = ground.shared.edge.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        exclude_none=True,
        # Those are the Service's, and no part of a pod.
        exclude={"service_type", "port", "annotations", "replicas"},
    )
    picker = ground.shared.picker
    made_from = {
        "gateway": ground.gateway,
        "edge": settings,
        "failureMode": picker.failure_mode,
        "maxBodyBytes": picker.parameters.max_body_bytes,
        "drain": ground.drain_s,
        "domain": ground.platform.cluster_domain,
    }
    return names.digest(canonical(made_from))


def config_map(ground: Ground) -> dict[str, Any]:
    """The bootstrap, immutable and named by its content: pods of two configurations live side by side in a rollout."""
    settings, picker = ground.shared.edge, ground.shared.picker
    files = _files(
        fail_open=picker.failure_mode == "FailOpen",
        body_limit=picker.parameters.max_body_bytes or _BODY_LIMIT,
        has_keys=settings.api_keys_secret_ref is not None,
        has_tls=settings.tls is not None,
        expose_routing=settings.expose_routing,
    )
    host = f"{names.epp(ground.gateway)}.{ground.namespace}.svc.{ground.platform.cluster_domain}"
    data = {name: text.replace(_HOST, host) for name, text in files}
    content = names.digest(data)
    meta = ground.meta(f"{names.edge(ground.gateway)}-{content}", "edge")
    meta["labels"][names.REVISION] = content
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "immutable": True, "data": data}


@functools.lru_cache(maxsize=32)
def _files(
    *, fail_open: bool, body_limit: int, has_keys: bool, has_tls: bool, expose_routing: bool
) -> tuple[tuple[str, str], ...]:
    """File name and text of what is mounted, the picker's address apart: making it takes a tenth of a second.

    (The messages of Envoy's API are loaded here, at the first gateway: without one they are 20 MB for nothing.)
    """
    tls = envoy.Tls(f"{TLS_DIR}/tls.crt", f"{TLS_DIR}/tls.key", f"{CONFIG_DIR}/tls.json") if has_tls else None
    config = envoy.EnvoyConfig(
        listen_host="0.0.0.0",
        listen_port=LISTEN_PORT,
        admin_port=ADMIN_PORT,
        health_port=HEALTH_PORT,
        epp_host=_HOST,
        body_limit=body_limit,
        api_keys_file=KEYS_FILE if has_keys else None,
        tls=tls,
        fail_open=fail_open,
        add_endpoint_header=expose_routing,
        expose_cached_tokens=expose_routing,
    )
    files = [("envoy.json", envoy.bootstrap_json(config))]
    if tls is not None:
        files.append(("tls.json", envoy.tls_json(tls)))
    return tuple(files)


def identity(ground: Ground) -> dict[str, Any]:
    """An identity of its own, without rights and without a token."""
    return service_account(ground, "edge", names.edge(ground.gateway))


def service(ground: Ground) -> dict[str, Any]:
    """The Service behind the URL."""
    settings = ground.shared.edge
    meta = ground.meta(names.url_service(ground.gateway), "edge", settings.annotations)
    scheme = "https" if settings.tls else "http"
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {
            "type": settings.service_type,
            "selector": ground.pods("edge"),
            "ports": [{"name": scheme, "port": settings.port, "targetPort": "gateway", "protocol": "TCP"}],
        },
    }


def workload(ground: Ground, made: Making, config: dict[str, Any]) -> dict[str, Any]:
    """Envoy's Deployment. The launcher in its pods lingers, drains and ends Envoy, so there is no preStop."""
    settings = ground.shared.edge
    name = config["metadata"]["name"]
    mounts = [
        {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "run", "mountPath": RUN_DIR},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": name}},
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    for volume, ref, folder in (
        ("api-keys", settings.api_keys_secret_ref, KEYS_DIR),
        ("tls", settings.tls.secret_ref if settings.tls else None, TLS_DIR),
    ):
        if ref is not None:
            mounts.append({"name": volume, "mountPath": folder, "readOnly": True})
            secret = {"secretName": ref.name, "defaultMode": SECRET_MODE}
            volumes.append({"name": volume, "secret": secret})
    container = {
        "command": ["python", "-m", "treeline_operator.envoy"],
        "args": arguments(ground),
        "ports": [
            {"name": "gateway", "containerPort": LISTEN_PORT, "protocol": "TCP"},
            {"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"},
        ],
        "resources": resources(settings.resources, _REQUESTS),
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": "health"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 1,
        },
        "volumeMounts": mounts,
    }
    pod = {"automountServiceAccountToken": False, "volumes": volumes}
    return deployment(
        ground,
        "edge",
        names.edge(ground.gateway),
        replicas=settings.replicas,
        image=made.image,
        inputs=inputs(ground),
        container=container,
        pod=pod,
        labels={names.REVISION: config["metadata"]["labels"][names.REVISION]},
    )


def arguments(ground: Ground) -> list[str]:
    """The launcher's flags."""
    settings = ground.shared.edge
    words = [
        f"--config={CONFIG_DIR}/envoy.json",
        f"--drain-timeout={ground.drain_s}",
        f"--linger={_LINGER_S}",
        f"--concurrency={_workers(settings)}",
    ]
    if settings.api_keys_secret_ref is not None:
        words += [f"--keys-dir={KEYS_DIR}", f"--keys-file={KEYS_FILE}"]
    return words


def budget(ground: Ground) -> dict[str, Any]:
    """Envoy's PodDisruptionBudget."""
    return disruption_budget(ground, "edge", names.edge(ground.gateway))


def _workers(settings: Standalone) -> int:
    """Envoy's threads: as many as its CPUs. It would take the node's number, not the container's."""
    asked = settings.resources
    cpus = None if asked is None else asked.limits.get("cpu") or asked.requests.get("cpu")
    number = None if cpus is None else quantity(cpus)
    return _WORKERS if number is None else max(1, math.ceil(number))
