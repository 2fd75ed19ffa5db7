"""What one reconciliation says, with everything around it made up."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

from treeline_operator.controller.metrics import Metrics
from treeline_operator.controller.observe import Observer
from treeline_operator.controller.reconciler import Reconciler
from treeline_operator.controller.store import Store
from treeline_operator.world import Key, Platform, Ref

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


class Api:
    """Takes statuses and Events as they come."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.statuses: dict[str, Any] = {}
        self.events: list[tuple[str, str]] = []

    async def apply_status(self, obj: dict[str, Any]) -> dict[str, Any]:
        meta = obj["metadata"]
        self.statuses[meta["name"]] = obj["status"]
        stored = self.store.get(Ref(obj["apiVersion"], obj["kind"], meta["namespace"], meta["name"]))
        assert stored is not None
        there = stored.object
        return {**there, "status": obj["status"], "metadata": {**there["metadata"], "resourceVersion": "9"}}

    def tell(self, ref: Any, uid: str, type_: str, reason: str, message: str) -> None:
        self.events.append((ref.name, reason))


def model(name: str, **spec: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "shop", "uid": f"uid-{name}", "resourceVersion": "1", "generation": 4}
    status = {"conflictingModel": "other", "conditions": []}
    return {
        "apiVersion": "treeline.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {**meta, "creationTimestamp": "2026-11-01T00:00:00Z"},
        "spec": {"modelName": "chat", "poolRef": {"name": "tiny"}, **spec},
        "status": status,
    }


async def test_a_model_that_is_not_understood_says_so() -> None:
    store = Store()
    api = Api(store)
    store.put(model("odd", criticality="Urgent"))
    store.put(model("fine"))
    fakes = cast("Any", api)
    reconciler = Reconciler(
        observer=Observer(store, Platform()),
        executor=fakes,
        statuses=fakes,
        recorder=fakes,
        metrics=Metrics(),
        probe=fakes,
        downloads=fakes,
        clock=lambda: NOW,
        changed=lambda _: None,
    )
    await reconciler.reconcile(Key("models", "shop"))
    (told,) = api.statuses["odd"]["conditions"]
    assert (told["type"], told["status"], told["reason"]) == ("Accepted", "False", "SpecNotUnderstood")
    assert "criticality" in told["message"]
    assert api.statuses["odd"]["observedGeneration"] == 4
    assert api.statuses["fine"]["conditions"][0]["reason"] == "PoolNotFound"
    assert ("odd", "SpecNotUnderstood") in api.events
    api.statuses.clear()
    await reconciler.reconcile(Key("models", "shop"))
    assert api.statuses == {}, "it is said once"
