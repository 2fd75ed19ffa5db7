from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from treeline_operator.api.parts import API_VERSION
from treeline_operator.api.pool import InferencePool
from treeline_operator.controller.observe import keys_for_change
from treeline_operator.controller.store import Change, Store, membership_of
from treeline_operator.world import Key, Ref


def child(name: str, version: int, uid: str = "", pool: str = "", gateway: str = "g", **more: Any) -> dict[str, Any]:
    marks = {"treeline.dev/gateway": gateway} | ({"treeline.dev/pool": pool} if pool else {})
    meta = {"name": name, "namespace": "n", "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {**meta, "labels": marks}, **more}


def pool(name: str, version: int, gateway: str | None = None, generation: int = 1, **more: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"model": {"uri": "builtin://tiny"}}
    if gateway:
        spec["gateway"] = {"name": gateway}
    meta = {"name": name, "namespace": "n", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {
        "apiVersion": API_VERSION,
        "kind": "InferencePool",
        "metadata": {**meta, "generation": generation},
        "spec": spec,
        **more,
    }


def ref(name: str) -> Ref:
    return Ref("apps/v1", "Deployment", "n", name)


def heard(store: Store) -> list[Change]:
    changes: list[Change] = []
    store.listeners.append(changes.append)
    return changes


def test_an_object_is_found_by_kind_pool_and_gateway() -> None:
    store = Store()
    store.put(child("d1", 1, pool="p"))
    store.put(child("d2", 2))
    store.put(pool("p", 3))
    store.put(pool("q", 4, "other"))
    assert [o.ref.name for o in store.pool_children("n", "p")] == ["d1"]
    assert [o.ref.name for o in store.gateway_children("n", "g")] == ["d2"]
    assert [o.ref.name for o in store.gateway_pools("n", "treeline")] == ["p"]
    assert store.gateways() == {("n", "g"), ("n", "treeline"), ("n", "other")}
    assert [o.ref.name for o in store.of_kind("apps/v1", "Deployment", "n")] == ["d1", "d2"]


def test_a_pool_that_names_no_gateway_has_the_same_default_everywhere() -> None:
    typed = InferencePool.from_object(pool("p", 1))
    assert membership_of(pool("p", 1)).gateway == typed.spec.gateway.name


def test_managed_fields_are_not_kept() -> None:
    store = Store()
    obj = child("d", 1)
    obj["metadata"]["managedFields"] = [{"manager": "x" * 1000}]
    store.put(obj)
    found = store.get(ref("d"))
    assert found is not None
    assert b"managedFields" not in found.body
    assert "managedFields" in obj["metadata"], "the caller's object is left alone"


def test_a_list_drops_unlisted_objects_but_not_newer_ones_of_ours() -> None:
    store = Store()
    for name, version in (("a", 5), ("b", 6), ("c", 20)):
        store.put(child(name, version))
    store.put(pool("p", 7))
    assert store.retain("apps/v1", "Deployment", "", {"uid-a"}, "10") == 1
    assert [o.ref.name for o in store.of_kind("apps/v1", "Deployment", "n")] == ["a", "c"]
    assert len(store) == 3


def test_objects_of_an_unreadable_kind_come_back() -> None:
    store = Store()
    store.put(child("d", 5))
    changes = heard(store)
    assert store.retain("apps/v1", "Deployment", "n", set(), "") == 1
    assert [c.after for c in changes] == [None]
    assert store.put(child("d", 5))


def test_an_answer_without_notify_is_reported_if_its_spec_is_newer() -> None:
    store = Store()
    store.put(pool("p", 10))
    changes = heard(store)
    assert store.put(pool("p", 11, status={"url": "x"}), notify=False)
    assert changes == []
    assert store.put(pool("p", 13, generation=2), notify=False), "another write was faster than our status"
    assert not store.put(pool("p", 12, generation=2)), "what the watch tells of it is old by then"
    assert len(changes) == 1


def test_a_deleted_object_is_marked_until_the_watch_confirms() -> None:
    store = Store()
    store.put(child("d", 5))
    store.mark_deleting(ref("d"), "uid-d", "2026-11-01T00:00:00Z")
    found = store.get(ref("d"))
    assert found is not None
    assert found.object["metadata"]["deletionTimestamp"] == "2026-11-01T00:00:00Z"
    store.mark_deleting(ref("d"), "another", "x")
    store.mark_deleting(ref("e"), "uid-e", "x")
    assert store.put(child("d", 6))


def keys_of(change: Change, store: Store) -> set[tuple[str, str]]:
    return {(key.kind, key.name) for key in keys_for_change(change, store)}


def test_a_pools_new_spec_concerns_its_gateways_old_and_new() -> None:
    store = Store()
    changes = heard(store)
    store.put(pool("p", 1, "old"))
    store.put(pool("p", 2, "new", generation=2))
    store.put(pool("p", 3, "new", generation=2, status={"replicas": 1}))
    store.remove(Ref(API_VERSION, "InferencePool", "n", "p"), "uid-p", "4")
    assert [keys_of(c, store) for c in changes] == [
        {("pool", "p"), ("gateway", "old"), ("models", "")},
        {("pool", "p"), ("gateway", "old"), ("gateway", "new"), ("models", "")},
        {("pool", "p")},
        {("pool", "p"), ("gateway", "new"), ("models", "")},
    ]


def test_a_child_concerns_its_pool_and_a_gateways_child_all_members() -> None:
    store = Store()
    for name in ("p", "q"):
        store.put(pool(name, 1, "g"))
    changes = heard(store)
    store.put(child("d1", 5, pool="p"))
    store.put(child("d2", 6))
    store.put(child("d1", 7, pool="q"))
    store.put(child("d3", 8, gateway=""))
    store.put({**child("anchor", 9), "apiVersion": "v1", "kind": "ConfigMap"})  # which changes with every pool
    assert [keys_of(c, store) for c in changes] == [
        {("pool", "p")},
        {("gateway", "g"), ("pool", "p"), ("pool", "q")},
        {("pool", "p"), ("pool", "q")},
        set(),
        {("gateway", "g")},
    ]


def test_a_model_concerns_its_namespace_and_the_pools_that_it_names() -> None:
    store = Store()
    changes = heard(store)
    model = {
        "apiVersion": API_VERSION,
        "kind": "InferenceModel",
        "metadata": {"name": "m", "namespace": "n", "uid": "u", "resourceVersion": "1"},
        "spec": {"modelName": "x", "poolRef": {"name": "p"}},
    }
    store.put(model)
    moved = {**model, "spec": {"modelName": "x", "poolRef": {"name": "q"}}}
    store.put({**moved, "metadata": {**model["metadata"], "resourceVersion": "2"}})
    assert keys_for_change(changes[0], store) == {Key("models", "n"), Key("pool", "n", "p")}
    assert keys_for_change(changes[1], store) == {
        Key("models", "n"),
        Key("pool", "n", "p"),
        Key("pool", "n", "q"),
    }


NAMES = ["a", "b", "c"]


class StoreMachine(RuleBasedStateMachine):
    """The watch and the answers to our writes report the same history, each in its own order; the store must
    converge."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.incarnation = 0
        self.cluster: dict[str, dict[str, Any]] = {}
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[dict[str, Any]] = []
        self.hidden: list[dict[str, Any]] = []
        self.late = False
        self.store = Store()

    @rule(name=st.sampled_from(NAMES), pool_name=st.sampled_from(["", "p", "q"]))
    def write(self, name: str, pool_name: str) -> None:
        self.version += 1
        uid = self.cluster[name]["metadata"]["uid"] if name in self.cluster else ""
        if not uid:
            self.incarnation += 1
            uid = f"{name}-{self.incarnation}"
        self.cluster[name] = child(name, self.version, uid=uid, pool=pool_name)
        self.log.append(("MODIFIED", self.cluster[name]))
        self.answers.append(self.cluster[name])

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        if name in self.cluster:
            self.version += 1
            gone = self.cluster.pop(name)
            if gone not in self.hidden:
                last = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self.version)}}
                self.log.append(("DELETED", last))

    @rule(name=st.sampled_from(NAMES))
    def lose_the_label(self, name: str) -> None:
        """A watch by label sees it as a deletion, until a write of ours restores the label."""
        if name in self.cluster and self.cluster[name] not in self.hidden:
            self.version += 1
            self.cluster[name] = {**self.cluster[name], "metadata": {**self.cluster[name]["metadata"]}}
            self.cluster[name]["metadata"]["resourceVersion"] = str(self.version)
            self.hidden.append(self.cluster[name])
            self.log.append(("DELETED", self.cluster[name]))

    def labelled(self) -> list[dict[str, Any]]:
        return [obj for obj in self.cluster.values() if obj not in self.hidden]

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.answers:
            index = data.draw(st.integers(0, len(self.answers) - 1))
            self.store.put(self.answers.pop(index))

    @rule(count=st.integers(1, 5))
    def watch(self, count: int) -> None:
        for kind, obj in self.log[:count]:
            if kind == "DELETED":
                meta = obj["metadata"]
                self.store.remove(ref(meta["name"]), meta["uid"], meta["resourceVersion"])
            else:
                self.store.put(obj)
        del self.log[:count]

    @rule()
    def relist(self) -> None:
        # An answer that is older than the list may still raise what the list dropped: until the next one.
        self.late = self.late or bool(self.answers and any(kind == "DELETED" for kind, _ in self.log))
        for obj in self.labelled():
            self.store.put(obj)
        uids = {obj["metadata"]["uid"] for obj in self.labelled()}
        self.store.retain("apps/v1", "Deployment", "", uids, str(self.version))
        self.log.clear()

    @invariant()
    def maps_agree(self) -> None:
        for place, found in (
            ("p", self.store.pool_children("n", "p")),
            ("q", self.store.pool_children("n", "q")),
        ):
            assert all(o.object["metadata"]["labels"]["treeline.dev/pool"] == place for o in found)
        by_place = sum(len(self.store.pool_children("n", p)) for p in ("p", "q"))
        assert by_place + len(self.store.gateway_children("n", "g")) == len(self.store)

    def teardown(self) -> None:
        for obj in self.answers:
            self.store.put(obj)
        self.watch(len(self.log))
        if self.late:
            self.relist()
        there = {obj["metadata"]["name"]: obj["metadata"]["resourceVersion"] for obj in self.labelled()}
        known = {o.ref.name: o.resource_version for o in self.store.of_kind("apps/v1", "Deployment", "n")}
        assert known == there


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
