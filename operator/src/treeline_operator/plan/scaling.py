"""The object that owns a pool's replicas, if not the user: a HorizontalPodAutoscaler or a KEDA ScaledObject."""

from __future__ import annotations

from typing import Any, Final

from treeline_operator.api.parts import API_VERSION
from treeline_operator.api.pool import KIND, InferencePool
from treeline_operator.plan.objects import manifest
from treeline_operator.world import Platform

KEDA: Final = "keda.sh/v1alpha1/ScaledObject"


def autoscaler(pool: InferencePool, platform: Platform, meta: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The object, or None with the reason if there is one. It scales the pool itself, never a Deployment."""
    scaling = pool.spec.autoscaling
    whom = {"apiVersion": API_VERSION, "kind": KIND, "name": pool.name}
    least = 1 if scaling.min_replicas is None else scaling.min_replicas
    most = scaling.max_replicas or max(1, least)
    if scaling.type == "HPA" and scaling.hpa is not None:
        spec: dict[str, Any] = {
            "scaleTargetRef": whom,
            "minReplicas": max(1, least),
            "maxReplicas": most,
            "metrics": list(scaling.hpa.metrics),
        }
        if scaling.hpa.behavior:
            spec["behavior"] = scaling.hpa.behavior
        return manifest("autoscaling/v2", "HorizontalPodAutoscaler", meta, spec=spec), ""
    if scaling.type == "KEDA" and scaling.keda is not None:
        if KEDA not in platform.apis:
            return None, "autoscaling.type is KEDA, but the cluster has no keda.sh/v1alpha1: install KEDA"
        spec = {
            "scaleTargetRef": whom,
            "minReplicaCount": least,
            "maxReplicaCount": most,
            "triggers": list(scaling.keda.triggers),
        }
        if scaling.keda.polling_interval is not None:
            spec["pollingInterval"] = scaling.keda.polling_interval
        if scaling.keda.cooldown_period is not None:
            spec["cooldownPeriod"] = scaling.keda.cooldown_period
        return manifest("keda.sh/v1alpha1", "ScaledObject", meta, spec=spec), ""
    return None, ""
