"""The kinds that the operator watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from treeline_kube.resources import Resource

from treeline_operator.api.parts import API_VERSION
from treeline_operator.controller.store import MODEL, POOL
from treeline_operator.names import COMPONENT, MANAGED_BY, MANAGER


@dataclass(frozen=True, slots=True)
class Watched:
    """A kind, and the label selector of those objects that are looked at. Secrets are never among them."""

    resource: Resource
    selector: str = f"{MANAGED_BY}={MANAGER}"

    @property
    def api(self) -> str:
        """`group/version/Kind`."""
        return self.resource.api


def _watched(api_version: str, kind: str, plural: str) -> Watched:
    return Watched(Resource(api_version, kind, plural))


OWN: Final = (
    Watched(Resource(API_VERSION, POOL, "inferencepools"), ""),
    Watched(Resource(API_VERSION, MODEL, "inferencemodels"), ""),
)
"""What users ask for. Their events come through kopf."""

CHILDREN: Final = (
    _watched("apps/v1", "Deployment", "deployments"),
    _watched("v1", "Service", "services"),
    _watched("v1", "Pod", "pods"),
    _watched("v1", "ConfigMap", "configmaps"),
    _watched("v1", "ServiceAccount", "serviceaccounts"),
    _watched("rbac.authorization.k8s.io/v1", "Role", "roles"),
    _watched("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    _watched("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    _watched("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    _watched("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    _watched("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
    Watched(
        # They carry the labels of their Service: these are of the gateways' URLs alone, not of every pool's pods.
        Resource("discovery.k8s.io/v1", "EndpointSlice", "endpointslices"),
        f"{MANAGED_BY}={MANAGER},{COMPONENT}=edge",
    ),
)
"""What is made of it, in every cluster. Each is followed by a reflector, and so are the optional ones."""

KINDS: Final = (*OWN, *CHILDREN)

OPTIONAL: Final = (
    _watched("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes"),
    _watched("inference.networking.k8s.io/v1", "InferencePool", "inferencepools"),
    _watched("keda.sh/v1alpha1", "ScaledObject", "scaledobjects"),
    _watched("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
)
"""Followed where they are, and asked for now and then where they are not."""

EVERY: Final = (*KINDS, *OPTIONAL)
