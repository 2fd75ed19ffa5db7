"""What flow control asks of the picker's pods: flags, and the mounted file of quotas."""

from __future__ import annotations

from typing import Final

from treeline_operator.api.flow_control import FlowControl, Quotas
from treeline_operator.plan.objects import SECRET_MODE, Object, mount

QUOTAS_DIR: Final = "/etc/treeline/quotas"
_VOLUME: Final = "quotas"
_FILE: Final = "quotas.yaml"


def flags(settings: FlowControl | None) -> list[str]:
    """The picker's flags."""
    if settings is None:
        return []
    mode = "requests" if settings.endpoint_requests is not None else "wait"
    found: dict[str, object] = {
        "--flow-control": mode if settings.enabled else None,
        "--flow-wait-seconds": settings.wait_seconds,
        "--flow-endpoint-requests": settings.endpoint_requests,
        "--flow-max-requests": settings.max_requests,
        "--flow-max-bytes": settings.max_bytes,
        "--flow-ttl-seconds": settings.ttl_seconds,
        "--hold-empty-pool-seconds": settings.hold_empty_pool_seconds,
        "--fairness-header": settings.fairness_header,
        "--quotas-file": None if settings.quotas is None else f"{QUOTAS_DIR}/{_FILE}",
    }
    return [f"{flag}={_text(value)}" for flag, value in found.items() if value is not None]


def mounts(settings: FlowControl | None) -> list[Object]:
    """Where the picker finds the quotas: a folder, since the kubelet never renews a single mounted file."""
    return [] if settings is None or settings.quotas is None else [mount(_VOLUME, QUOTAS_DIR)]


def volumes(settings: FlowControl | None) -> list[Object]:
    """What is mounted there."""
    return [] if settings is None or settings.quotas is None else [_volume(settings.quotas)]


def _volume(quotas: Quotas) -> Object:
    if (ref := quotas.config_map_ref) is not None:
        return {"name": _VOLUME, "configMap": {"name": ref.name, "items": [{"key": ref.key, "path": _FILE}]}}
    ref = quotas.secret_ref
    assert ref is not None, "the API server admits quotas with one of the two alone"
    items = [{"key": ref.key, "path": _FILE}]
    return {"name": _VOLUME, "secret": {"secretName": ref.name, "items": items, "defaultMode": SECRET_MODE}}


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
