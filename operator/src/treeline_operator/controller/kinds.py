"""The kinds that the operator follows, each with its label selector. Secrets are never among them."""

from __future__ import annotations

from typing import Final

from treeline_kube.resources import Collection, Resource

from treeline_operator.api.parts import API_VERSION
from treeline_operator.controller.store import MODEL, POOL
from treeline_operator.names import COMPONENT, MANAGED_BY, MANAGER

_OURS: Final = f"{MANAGED_BY}={MANAGER}"


def _made(api_version: str, kind: str, plural: str, selector: str = _OURS) -> Collection:
    return Collection(Resource(api_version, kind, plural), selector=selector)


OWN: Final = (
    _made(API_VERSION, POOL, "inferencepools", ""),
    _made(API_VERSION, MODEL, "inferencemodels", ""),
)
"""Our own kinds. Their events come through kopf."""

CHILDREN: Final = (
    _made("apps/v1", "Deployment", "deployments"),
    _made("v1", "Service", "services"),
    _made("v1", "Pod", "pods"),
    _made("v1", "ConfigMap", "configmaps"),
    _made("v1", "ServiceAccount", "serviceaccounts"),
    _made("rbac.authorization.k8s.io/v1", "Role", "roles"),
    _made("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    _made("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    _made("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    _made("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    # They carry their Service's labels: this selects those of gateway URLs, not of every pool's pods.
    _made("discovery.k8s.io/v1", "EndpointSlice", "endpointslices", f"{_OURS},{COMPONENT}=edge"),
)
"""Kinds of children in every cluster. Reflectors watch them, and the optional ones."""

KINDS: Final = (*OWN, *CHILDREN)

OPTIONAL: Final = (
    _made("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes"),
    _made("inference.networking.k8s.io/v1", "InferencePool", "inferencepools"),
    _made("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
    _made("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets"),
)
"""Followed where they exist, and looked for now and then where they do not."""

EVERY: Final = (*KINDS, *OPTIONAL)
