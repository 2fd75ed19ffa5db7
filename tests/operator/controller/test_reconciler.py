"""The results of one reconciliation, in a simulated environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from treeline_operator.actions import Plan
from treeline_operator.controller import reconciler as module
from treeline_operator.controller.execute import Done
from treeline_operator.controller.metrics import Metrics
from treeline_operator.controller.observe import Observer
from treeline_operator.controller.reconciler import Reconciler
from treeline_operator.controller.store import Store
from treeline_operator.controller.warnings import Warnings
from treeline_operator.plan.routes import ROUTE, UPSTREAM
from treeline_operator.world import Key, Platform, Ref, Scaling

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


class Api:
    """Accepts statuses and Events."""

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

    async def execute(self, plan: Plan) -> Done:
        return Done()

    async def list(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def see(self, key: Key, pods: Any) -> None:
        """Follow no downloads."""

    def look(self, namespace: str, gateway: str) -> None:
        """Ask no picker."""

    def wait(self, *_: Any) -> None:
        """Wait for no picker."""

    def progress(self, key: Key) -> dict[str, Any]:
        return {}

    commits = progress

    def emit(self, ref: Any, uid: str, type_: str, reason: str, message: str) -> None:
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


def reconciler_of(store: Store, api: Api, wake: Callable[[Iterable[Key]], None] = lambda _: None) -> Reconciler:
    fakes = cast("Any", api)
    return Reconciler(
        observer=Observer(store, Platform()),
        executor=fakes,
        statuses=fakes,
        recorder=fakes,
        metrics=Metrics(),
        probe=fakes,
        downloads=fakes,
        warnings=Warnings(fakes, lambda _: None),
        clock=lambda: NOW,
        wake=wake,
    )


async def test_an_invalid_model_is_reported() -> None:
    store = Store()
    api = Api(store)
    store.put(model("odd", criticality="Urgent"))
    store.put(model("fine"))
    reconciler = reconciler_of(store, api)
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


def pool(name: str) -> dict[str, Any]:
    made = model(name, model={"uri": "builtin://tiny"})
    spec = {"model": {"uri": "builtin://tiny"}}
    return {**made, "kind": "InferencePool", "spec": spec, "status": {"replicas": 0}}


async def test_a_pool_without_a_status_gets_one_before_it_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    api = Api(store)
    store.put({**pool("a"), "status": {}})
    reconciler, one = reconciler_of(store, api), Key("pool", "shop", "a")
    with monkeypatch.context() as patch:
        patch.setattr(module, "plan_pool", None)  # any planning fails
        outcome = await reconciler.reconcile(one)
    assert (outcome.result, outcome.after_s) == ("new", 0.0)
    (ready,) = api.statuses["a"]["conditions"]
    assert (ready["status"], ready["reason"], ready["observedGeneration"]) == ("Unknown", "Pending", 0)
    assert api.events == []
    assert (await reconciler.reconcile(one)).result != "new"


async def test_events_are_not_listed_for_a_pool_that_is_no_longer_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    reconciler, one = reconciler_of(store, Api(store)), Key("pool", "shop", "a")
    waiting: dict[Key, bool] = {}
    monkeypatch.setattr(Warnings, "see", lambda _, key, world: waiting.update({key: world is not None}))
    waiting[one] = True
    store.put({**pool("a"), "spec": {"model": {"uri": 7}}})
    assert (await reconciler.reconcile(one)).result == "invalid"
    assert waiting == {one: False}


async def test_in_one_turn_of_the_loop_there_is_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes and answers of the API server then wait for at most one plan, however many pools there are."""
    store = Store()
    for number in range(20):
        store.put(pool(f"p{number}"))
    reconciler, turns, planned = reconciler_of(store, Api(store)), 0, []

    def plan(world: Any) -> Plan:
        planned.append(turns)
        return Plan()

    async def count() -> None:
        nonlocal turns
        while len(planned) < 20:
            await asyncio.sleep(0)
            turns += 1

    monkeypatch.setattr(module, "plan_pool", plan)
    keys = [Key("pool", "shop", f"p{number}") for number in range(20)]
    await asyncio.gather(count(), *(reconciler.reconcile(key) for key in keys))
    assert len(set(planned)) == 20


async def test_a_plan_that_cannot_be_made_is_reported_by_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    store, woken = Store(), []
    api = Api(store)
    store.put(pool("a"))
    reconciler = reconciler_of(store, api, woken.extend)

    def broken(world: Any) -> Plan:
        raise KeyError("a secret of the innermost")

    def told() -> dict[str, Any]:
        return {one["type"]: one for one in api.statuses["a"]["conditions"]}["Ready"]

    gateway = Key("gateway", "shop", "treeline")
    await reconciler.reconcile(gateway)
    for planner, key in (("plan_pool", Key("pool", "shop", "a")), ("plan_gateway", gateway)):
        with monkeypatch.context() as patch:
            patch.setattr(module, planner, broken)
            outcome = await reconciler.reconcile(key)
            assert (outcome.result, outcome.retry) == ("bug", True)
            await reconciler.reconcile(Key("pool", "shop", "a"))
        assert (told()["status"], told()["reason"]) == ("False", "ReconcileFailed")
        assert f"KeyError in the plan of {key.kind} {key.name}" in told()["message"]
        assert "innermost" not in told()["message"]
        await reconciler.reconcile(key)
        await reconciler.reconcile(Key("pool", "shop", "a"))
        assert told()["reason"] != "ReconcileFailed", "it is over when a plan is made"
    assert woken == [Key("pool", "shop", "a")] * 3, "pools are notified of changes of their gateway, and of its end"


async def test_a_status_does_not_wait_for_the_plan_of_the_gateway() -> None:
    store, woken = Store(), []
    api = Api(store)
    reconciler = reconciler_of(store, api, woken.extend)
    one, gateway = Key("pool", "shop", "a"), Key("gateway", "shop", "treeline")

    async def told() -> bool:
        api.statuses.clear()
        await reconciler.reconcile(one)
        return "a" in api.statuses

    store.put(pool("a"))
    assert await told()
    await reconciler.reconcile(gateway)
    assert woken == [one]
    await reconciler.reconcile(gateway)
    assert woken == [one], "nothing is new to it"


async def test_a_model_whose_pool_comes_a_moment_later_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = Store(), [NOW]
    api = Api(store)
    reconciler = reconciler_of(store, api)
    monkeypatch.setattr(reconciler, "clock", lambda: now[0])
    store.put(model("early"))
    outcome = await reconciler.reconcile(Key("models", "shop"))
    assert api.statuses["early"]["conditions"][0]["reason"] == "PoolNotFound"
    assert (api.events, outcome.after_s) == ([], 15)
    now[0] += timedelta(seconds=14)
    outcome = await reconciler.reconcile(Key("models", "shop"))
    assert (api.events, outcome.after_s) == ([], 1)
    now[0] += timedelta(seconds=1)
    outcome = await reconciler.reconcile(Key("models", "shop"))
    assert (api.events, outcome.after_s) == ([("early", "PoolNotFound")], None)
    await reconciler.reconcile(Key("models", "shop"))
    assert len(api.events) == 1


async def test_a_pool_reports_what_its_gateway_lacks_and_checks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    api = Api(store)
    parent = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "front"}
    told = {"type": "Accepted", "status": "True", "reason": "Accepted", "message": ""}
    group = "gateway.networking.k8s.io/v1"
    attached = pool("a")
    attached["spec"]["gateway"] = {"parentRefs": [parent]}
    store.put(attached)
    meta = {"namespace": "shop", "uid": "u", "resourceVersion": "1", "generation": 1}
    labels = {"treeline.dev/pool": "a", "treeline.dev/gateway": "treeline"}
    status = {"parents": [{"parentRef": parent, "conditions": [told]}]}
    route = {"apiVersion": group, "kind": "HTTPRoute", "metadata": {**meta, "name": "a", "labels": labels}}
    store.put({**route, "status": status})
    programmed = {"type": "Programmed", "status": "False", "reason": "Pending", "message": "no address"}
    asked = []

    async def get(ref: Ref) -> dict[str, Any]:
        asked.append(ref)
        found = {"apiVersion": group, "kind": "Gateway", "metadata": {**meta, "name": "front"}}
        return {**found, "status": {"conditions": [programmed]}}

    monkeypatch.setattr(api, "get", get, raising=False)
    reconciler = reconciler_of(store, api)
    reconciler.observer.platform = Platform(apis=frozenset((ROUTE, UPSTREAM)))
    await reconciler.reconcile(Key("gateway", "shop", "treeline"))
    outcome = await reconciler.reconcile(Key("pool", "shop", "a"))
    found = {one["type"]: one for one in api.statuses["a"]["conditions"]}["GatewayReady"]
    assert (found["status"], found["reason"]) == ("False", "GatewayNotProgrammed")
    assert "Pending: no address" in found["message"]
    assert asked == [Ref(group, "Gateway", "shop", "front")]
    assert outcome.after_s is not None
    assert outcome.after_s <= 10


async def test_only_affected_pools_of_a_gateway_are_notified() -> None:
    store, woken = Store(), []
    reconciler = reconciler_of(store, Api(store), woken.extend)
    gateway, names = Key("gateway", "shop", "treeline"), [f"p{number}" for number in range(8)]

    async def told() -> list[str]:
        woken.clear()
        await reconciler.reconcile(gateway)
        return [key.name for key in woken]

    def change(name: str, version: int, **spec: Any) -> None:
        made = pool(name)
        made["metadata"] |= {"resourceVersion": str(version), "generation": version}
        store.put(made | {"spec": made["spec"] | spec})

    change("p0", 10)
    assert await told() == ["p0"]
    for version, name in enumerate(names[1:-1], 11):
        change(name, version)
        assert await told() == [], "one that comes concerns itself, and is looked at anyway"
    change("p3", 31, endpointPicker={"replicas": 2})
    assert await told() == [], "a younger one's settings do not hold for the others"
    change("p0", 32, endpointPicker={"failureMode": "FailClose"})
    assert await told() == names[:-1], "those of the oldest do"
    change(names[-1], 33, engine={"type": "vllm"}, gateway={"isolation": "Shared"})
    assert await told() == []
    store.remove(Ref("treeline.dev/v1alpha1", "InferencePool", "shop", "p5"), "uid-p5", "40")
    assert await told() == []
    store.remove(Ref("treeline.dev/v1alpha1", "InferencePool", "shop", "p0"), "uid-p0", "41")
    assert await told() == [name for name in names if name not in ("p0", "p5")], "the next oldest's hold now"


async def test_advice_on_prefill_pods_is_planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No watch tells the operator of a status that it has written itself."""
    store, planned, woken = Store(), [], []
    bounds = {"prefill": {"maxReplicas": 9}, "autoscaling": {"type": "Picker", "maxReplicas": 2}}
    spec = {"model": {"uri": "path:///m"}, "engine": {"type": "vllm"}, **bounds}
    store.put({**pool("a"), "spec": spec})
    reconciler, one = reconciler_of(store, Api(store)), Key("pool", "shop", "a")
    monkeypatch.setattr(module, "plan_pool", lambda world: planned.append(world.pool.prefill_replicas))
    reconciler.observer.scaling["shop", "a"] = Scaling(True, prompts=6)
    store.listeners.append(lambda change: woken.append(change.ref.name))
    for _ in range(2):
        await reconciler.reconcile(one)
    assert (planned, woken) == ([1, 6], ["a"])
