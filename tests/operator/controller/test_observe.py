"""The observed pools and models: statuses do not disturb shared gateways, and a misfit is named."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from treeline_operator.controller.observe import Observer
from treeline_operator.controller.store import Store
from treeline_operator.world import Platform

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def put(store: Store, name: str, version: int, *, kind: str = "InferencePool", **fields: Any) -> None:
    meta: dict[str, Any] = {
        "name": name,
        "namespace": "shop",
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "generation": fields.pop("generation", 1),
        "creationTimestamp": "2026-11-01T00:00:00Z",
    }
    obj = {"apiVersion": "treeline.dev/v1alpha1", "kind": kind, "metadata": meta, **fields}
    store.put({"spec": {"model": {"uri": "builtin://tiny"}}, **obj})


def test_a_status_changes_nothing_for_the_pools_beside_it() -> None:
    store = Store()
    observer = Observer(store, Platform())
    put(store, "a", 1)
    put(store, "b", 2)
    before = observer.gateway_world("shop", "treeline", NOW).pools
    put(store, "a", 3, status={"observedGeneration": 1})
    after = observer.gateway_world("shop", "treeline", NOW).pools
    assert all(one is other for one, other in zip(before, after, strict=True))
    pool = observer.pool("shop", "a")
    assert not isinstance(pool, str | None)
    assert pool.status["observedGeneration"] == 1, "its own status is judged by what is there now"
    put(store, "a", 4, generation=2, spec={"model": {"uri": "builtin://tiny"}, "replicas": 4})
    changed = observer.gateway_world("shop", "treeline", NOW).pools
    assert changed[0].spec.replicas == 4
    assert changed[1] is before[1]


def test_a_misfitting_model_is_named_with_the_error() -> None:
    store = Store()
    observer = Observer(store, Platform())
    put(store, "good", 1, kind="InferenceModel", spec={"modelName": "chat", "poolRef": {"name": "a"}})
    put(store, "odd", 2, kind="InferenceModel", spec={"modelName": "chat", "criticality": "Urgent"})
    assert [model.name for model in observer.models("shop")] == ["good"]
    ((observed, problem),) = observer.unreadable_models("shop")
    assert observed.ref.name == "odd"
    assert "criticality" in problem.detail
    assert "poolRef" in problem.detail
