"""Plans of pools against a small cluster: they converge, repair, roll, keep and delete the right objects."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pool_world import EVERY_API, HF, NOW, SimCluster, a_pool, is_ready, kinds, settled
from treeline_operator import names
from treeline_operator.actions import Apply, CreateKeys, Mark, Scale
from treeline_operator.api.pool import InferencePool
from treeline_operator.world import PickerEndpoint, PickerView, Platform
from treeline_wire.labels import SERVING

SPECS: dict[str, dict[str, Any]] = {
    "plain": {"replicas": 3},
    "download": {**HF, "replicas": 2},
    "cache": {"model": {"uri": "hf://org/name", "cache": {"size": "1024Mi"}, "size": "1Gi"}},
    "resources": {"engine": {"resources": {"requests": {"cpu": "0.5", "memory": "1024Mi"}, "limits": {"cpu": 2}}}},
    "gpu": {"accelerator": {"type": "nvidia", "count": 2}, "engine": {"type": "sglang", "tensorParallel": 2}},
    "vllm": {**HF, "accelerator": {"type": "nvidia"}, "engine": {"type": "vllm"}},
    "custom": {
        "engine": {"type": "custom", "image": "x:1"},
        "template": {"spec": {"nodeSelector": {"a": "b"}}},
    },
    "routes": {"gateway": {"parentRefs": [{"name": "front"}]}},
    "zero": {"replicas": 0},
}


@pytest.mark.parametrize("name", SPECS)
def test_a_plan_converges(name: str) -> None:
    pool = a_pool(**SPECS[name])
    cluster = SimCluster(Platform(apis=EVERY_API))
    assert cluster.converge(pool) <= 4
    assert cluster.plan(pool).actions == ()
    assert cluster.ready() == pool.spec.replicas


def test_policies_and_claims_come_before_pods() -> None:
    plan = SimCluster().plan(a_pool(model={"uri": "hf://org/name", "cache": {"size": "5Gi"}}))
    assert kinds(plan)[:3] == [
        "Apply NetworkPolicy tiny-pods",
        "Apply NetworkPolicy tiny-download",
        "Apply PersistentVolumeClaim tiny-models",
    ]
    assert kinds(plan)[-1].startswith("Apply Deployment tiny-")


def test_pods_that_need_the_keys_wait_for_them_and_others_do_not() -> None:
    cluster = SimCluster()
    cluster.has_keys = False
    plan = cluster.plan(a_pool())
    assert not any(action.ref.kind == "Deployment" for action in plan.actions)
    assert "Apply Service tiny-pods" in kinds(plan)
    (note,) = plan.notes
    assert "waits until gateway treeline has made its keys" in note
    assert plan.recheck_s is None, "changes of the gateway's children are reported to its pools"
    for engine in ({"type": "custom", "image": "x:1"}, {"type": "vllm"}, {"type": "sglang"}):
        pool = a_pool(engine=engine, accelerator={"type": "nvidia"})
        assert any(action.ref.kind == "Deployment" for action in cluster.plan(pool).actions)
    cluster.has_keys = True
    assert any(action.ref.kind == "Deployment" for action in cluster.plan(a_pool()).actions)


def test_missing_keys_are_made_again_for_a_waiting_pod() -> None:
    cluster = settled(a_pool())
    (pod,) = cluster.pods.values()
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": cluster.now.isoformat()}
    pod["status"]["conditions"] = [placed, {"type": "PodReadyToStartContainers", "status": "False"}]
    cluster.now += timedelta(seconds=29)
    plan = cluster.plan(a_pool())
    assert (plan.actions, plan.recheck_s) == ((), 30.0)
    cluster.now += timedelta(seconds=1)
    (made,) = cluster.plan(a_pool()).actions
    assert isinstance(made, CreateKeys)
    assert made.ref.name == "treeline-kv-keys"
    assert [owner["uid"] for owner in made.object["metadata"]["ownerReferences"]] == ["uid-anchor"]
    vllm = a_pool(engine={"type": "vllm"}, accelerator={"type": "nvidia"})
    assert not any(isinstance(action, CreateKeys) for action in cluster.plan(vllm).actions)


def test_an_admin_key_is_made_before_the_first_pod_and_again_for_one_that_misses_it() -> None:
    spec: dict[str, Any] = {"engine": {"type": "sglang"}, "accelerator": {"type": "nvidia"}}
    cluster = SimCluster()
    made = [type(action).__name__ + " " + action.ref.kind for action in cluster.plan(a_pool(**spec)).actions]
    assert made.index("CreateKeys Secret") < made.index("Apply Deployment")
    cluster.converge(a_pool(**spec))
    other = {**spec, "engine": {"type": "sglang", "contextLength": 512}}
    assert not any(isinstance(action, CreateKeys) for action in cluster.plan(a_pool(**other)).actions), "it is there"

    (pod,) = cluster.pods.values()
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "tiny-admin-key" not found'}
    pod["status"]["containerStatuses"] = [{"name": "runtime", "state": {"waiting": waiting}}]
    (again,) = cluster.plan(a_pool(**spec)).actions
    assert isinstance(again, CreateKeys)
    assert (again.ref.name, again.fresh) == ("tiny-admin-key", "word")
    assert again.object["metadata"]["ownerReferences"][0]["uid"] == "pool-uid"
    waiting["message"] = 'secret "of-their-own" not found'
    assert cluster.plan(a_pool(**spec)).actions == ()


def test_running_pods_stay_while_a_new_revision_waits_for_keys() -> None:
    replace_one = {"strategy": "Replace", "maxUnavailable": 1}
    cluster = settled(a_pool(replicas=2, rollout=replace_one))
    cluster.has_keys = False
    next_one = a_pool(replicas=2, rollout=replace_one, engine={"contextLength": 512})
    assert not any(action.ref.kind == "Deployment" for action in cluster.plan(next_one).actions)
    assert cluster.plan(a_pool(replicas=2, rollout=replace_one)).actions == ()


def test_quantities_and_defaults_written_otherwise_make_no_new_revision() -> None:
    def of(cpu: Any, memory: str) -> InferencePool:
        return a_pool(engine={"resources": {"requests": {"cpu": cpu, "memory": memory}}})

    cluster = settled(of("0.2", "1Gi"))
    for same in (of("200m", "1024Mi"), of(0.2, "1073741824")):
        assert cluster.plan(same).actions == ()
    spelled_out = a_pool(
        engine={"type": "treeline", "port": 8000, "resources": {"requests": {"cpu": "0.2", "memory": "1Gi"}}},
        drain={"timeoutSeconds": 60},
        accelerator={"type": "cpu"},
    )
    assert cluster.plan(spelled_out).actions == ()


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"contextLength": 512}},
        {"drain": {"timeoutSeconds": 30}},
        {"model": {"uri": "builtin://tiny", "name": "other"}},
        {"template": {"spec": {"containers": [{"name": "runtime", "livenessProbe": None}]}}},
        {"gateway": {"name": "other"}},
    ],
)
def test_changed_pod_fields_make_a_new_revision(change: dict[str, Any]) -> None:
    cluster = settled(a_pool())
    assert any(kind.startswith("Apply Deployment") for kind in kinds(cluster.plan(a_pool(**change))))


@pytest.mark.parametrize(
    "change",
    [
        {"rollout": {"strategy": "Replace", "maxUnavailable": 3}},
        {"endpointPicker": {"policy": "random"}},
        {"gateway": {"standalone": {"port": 8080}}},
    ],
)
def test_other_fields_change_no_pod(change: dict[str, Any]) -> None:
    cluster = settled(a_pool())
    assert cluster.plan(a_pool(**change)).actions == ()


def test_scaling_is_a_scale_and_nothing_else() -> None:
    cluster = settled(a_pool(replicas=2))
    (action,) = cluster.plan(a_pool(replicas=5)).actions
    assert isinstance(action, Scale)
    assert (action.replicas, action.why) == (5, "5 replicas wanted")


# ---- rollouts -----------------------------------------------------------------------------------------------


def test_a_revert_reuses_the_old_revision() -> None:
    first, second = a_pool(replicas=2), a_pool(replicas=2, engine={"contextLength": 512})
    cluster = settled(first)
    (before,) = cluster.deployments()
    cluster.converge(second)
    assert before in cluster.deployments()
    kept = copy.deepcopy(cluster.deployments()[before]["spec"]["template"])
    plan = cluster.plan(first)
    assert [type(action) for action in plan.actions] == [Scale]
    cluster.converge(first)
    assert cluster.deployments()[before]["spec"]["template"] == kept
    assert cluster.deployments()[before]["spec"]["replicas"] == 2


def test_history_is_bounded() -> None:
    cluster = settled(a_pool())
    for length in (100, 200, 300, 400):
        cluster.converge(a_pool(engine={"contextLength": length}))
    assert len(cluster.deployments()) == 2


@settings(max_examples=25, deadline=None)
@given(
    story=st.lists(st.sampled_from(["flip", "ready", "ready", "crash", "up", "down"]), max_size=14),
    capacity=st.integers(3, 6),
)
def test_every_random_rollout_keeps_serving_and_converges(story: list[str], capacity: int) -> None:
    """The whole planner over the simulated cluster; `test_pool_rollout` tells many more of these of its core."""
    specs = [a_pool(replicas=3), a_pool(replicas=3, engine={"contextLength": 512})]
    cluster, replicas, wanted = settled(specs[0]), 3, 0
    cluster.capacity = capacity
    for event in story:
        if event == "flip":
            wanted = 1 - wanted
        elif event == "ready":
            cluster.make_ready()
        elif event == "crash" and (name := next((n for n, p in cluster.pods.items() if not is_ready(p)), None)):
            cluster.crash(name)
        elif event in ("up", "down"):
            replicas = 4 if event == "up" else 2
        pool = _with_replicas(specs[wanted], replicas)
        floor = min(cluster.ready(), replicas)
        cluster.do(cluster.plan(pool))
        cluster.controllers()
        assert cluster.ready() >= floor
    cluster.capacity = 100
    for pod in cluster.pods.values():
        pod["status"].pop("containerStatuses", None)
    pool = _with_replicas(specs[wanted], replicas)
    cluster.converge(pool)
    assert cluster.ready() == replicas
    revisions = {pod["metadata"]["labels"][names.REVISION] for pod in cluster.pods.values()}
    assert len(revisions) == 1


def _with_replicas(pool: InferencePool, replicas: int) -> InferencePool:
    return pool.model_copy(update={"spec": pool.spec.model_copy(update={"replicas": replicas})})


def test_old_pods_stay_until_the_picker_knows_the_new_ones() -> None:
    cluster = settled(a_pool())
    changed = a_pool(engine={"contextLength": 512})
    cluster.do(cluster.plan(changed))
    cluster.controllers()
    old, new = sorted(cluster.pods, key=lambda name: int(name.rsplit("-", 1)[1]))
    cluster.make_ready()
    cluster.picker = PickerView(True, {"tiny": (PickerEndpoint(old, "10.0.0.1:8000", ready=True),)})
    plan = cluster.plan(changed)
    assert plan.actions == ()
    assert plan.recheck_s is not None
    assert any("the picker lists 0 of 1 ready pods" in note for note in plan.notes)
    listed = (*cluster.picker.pools["tiny"], PickerEndpoint(new, "10.0.0.2:8000", ready=True))
    cluster.picker = PickerView(True, {"tiny": listed})
    (action,) = cluster.plan(changed).actions
    assert isinstance(action, Mark)
    assert (action.ref.name, action.step) == (old, "drain")


def test_paused_keeps_everything() -> None:
    cluster = settled(a_pool(replicas=2))
    plan = cluster.plan(a_pool(replicas=2, engine={"contextLength": 512}, rollout={"paused": True}))
    assert kinds(plan)[0].startswith("Apply Deployment")
    assert [action.object["spec"]["replicas"] for action in plan.actions if isinstance(action, Apply)] == [0]
    assert any("rollout.paused" in note for note in plan.notes)


@pytest.mark.parametrize("budget", [1, 3, "25%"])
def test_the_disruption_budget_follows_the_spec(budget: int | str) -> None:
    cluster = settled(a_pool(replicas=4, disruptionBudget={"maxUnavailable": budget}))
    assert cluster.get("PodDisruptionBudget", "tiny")["spec"]["maxUnavailable"] == budget


def test_percentages_are_parts_of_the_replicas() -> None:
    for replicas, surge, pods in ((4, "50%", 6), (3, "25%", 4), (10, "100%", 20)):
        cluster = settled(a_pool(replicas=replicas))
        cluster.do(cluster.plan(a_pool(replicas=replicas, engine={"contextLength": 9}, rollout={"maxSurge": surge})))
        assert sum(obj["spec"]["replicas"] for obj in cluster.deployments().values()) == pods
    for replicas, missing, left in ((4, "50%", 2), (3, "25%", 3), (8, "30%", 6)):
        cluster = settled(a_pool(replicas=replicas), capacity=replicas)
        rollout = {"maxUnavailable": missing}
        changed = a_pool(replicas=replicas, engine={"contextLength": 9}, rollout=rollout)
        for _ in range(3):
            cluster.do(cluster.plan(changed))
            cluster.controllers()
        serving = [pod for pod in cluster.pods.values() if pod["metadata"]["labels"][SERVING] == "true"]
        assert sum(map(is_ready, serving)) == left


# ---- drift, other owners, deletion --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "path", "value", "drift"),
    [
        ("Service", "tiny-pods", ("spec", "clusterIP"), "10.0.0.1", "spec.clusterIP"),
        ("NetworkPolicy", "tiny-pods", ("spec", "egress"), [{}], "spec.egress[0].to"),
        ("PodDisruptionBudget", "tiny", ("spec", "maxUnavailable"), 0, "spec.maxUnavailable"),
    ],
)
def test_drift_is_reverted_and_reported(kind: str, name: str, path: tuple[str, str], value: Any, drift: str) -> None:
    cluster = settled(a_pool())
    cluster.get(kind, name)[path[0]][path[1]] = value
    (action,) = cluster.plan(a_pool()).actions
    assert isinstance(action, Apply)
    assert drift in action.drift


def test_manual_replicas_are_reverted() -> None:
    cluster = settled(a_pool(replicas=2))
    next(iter(cluster.deployments().values()))["spec"]["replicas"] = 9
    (action,) = cluster.plan(a_pool(replicas=2)).actions
    assert isinstance(action, Scale)


def test_an_object_of_another_owner_is_left_alone() -> None:
    cluster = settled(a_pool())
    service = cluster.get("Service", "tiny-pods")
    service["metadata"]["ownerReferences"][0].update(uid="somebody", name="theirs")
    service["spec"]["ports"] = []
    plan = cluster.plan(a_pool())
    assert plan.actions == ()
    assert any("Service tiny-pods belongs to InferencePool theirs" in note for note in plan.notes)


def test_an_object_that_is_being_deleted_is_waited_for() -> None:
    cluster = settled(a_pool())
    cluster.get("Service", "tiny-pods")["metadata"]["deletionTimestamp"] = NOW.isoformat()
    plan = cluster.plan(a_pool())
    assert plan.actions == ()
    assert any("is being deleted" in note for note in plan.notes)


def test_a_pool_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    pool = a_pool(**HF, replicas=2)
    cluster = settled(pool)
    going = a_pool(**HF, replicas=2, metadata={"deletionTimestamp": NOW.isoformat()})
    assert cluster.plan(going).actions == ()
    # Everything goes with it: each child has the pool as its controller.
    for obj in cluster.objects.values():
        (owner,) = obj["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == ("pool-uid", True)


def test_unwanted_objects_are_deleted_but_downloads_are_kept() -> None:
    parents = {"parentRefs": [{"name": "front"}]}
    cached = {"uri": "hf://org/name", "cache": {"size": "5Gi"}}
    cluster = settled(a_pool(gateway=parents, model=cached), platform=Platform(apis=EVERY_API))
    plan = cluster.plan(a_pool(model={"uri": "hf://org/name"}))
    assert [k for k in kinds(plan) if "Delete" in k] == ["Delete HTTPRoute tiny", "Delete InferencePool tiny-gie"]
    cluster.converge(a_pool())
    assert cluster.get("PersistentVolumeClaim", "tiny-models")
