"""Kinds and the paths under which the API server has them."""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import quote


class Resource(NamedTuple):
    """How a kind is addressed."""

    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The path of an object, or of all of a namespace; without a namespace, of all namespaces."""
        base = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        if namespace and self.namespaced:
            base += f"/namespaces/{quote(namespace, safe='')}"
        elif name and self.namespaced:
            raise ValueError(f"{self.plural}/{name} needs a namespace")
        parts = [base, self.plural, *(quote(p, safe="") for p in (name, subresource) if p)]
        return "/".join(parts)


def _table(api_version: str, namespaced: bool = True, **kinds: str) -> dict[tuple[str, str], Resource]:
    return {(api_version, kind): Resource(api_version, plural, namespaced) for kind, plural in kinds.items()}


KNOWN: Final[dict[tuple[str, str], Resource]] = {
    **_table("treeline.dev/v1alpha1", InferencePool="inferencepools", InferenceModel="inferencemodels"),
    **_table(
        "v1",
        ConfigMap="configmaps",
        Event="events",
        PersistentVolumeClaim="persistentvolumeclaims",
        Pod="pods",
        Secret="secrets",
        Service="services",
        ServiceAccount="serviceaccounts",
    ),
    **_table("v1", False, Namespace="namespaces", Node="nodes"),
    **_table("apps/v1", Deployment="deployments", ReplicaSet="replicasets"),
    **_table("autoscaling/v2", HorizontalPodAutoscaler="horizontalpodautoscalers"),
    **_table("coordination.k8s.io/v1", Lease="leases"),
    **_table("events.k8s.io/v1", Event="events"),
    **_table("networking.k8s.io/v1", NetworkPolicy="networkpolicies"),
    **_table("policy/v1", PodDisruptionBudget="poddisruptionbudgets"),
    **_table("rbac.authorization.k8s.io/v1", Role="roles", RoleBinding="rolebindings"),
}
"""The kinds of every cluster that the operator works with, and its own; others are discovered."""
