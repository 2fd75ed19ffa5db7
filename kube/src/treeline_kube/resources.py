"""Kinds, objects and collections, and the paths under which the API server has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote


class Ref(NamedTuple):
    """An object's address. `api_version` is `group/version`, or `v1` for the core group."""

    api_version: str
    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, obj: Mapping[str, Any]) -> Ref:
        """The address of a decoded object."""
        meta = obj["metadata"]
        return cls(obj["apiVersion"], obj["kind"], meta.get("namespace", ""), meta["name"])


class Resource(NamedTuple):
    """The address of a kind."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api(self) -> str:
        """`group/version/Kind`, as discovery names it."""
        return f"{self.api_version}/{self.kind}"

    @property
    def group(self) -> str:
        """The API group; the core group's is empty."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """The version within the group."""
        return self.api_version.rpartition("/")[2]

    @property
    def label(self) -> str:
        """The kind for people and metrics: `pods`, `inferencepools.treeline.dev`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The path of an object, or of all of a namespace; without a namespace, of all namespaces."""
        base = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        if namespace and self.namespaced:
            base += f"/namespaces/{quote(namespace, safe='')}"
        elif name and self.namespaced:
            raise ValueError(f"{self.plural}/{name} needs a namespace")
        parts = [base, self.plural, *(quote(p, safe="") for p in (name, subresource) if p)]
        return "/".join(parts)


class Collection(NamedTuple):
    """The objects of a kind in a namespace (in all of them if it is empty) that a label selector matches."""

    resource: Resource
    namespace: str = ""
    selector: str = ""

    @property
    def path(self) -> str:
        """The path at which it is listed and watched."""
        return self.resource.path(self.namespace)


def selector_text(selector: Mapping[str, str]) -> str:
    """A label selector as a query parameter spells it."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector.items()))


def _table(api_version: str, namespaced: bool = True, **kinds: str) -> dict[tuple[str, str], Resource]:
    return {(api_version, kind): Resource(api_version, kind, plural, namespaced) for kind, plural in kinds.items()}


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
"""The kinds of every cluster that Treeline works with, and its own; others are discovered."""
