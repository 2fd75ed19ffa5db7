"""The kinds that the operator watches, and the paths of their collections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from treeline_operator.api.parts import API_VERSION
from treeline_operator.controller.store import MODEL, POOL
from treeline_operator.names import MANAGED_BY, MANAGER

_OURS: Final = f"{MANAGED_BY}={MANAGER}"


@dataclass(frozen=True, slots=True)
class Watched:
    """A kind, and which of its objects are looked at. Secrets are never among them."""

    api_version: str
    kind: str
    plural: str
    selector: str = _OURS

    @property
    def api(self) -> str:
        """``group/version/Kind``, as discovery names it."""
        return f"{self.api_version}/{self.kind}"

    @property
    def group_version_plural(self) -> tuple[str, str, str]:
        """The three words by which the kind is addressed; the core group is empty."""
        group, _, version = self.api_version.rpartition("/")
        return group, version, self.plural

    def path(self, namespace: str) -> str:
        """The path of the collection in a namespace, or in all of them if it is empty."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        return f"{root}/namespaces/{namespace}/{self.plural}" if namespace else f"{root}/{self.plural}"


KINDS: Final = (
    Watched(API_VERSION, POOL, "inferencepools", ""),
    Watched(API_VERSION, MODEL, "inferencemodels", ""),
    Watched("apps/v1", "Deployment", "deployments"),
    Watched("v1", "Service", "services"),
    Watched("v1", "Pod", "pods"),
    Watched("v1", "ConfigMap", "configmaps"),
    Watched("v1", "ServiceAccount", "serviceaccounts"),
    Watched("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Watched("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    Watched("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Watched("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Watched("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    Watched("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
)
"""Watched always."""

OPTIONAL: Final = (
    Watched("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes"),
    Watched("inference.networking.k8s.io/v1", "InferencePool", "inferencepools"),
    Watched("keda.sh/v1alpha1", "ScaledObject", "scaledobjects"),
    Watched("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
)
"""Watched while discovery finds them."""
