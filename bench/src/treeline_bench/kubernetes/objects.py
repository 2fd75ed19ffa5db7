"""The benchmark's pools and models, and their paths at the API server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

API_VERSION = "treeline.dev/v1alpha1"
POOLS_PER_GATEWAY = 4
CHILDREN_OF_POOL, CHILDREN_OF_GATEWAY = 4, 17
"""Number of children that the operator makes for a pool and for a gateway; with 4 pools behind each gateway, 8 a
pool."""


@dataclass(frozen=True)
class Pool:
    """An InferencePool. ``rank`` 0 is its gateway's oldest, whose settings apply to all."""

    namespace: str
    gateway: str
    rank: int

    @property
    def name(self) -> str:
        return f"{self.gateway}-pool-{self.rank}"

    @property
    def path(self) -> str:
        return f"{pools_path(self.namespace)}/{self.name}"

    def manifest(self) -> dict[str, Any]:
        return {
            "apiVersion": API_VERSION,
            "kind": "InferencePool",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {"model": {"uri": "builtin://tiny"}, "replicas": 1, "gateway": {"name": self.gateway}},
        }


@dataclass(frozen=True)
class Fleet:
    """Namespaces with so many gateways each."""

    namespaces: int
    gateways: int

    def namespace_names(self) -> list[str]:
        return [f"bench-{number:02}" for number in range(self.namespaces)]

    @property
    def places(self) -> int:
        """The number of gateways."""
        return self.namespaces * self.gateways

    def pools(self) -> list[Pool]:
        """In order of creation: the oldest of every gateway first."""
        return [self.pool(place, rank) for rank in range(POOLS_PER_GATEWAY) for place in range(self.places)]

    def pool(self, place: int, rank: int) -> Pool:
        """Neighbouring places are in different namespaces."""
        place %= self.places
        return Pool(self.namespace_names()[place % self.namespaces], f"gateway-{place // self.namespaces}", rank)


def namespace(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def model(name: str, model_name: str, pool: str, where: str) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "InferenceModel",
        "metadata": {"name": name, "namespace": where},
        "spec": {"modelName": model_name, "poolRef": {"name": pool}},
    }


def pools_path(where: str) -> str:
    return f"/apis/{API_VERSION}/namespaces/{where}/inferencepools"


def models_path(where: str) -> str:
    return f"/apis/{API_VERSION}/namespaces/{where}/inferencemodels"


def numbers(value: Any) -> Iterator[int]:
    """All whole numbers in JSON data."""
    if isinstance(value, dict):
        for each in value.values():
            yield from numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
