"""Envoy's objects in a cluster without Gateway API: bootstrap, Deployment, the Service behind the URL."""

from __future__ import annotations

import math
from typing import Final

from treeline_wire import ports

from treeline_operator import envoy, names
from treeline_operator.plan.canonical import canonical
from treeline_operator.plan.gateway_common import GatewayContext, container_resources, deployment, resources
from treeline_operator.plan.objects import (
    Object,
    container_port,
    http_get,
    manifest,
    mount,
    probe,
    secret_volume,
    service_port,
)
from treeline_operator.quantity import quantity

LISTEN_PORT: Final = 8080
ADMIN_PORT: Final = 9901
HEALTH_PORT: Final = 8081
CONFIG_DIR: Final = "/etc/treeline/envoy"
TLS_DIR: Final = "/etc/treeline/tls"
KEYS_DIR: Final = "/etc/treeline/api-keys"
PICKER_TLS_DIR: Final = "/etc/treeline/picker-tls"
RUN_DIR: Final = "/run/treeline"
KEYS_FILE: Final = f"{RUN_DIR}/api-keys.json"
_REQUESTS: Final = {"cpu": "50m", "memory": "64Mi"}
_BODY_LIMIT: Final = 32 * 1024 * 1024
_MEMORY_LIMIT: Final = 1024 * 1024 * 1024
_BODIES: Final = 8
"""Number of longest bodies that fit into memory. A body takes up to three times its length while it is passed to the
picker and to its endpoint."""
_SMALLEST_HEAP: Final = 32 * 1024 * 1024
_WORKERS: Final = 2
_LINGER_S: Final = 10
"""Longer than it takes until a pod in the place of the only one is ready: no other accepts connections meanwhile."""


def inputs(context: GatewayContext) -> str:
    """Hash of everything in the pools' specs that Envoy's pods and their configuration are made from."""
    settings = context.shared.edge.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        exclude_none=True,
        # These belong to the Service, the Deployment and the picker, not to a pod.
        exclude={"service_type": True, "port": True, "annotations": True, "replicas": True, "template": True}
        | {"limits": {"unanswered_requests"}},
    )
    picker = context.shared.picker
    made_from: Object = {
        "gateway": context.gateway,
        "edge": settings,
        # Forced if only the picker isolates clients; Envoy must know it then.
        "failureMode": context.shared.failure_mode if context.shared.fails_open else "FailClose",
        "maxBodyBytes": picker.parameters.max_body_bytes,
        "drain": context.drain_s,
        "domain": context.platform.cluster_domain,
        **context.fragments_hash("edge"),
    }
    if context.shared.counts_outputs:
        made_from["countsOutputs"] = True
    if context.shared.has_clients and not context.shared.kept_apart:
        made_from["isolation"] = "Shared"
    if (engines := _engines(context)) != ("treeline",):
        made_from["engines"] = engines
    if (tracing := context.shared.tracing) is not None:
        made_from["tracing"] = tracing.environment
    return names.digest(canonical(made_from))


def config_map(context: GatewayContext) -> Object:
    """The bootstrap, immutable and named by its content: pods of two configurations live side by side in a rollout."""
    data = files(config(context))
    content = names.digest(data)
    meta = context.meta(f"{names.edge(context.gateway)}-{content}", "edge")
    meta["labels"][names.REVISION] = content
    return manifest("v1", "ConfigMap", meta, immutable=True, data=data)


def config(context: GatewayContext) -> envoy.EnvoyConfig:
    """The settings of Envoy."""
    settings, tracing = context.shared.edge, context.shared.tracing
    # The name in the picker's certificate, the same for any cluster domain.
    picker = f"{names.epp(context.gateway)}.{context.namespace}.svc"
    certificate = (f"{TLS_DIR}/tls.crt", f"{TLS_DIR}/tls.key", f"{CONFIG_DIR}/tls.json")
    return envoy.EnvoyConfig(
        listen_host="0.0.0.0",
        listen_port=LISTEN_PORT,
        admin_port=ADMIN_PORT,
        health_port=HEALTH_PORT,
        epp_host=f"{picker}.{context.platform.cluster_domain}",
        console_port=ports.PICKER_ADMIN if settings.console else None,
        engines=_engines(context),
        body_limit=_body_limit(context),
        limits=envoy.Limits(
            body_timeout_s=settings.limits.receive_timeout_seconds,
            connections=settings.limits.connections,
            client_requests_per_s=settings.limits.requests_per_second,
            # the rest of the limit is for the launcher and Envoy's other memory
            heap_bytes=max(_SMALLEST_HEAP, _memory_limit(context) * 3 // 4),
        ),
        api_keys_file=KEYS_FILE if settings.api_keys_secret_ref else None,
        tls=envoy.Tls(*certificate) if settings.tls else None,
        picker_tls=envoy.PickerTls(PICKER_TLS_DIR, picker, CONFIG_DIR) if settings.picker_tls else None,
        fail_open=context.shared.fails_open,
        add_endpoint_header=settings.expose_routing,
        expose_cached_tokens=settings.expose_routing,
        isolation="PerKey" if context.shared.kept_apart else "Shared",
        response_body_mode="STREAMED" if context.shared.counts_outputs else "NONE",
        tracing=None if tracing is None else envoy.Tracing(*tracing.collector, ratio=tracing.ratio),
    )


def files(config: envoy.EnvoyConfig) -> dict[str, str]:
    """File name → text of mounted files."""
    found = {"envoy.json": envoy.bootstrap_json(config)}
    if config.tls is not None:
        found["tls.json"] = envoy.tls_json(config.tls)
    if config.picker_tls is not None:
        found |= envoy.picker_tls_files(config.picker_tls)
    return found


def service(context: GatewayContext) -> Object:
    """The Service behind the URL."""
    settings = context.shared.edge
    scheme = "https" if settings.tls else "http"
    spec = {
        "type": settings.service_type,
        "selector": context.pods("edge"),
        "ports": [service_port(scheme, settings.port, "gateway")],
    }
    meta = context.meta(names.url_service(context.gateway), "edge", settings.annotations)
    return manifest("v1", "Service", meta, spec=spec)


def workload(context: GatewayContext, image: str, config: Object) -> Object:
    """Envoy's Deployment. The launcher in its pods lingers, drains and ends Envoy, so there is no preStop."""
    settings = context.shared.edge
    mounts = [
        mount("config", CONFIG_DIR),
        *(mount(name, path, read_only=False) for name, path in (("run", RUN_DIR), ("tmp", "/tmp"))),
    ]
    volumes: list[Object] = [
        {"name": "config", "configMap": {"name": config["metadata"]["name"]}},
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    for volume, ref, folder in (
        ("api-keys", settings.api_keys_secret_ref, KEYS_DIR),
        ("tls", settings.tls.secret_ref if settings.tls else None, TLS_DIR),
        ("picker-tls", settings.picker_tls.secret_ref if settings.picker_tls else None, PICKER_TLS_DIR),
    ):
        if ref is not None:
            mounts.append(mount(volume, folder))
            volumes.append(secret_volume(volume, ref.name))
    container = {
        "command": ["python", "-m", "treeline_operator.envoy"],
        "args": arguments(context),
        "ports": [container_port("gateway", LISTEN_PORT), container_port("health", HEALTH_PORT)],
        "resources": _resources(context),
        "readinessProbe": probe(http_get("/ready", "health"), 2, 1),
        "volumeMounts": mounts,
    }
    pod = {"automountServiceAccountToken": False, "volumes": volumes}
    return deployment(
        context,
        "edge",
        replicas=settings.replicas,
        image=image,
        inputs=inputs(context),
        container=container,
        pod=pod,
        labels={names.REVISION: config["metadata"]["labels"][names.REVISION]},
    )


def arguments(context: GatewayContext) -> list[str]:
    """The launcher's flags."""
    settings = context.shared.edge
    words = [
        f"--config={CONFIG_DIR}/envoy.json",
        f"--drain-timeout={context.drain_s}",
        f"--linger={_LINGER_S}",
        f"--concurrency={_workers(context)}",
    ]
    if settings.api_keys_secret_ref is not None:
        words += [f"--keys-dir={KEYS_DIR}", f"--keys-file={KEYS_FILE}"]
    return words


def _resources(context: GatewayContext) -> Object:
    """The requested resources, always with a memory limit, which determines Envoy's buffers."""
    found = resources(context.shared.edge.resources, _REQUESTS)
    limits = {"memory": f"{_memory_limit(context) >> 20}Mi", **found.get("limits", {})}
    return {**found, "limits": limits}


def _memory_limit(context: GatewayContext) -> int:
    """Bytes of the container's memory limit: the one given, else enough for some bodies at once."""
    asked = container_resources(context, "edge", context.shared.edge.resources)
    given = quantity(asked["limits"].get("memory"))
    if given is not None:
        return int(given)
    requested = quantity(asked["requests"].get("memory")) or 0
    return max(_MEMORY_LIMIT, _BODIES * _body_limit(context), int(requested))


def _body_limit(context: GatewayContext) -> int:
    return context.shared.picker.parameters.max_body_bytes or _BODY_LIMIT


def _engines(context: GatewayContext) -> tuple[str, ...]:
    """The types of the engines behind the edge, which determine the inference paths."""
    return tuple(sorted({pool.spec.engine.type for pool in context.pools}))


def _workers(context: GatewayContext) -> int:
    """Envoy's threads: its number of CPUs. By default it would use the node's, not the container's."""
    asked = container_resources(context, "edge", context.shared.edge.resources)
    number = quantity(asked["limits"].get("cpu") or asked["requests"].get("cpu"))
    return _WORKERS if number is None else max(1, math.ceil(number))
