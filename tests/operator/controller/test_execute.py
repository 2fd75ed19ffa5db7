from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

import pytest
from treeline_kube.errors import (
    AlreadyExists,
    Cause,
    Conflict,
    Forbidden,
    Invalid,
    KubeError,
    LostLease,
    NotFound,
    Unavailable,
)
from treeline_operator.actions import Action, Apply, CreateKeys, Delete, Mark, Plan, Scale
from treeline_operator.api.conditions import Reason
from treeline_operator.controller.execute import Done, Executor, with_keys
from treeline_operator.controller.store import Store
from treeline_operator.world import Ref
from treeline_wire.security import CurveKeys

OURS = {"app.kubernetes.io/managed-by": "treeline", "treeline.dev/pool": "p"}
OWNER = [{"kind": "InferencePool", "name": "p", "uid": "pool", "controller": True}]


def obj(name: str, kind: str = "Service", **meta: Any) -> dict[str, Any]:
    version = {"Deployment": "apps/v1"}.get(kind, "v1")
    own = {"name": name, "namespace": "n", "labels": OURS, "ownerReferences": OWNER}
    return {"apiVersion": version, "kind": kind, "metadata": {**own, **meta}}


class Server:
    """An API server that records its calls; ``faults`` are raised instead, by verb and name."""

    def __init__(self, *there: dict[str, Any], **faults: KubeError) -> None:
        self.there = {(o["kind"], o["metadata"]["name"]): o for o in there}
        self.faults = faults
        self.calls: list[str] = []
        self.version = 100

    def _called(self, verb: str, name: str) -> None:
        self.calls.append(f"{verb} {name}")
        if (fault := self.faults.get(f"{verb}_{name}")) is not None:
            raise fault

    def _kept(self, thing: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        meta = {
            "uid": f"u-{thing['metadata']['name']}",
            **thing["metadata"],
            "resourceVersion": str(self.version),
        }
        return {**thing, "metadata": meta}

    async def apply(self, thing: dict[str, Any]) -> dict[str, Any]:
        self._called("apply", thing["metadata"]["name"])
        return self._kept(thing)

    async def create(self, thing: dict[str, Any]) -> dict[str, Any]:
        self._called("create", thing["metadata"]["name"])
        return self._kept(thing)

    async def replace_spec(self, ref: Ref, resource_version: str, spec: dict[str, Any]) -> dict[str, Any]:
        self._called("replace", ref.name)
        return self._kept({**obj(ref.name, ref.kind), "spec": spec})

    async def scale(self, ref: Ref, uid: str, replicas: int) -> dict[str, Any]:
        self._called("scale", ref.name)
        return self._kept({**obj(ref.name, ref.kind), "spec": {"replicas": replicas}})

    async def delete(self, ref: Ref, *, uid: str) -> None:
        self._called("delete", ref.name)

    async def get(self, ref: Ref) -> dict[str, Any]:
        self._called("get", ref.name)
        if (ref.kind, ref.name) not in self.there:
            raise NotFound("404", code=404)
        return self._kept(self.there[ref.kind, ref.name])


def seen(store: Store, name: str, kind: str = "Service") -> Ref:
    """Return an object as observed before."""
    thing = obj(name, kind)
    store.put({**thing, "metadata": {**thing["metadata"], "uid": f"u-{name}", "resourceVersion": "5"}})
    return Ref(thing["apiVersion"], kind, "n", name)


async def execute(server: Server, store: Store, *actions: Action) -> Done:
    executor = Executor(server, store, lambda: datetime(2026, 11, 1, tzinfo=UTC))
    return await executor.execute(Plan(actions))


async def test_answers_are_stored_at_once_and_reported_by_reason() -> None:
    store = Store()
    ref = seen(store, "old")
    runtime = seen(store, "d", "Deployment")
    done = await execute(
        Server(),
        store,
        Apply(obj("new"), "because"),
        Apply(obj("old"), "because"),
        Scale(runtime, "u-d", 3, "because"),
        Delete(ref, "u-old", "because"),
    )
    assert done.written == {
        Reason.CREATED: ["Service new"],
        Reason.APPLIED: ["Service old"],
        Reason.SCALED: ["Deployment d to 3"],
        Reason.DELETED: ["Service old"],
    }
    scaled, deleted = store.get(runtime), store.get(ref)
    assert scaled is not None
    assert scaled.object["spec"]["replicas"] == 3
    assert deleted is not None
    assert deleted.object["metadata"]["deletionTimestamp"] == "2026-11-01T00:00:00Z"


async def test_drift_is_distinguished_from_a_changed_spec() -> None:
    store = Store()
    ref = seen(store, "s")
    done = await execute(Server(), store, Apply(obj("s"), "because", drift=("spec.ports[80]",)))
    assert done.drifted == [(ref, ("spec.ports[80]",))]
    assert not done.written


async def test_a_namespace_being_deleted_ends_all_attempts() -> None:
    going = Cause("", "NamespaceTerminating", "namespace n is being terminated")
    server = Server(apply_bad=Forbidden("403: no", code=403, causes=(going,)))
    done = await execute(server, Store(), Apply(obj("bad"), ""), Apply(obj("good"), ""))
    assert [call for call in server.calls if not call.startswith("get")] == ["apply bad"]
    assert (done.refused, done.stale) == ([], False)


@pytest.mark.parametrize("fault", [Invalid("422: no", code=422), Forbidden("403: no", code=403)])
async def test_after_a_refusal_others_are_applied_but_nothing_is_scaled_or_deleted(fault: KubeError) -> None:
    store = Store()
    ref = seen(store, "old")
    runtime = seen(store, "d", "Deployment")
    server = Server(apply_bad=fault)
    actions = [
        Apply(obj("bad"), ""),
        Scale(runtime, "u-d", 0, ""),
        Apply(obj("good"), ""),
        Delete(ref, "u-old", ""),
    ]
    done = await execute(server, store, *actions)
    assert [call for call in server.calls if not call.startswith("get")] == ["apply bad", "apply good"]
    assert [(refused.name, exc) for refused, exc in done.refused] == [("bad", fault)]
    assert not done.stale


def service(**changes: Any) -> dict[str, Any]:
    return {**obj("s"), "spec": {"selector": {}, "ports": [{"name": "http", "port": 80}], **changes}}


def seen_service() -> Store:
    """Return a Service whose port was changed by another owner."""
    store, moved = Store(), service(ports=[{"name": "http", "port": 81, "nodePort": 30000}])
    store.put({**moved, "metadata": {**moved["metadata"], "uid": "u-s", "resourceVersion": "5"}})
    return store


async def test_additions_are_cleared_before_the_apply() -> None:
    server = Server()
    done = await execute(server, seen_service(), Apply(service(), "", ("spec.ports",), clears=True))
    assert server.calls == ["replace s", "apply s"]
    assert done.drifted
    assert not done.refused


async def test_an_apply_refused_for_foreign_additions_clears_them() -> None:
    """A second port of the same name is refused permanently."""
    first = Invalid("422: duplicate value", code=422)

    class Refusing(Server):
        async def apply(self, thing: dict[str, Any]) -> dict[str, Any]:
            if not any(call.startswith("replace") for call in self.calls):
                self.calls.append("refused s")
                raise first
            return await super().apply(thing)

    server = Refusing()
    assert not (await execute(server, seen_service(), Apply(service(), ""))).refused
    assert server.calls == ["refused s", "replace s", "apply s"]
    # An invalid object is reported in the words of the first refusal.
    hopeless = Server(apply_s=first, replace_s=Invalid("422: also", code=422))
    done = await execute(hopeless, seen_service(), Apply(service(), ""))
    assert [exc for _, exc in done.refused] == [first]


async def test_a_broken_webhook_for_one_kind_does_not_block_others() -> None:
    server = Server(apply_bad=Unavailable("500: failed calling webhook", code=500))
    done = await execute(server, Store(), Apply(obj("bad"), ""), Apply(obj("good"), ""))
    assert [call for call in server.calls if call.startswith("apply")] == ["apply bad", "apply good"]
    assert [ref.name for ref, _ in done.refused] == ["bad"]


def mark(name: str, step: Any, **told: Any) -> Mark:
    return Mark(Ref("v1", "Pod", "n", name), f"u-{name}", {}, {}, "", step, **told)


async def test_pods_that_drain_return_or_are_cut_off_are_reported() -> None:
    actions = [
        mark("a", "drain", in_flight=3),
        mark("b", "drain"),
        mark("c", "return"),
        mark("d", "release", in_flight=0),
        mark("e", "release", in_flight=2, cut_off=True),
    ]
    server = Server()
    done = await execute(server, Store(), *actions)
    assert done.written == {
        Reason.DRAINING: ["Pod a (3 in flight)", "Pod b"],
        Reason.DRAIN_CANCELLED: ["Pod c"],
        Reason.DRAIN_TIMEOUT: ["Pod e (2 in flight)"],
    }
    assert server.calls == [f"apply {name}" for name in "abcde"], "nothing is read"


async def test_after_a_refusal_pods_return_but_none_leaves() -> None:
    server = Server(apply_bad=Invalid("422: no", code=422))
    actions = [Apply(obj("bad"), ""), mark("a", "drain"), mark("b", "release"), mark("c", "return")]
    await execute(server, Store(), *actions)
    assert [call for call in server.calls if not call.startswith("get")] == ["apply bad", "apply c"]


async def test_a_deleted_pod_stops_scaling_without_a_read() -> None:
    store = Store()
    pod, runtime = seen(store, "p", "Pod"), seen(store, "d", "Deployment")
    server = Server(apply_p=Conflict("409", code=409))
    done = await execute(server, store, mark("p", "release"), Scale(runtime, "u-d", 1, ""))
    assert done.stale
    assert server.calls == ["apply p"]
    assert store.get(pod) is None


async def test_an_object_of_another_owner_is_never_taken_over() -> None:
    foreign = {**obj("s"), "metadata": {"name": "s", "namespace": "n", "labels": {"app": "mine"}}}
    server = Server(foreign)
    done = await execute(server, Store(), Apply(obj("s"), ""))
    assert server.calls == ["get s"]
    assert "exists and is not the operator's" in str(done.refused[0][1])


@pytest.mark.parametrize("meta", [{"labels": {}}, {"ownerReferences": []}])
async def test_an_unseen_object_of_ours_is_applied(meta: dict[str, Any]) -> None:
    server = Server(obj("s", **meta))
    done = await execute(server, Store(), Apply(obj("s"), ""))
    assert server.calls == ["get s", "apply s"]
    assert not done.refused


@pytest.mark.parametrize(("owners", "is_ours"), [(["pool", "other"], True), (["other"], False)])
async def test_shared_objects_without_label_are_recognised_by_owner(owners: list[str], is_ours: bool) -> None:
    """A gateway's anchor has several owners and no controller."""

    def shared(*uids: str) -> list[dict[str, Any]]:
        return [{"kind": "InferencePool", "name": uid, "uid": uid} for uid in uids]

    server = Server(obj("s", "ConfigMap", labels={}, ownerReferences=shared(*owners)))
    done = await execute(server, Store(), Apply(obj("s", "ConfigMap", ownerReferences=shared("pool")), ""))
    assert bool(done.refused) is not is_ours
    assert server.calls == (["get s", "apply s"] if is_ours else ["get s"])


async def test_an_object_merely_held_by_our_owner_is_not_ours() -> None:
    held = [{"kind": "InferencePool", "name": "p", "uid": "pool"}]
    server = Server(obj("s", labels={}, ownerReferences=held))
    assert (await execute(server, Store(), Apply(obj("s"), ""))).refused


async def test_unexpected_objects_are_read_and_planned_again() -> None:
    store = Store()
    gone, other = seen(store, "gone"), seen(store, "other")
    there = obj("other", uid="another")
    server = Server(there, delete_gone=NotFound("404", code=404), delete_other=Conflict("409", code=409))
    done = await execute(server, store, Delete(gone, "u-gone", ""))
    assert done.stale
    assert store.get(gone) is None
    done = await execute(server, store, Delete(other, "u-other", ""))
    assert done.stale
    found = store.get(other)
    assert found is not None
    assert found.uid == "another"


@pytest.mark.parametrize("fault", [Unavailable("503", code=503), LostLease("too late")])
async def test_unfixable_errors_end_the_execution(fault: KubeError) -> None:
    server = Server(apply_a=fault)
    with pytest.raises(type(fault)):
        await execute(server, Store(), Apply(obj("a"), ""), Apply(obj("b"), ""))
    assert "apply b" not in server.calls


async def test_keys_are_made_once_and_never_read() -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "k", "namespace": "n"}}
    server = Server(create_k=AlreadyExists("409", code=409))
    done = await execute(server, Store(), CreateKeys(secret, "keys"))
    assert server.calls == ["create k"]
    assert done == Done()


def test_the_created_keys_are_those_that_pods_mount(tmp_path: Any) -> None:
    made = with_keys(CreateKeys({"kind": "Secret", "metadata": {}}, ""))
    for name, value in made["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(value))
        (tmp_path / name).chmod(0o600)
    assert CurveKeys.load(tmp_path).public + b"\n" == base64.b64decode(made["data"]["public.key"])
    assert with_keys(CreateKeys({}, ""))["data"] != made["data"]


def test_an_admin_key_is_one_random_word() -> None:
    made = [with_keys(CreateKeys({}, "", fresh="word"))["data"] for _ in range(2)]
    words = [base64.b64decode(data.pop("key")) for data in made]
    assert made == [{}, {}]
    assert words[0] != words[1]
    assert all(len(word) == 64 and word.isalnum() for word in words), "it stands in a command line and in a header"
