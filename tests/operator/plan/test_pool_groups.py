"""Replicas of several pods: a LeaderWorkerSet for each revision, of which only the leaders serve."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from support.api_specs import document
from support.pool_world import EVERY_API, SimCluster, a_pool, grouped, is_ready, kinds, settled, template
from treeline_operator.actions import Apply, Mark, Scale
from treeline_operator.api.conditions import ConditionType, Reason
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.rules import violations
from treeline_operator.plan.drain import SETTLE_S
from treeline_operator.plan.runtime import template_overruled
from treeline_operator.status.pool import pool_status
from treeline_operator.world import Event, Platform
from treeline_runtime.args import MAX_RANKS
from treeline_wire.labels import GROUP_INDEX, POOL, SERVING, WORKER_INDEX
from treeline_wire.ports import RANKS

PLATFORM = Platform(apis=EVERY_API)
GPUS = {"type": "nvidia", "count": 2, "nodes": 2}
SERVES = {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}


def cluster_of(replicas: int) -> SimCluster:
    return settled(grouped(replicas), platform=PLATFORM)


def group_set(cluster: SimCluster) -> dict[str, Any]:
    (found,) = cluster.groups().values()
    return found


def engine(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = (container for container in pod["spec"]["containers"] if container["name"] == "runtime")
    return dict(found)


def test_a_group_is_one_template_of_which_the_leader_alone_serves() -> None:
    spec = group_set(settled(a_pool(accelerator=GPUS), platform=PLATFORM))["spec"]
    parts = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], parts["size"], parts["restartPolicy"]) == (1, 2, "RecreateGroupOnPodRestart")
    leader, worker = engine(parts["leaderTemplate"]), engine(parts["workerTemplate"])
    assert {*leader} - {*worker} == SERVES
    assert worker == {name: value for name, value in leader.items() if name not in SERVES}
    assert "--tp-size=4" in worker["args"]
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert SERVING not in parts["workerTemplate"]["metadata"]["labels"]
    assert {m["mountPath"] for m in worker["volumeMounts"]} >= {"/dev/shm"}
    grace = "terminationGracePeriodSeconds"
    assert parts["leaderTemplate"]["spec"][grace] == parts["workerTemplate"]["spec"][grace]


@pytest.mark.parametrize(
    ("tensor_parallel", "flags"),
    [
        (None, ["--tp-size=16"]),
        (16, ["--tp-size=16"]),
        (8, ["--tp-size=8", "--pp-size=2"]),
        (4, ["--tp-size=4", "--pp-size=4"]),
    ],
)
def test_devices_beyond_tensor_parallel_are_stages(tensor_parallel: int | None, flags: list[str]) -> None:
    gpus = {"type": "nvidia", "count": 4, "nodes": 4}
    pool = a_pool(accelerator=gpus, engine={} if tensor_parallel is None else {"tensorParallel": tensor_parallel})
    assert not [*violations(pool)]
    args = engine(group_set(settled(pool, platform=PLATFORM))["spec"]["leaderWorkerTemplate"]["leaderTemplate"])["args"]
    assert [arg for arg in args if arg.startswith(("--tp-size", "--pp-size"))] == flags
    assert pool.spec.unused_devices == 0


@pytest.mark.parametrize(
    ("devices", "engine", "said"),
    [
        (GPUS, {"args": ["--pp-size=2"]}, "remove --pp-size from args"),
        (GPUS, {"args": ["--pp-size", "2"]}, "remove --pp-size from args"),
        (GPUS, {"port": RANKS}, f"the pods of a replica meet at port {RANKS}"),
        ({**GPUS, "count": 8, "nodes": 9}, {}, f"a replica has at most {MAX_RANKS} devices"),
        ({**GPUS, "count": 8, "nodes": 8}, {}, None),
        ({**GPUS, "nodes": 1}, {"port": RANKS, "args": ["--pp-size=2"]}, None),
    ],
)
def test_what_the_ranks_of_a_group_cannot_have_is_refused_by_name(
    devices: dict[str, Any], engine: dict[str, Any], said: str | None
) -> None:
    asked = json.dumps({"accelerator": devices, "engine": engine})
    told = [*violations(InferencePool.from_object(document("InferencePool", asked)))]
    assert len(told) == (said is not None)
    assert all(str(said) in text for text in told)


def test_the_fragment_of_a_user_reaches_leader_and_workers() -> None:
    own = {
        "name": "runtime",
        "env": [{"name": "NCCL_SOCKET_IFNAME", "value": "eth1"}],
        "livenessProbe": {"periodSeconds": 3},
    }
    near = {"nodeAffinity": {}}
    pool = grouped(template={"spec": {"affinity": near, "containers": [own]}})
    parts = group_set(settled(pool, platform=PLATFORM))["spec"]["leaderWorkerTemplate"]
    for part in ("leaderTemplate", "workerTemplate"):
        assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth1"} in engine(parts[part])["env"]
        assert parts[part]["spec"]["affinity"] == near
    assert "livenessProbe" not in engine(parts["workerTemplate"])


def test_only_leaders_are_selected_to_serve_and_all_pods_are_protected() -> None:
    cluster = cluster_of(2)
    service = cluster.get("Service", "tiny-pods")["spec"]["selector"]
    mirrored = {POOL: "tiny", SERVING: "true"}
    budget = cluster.get("PodDisruptionBudget", "tiny")["spec"]["selector"]["matchLabels"]
    policy = cluster.get("NetworkPolicy", "tiny-pods")["spec"]["podSelector"]["matchLabels"]
    leaders = {f"{group_set(cluster)['metadata']['name']}-{group}" for group in (0, 1)}

    def selected(labels: dict[str, str]) -> set[str]:
        return {name for name, pod in cluster.pods.items() if labels.items() <= pod["metadata"]["labels"].items()}

    assert selected(service) == selected(mirrored) == leaders
    assert selected(budget) == selected(policy) == {*cluster.pods}
    assert len(cluster.pods) == 4


@pytest.mark.parametrize(("asked", "allowed"), [(1, 1), ("50%", 2), ("10%", 1)])
def test_a_share_of_evictions_counts_groups(asked: int | str, allowed: int) -> None:
    cluster = SimCluster(PLATFORM)
    cluster.do(cluster.plan(grouped(4, disruptionBudget={"maxUnavailable": asked})))
    assert cluster.get("PodDisruptionBudget", "tiny")["spec"]["maxUnavailable"] == allowed


def test_the_pods_of_a_pool_reach_each_other_on_every_port_and_nobody_else_does() -> None:
    policy = cluster_of(1).get("NetworkPolicy", "tiny-pods")["spec"]
    (from_pods,) = (rule for rule in policy["ingress"] if "ports" not in rule)
    assert from_pods["from"] == [{"podSelector": policy["podSelector"]}]
    assert {"to": from_pods["from"]} in policy["egress"]
    single = settled(a_pool()).get("NetworkPolicy", "tiny-pods")["spec"]
    assert all("ports" in rule for rule in single["ingress"])


def test_groups_that_still_serve_keep_their_network_when_a_replica_becomes_one_pod() -> None:
    cluster, single = cluster_of(1), a_pool()

    def is_open() -> bool:
        return any("ports" not in rule for rule in cluster.get("NetworkPolicy", "tiny-pods")["spec"]["ingress"])

    opened = []
    for _ in range(20):
        plan = cluster.plan(single)
        cluster.do(plan)
        opened.append((is_open(), any(WORKER_INDEX in pod["metadata"]["labels"] for pod in cluster.pods.values())))
        cluster.controllers()
        cluster.make_ready()
        cluster.now += timedelta(seconds=plan.recheck_s or 0)
    assert all(is_open for is_open, has_groups in opened if has_groups)
    assert opened[-1] == (False, False)


def later(cluster: SimCluster, seconds: float) -> None:
    cluster.now += timedelta(seconds=seconds)
    cluster.look()


def act(cluster: SimCluster, pool: InferencePool) -> list[str]:
    """Do the next plan; return its marks and numbers, with the groups' own numbers for their leaders."""
    plan, found = cluster.plan(pool), []
    for action in plan.actions:
        if isinstance(action, Mark):
            found.append(f"{action.step} {action.ref.name.rpartition('-')[2]}")
        elif isinstance(action, Scale):
            found.append(f"scale to {action.replicas}")
    cluster.do(plan)
    cluster.controllers()
    return found


def groups(cluster: SimCluster) -> set[str]:
    return {pod["metadata"]["labels"][GROUP_INDEX] for pod in cluster.pods.values()}


def test_groups_leave_from_the_highest_number_down_each_when_it_has_no_requests() -> None:
    cluster = cluster_of(3)
    name, one = group_set(cluster)["metadata"]["name"], grouped(1)
    cluster.streams = {f"{name}-0": 0, f"{name}-1": 0, f"{name}-2": 1}
    cluster.look()
    assert act(cluster, one) == ["drain 2", "drain 1"], "LeaderWorkerSet would end group 2 first, whatever it does"
    later(cluster, SETTLE_S)
    assert act(cluster, one) == [], "group 1 has no requests, but it cannot end before group 2"
    cluster.streams = {}
    later(cluster, SETTLE_S)
    assert act(cluster, one) == ["release 2", "release 1"]
    assert groups(cluster) == {"0", "1", "2"}
    assert act(cluster, one) == ["scale to 1"]
    assert groups(cluster) == {"0"}
    assert cluster.plan(one).actions == ()


def test_a_group_that_has_no_leader_now_does_not_cost_another_one_its_streams() -> None:
    cluster = cluster_of(3)
    name = group_set(cluster)["metadata"]["name"]
    del cluster.pods[f"{name}-0"]  # its group is being made again
    cluster.streams = {f"{name}-1": 1, f"{name}-2": 1}
    cluster.look()
    assert act(cluster, grouped(2)) == [], "two leaders are left and two wanted, but group 2 is the one that would end"
    cluster.make_ready(f"{name}-0")
    cluster.look()
    assert act(cluster, grouped(2)) == ["drain 2"]
    later(cluster, SETTLE_S)
    assert act(cluster, grouped(2)) == []
    assert group_set(cluster)["spec"]["replicas"] == 3


def test_a_group_returns_when_it_is_wanted_again() -> None:
    cluster = cluster_of(2)
    cluster.look()
    assert act(cluster, grouped(1)) == ["drain 1"]
    assert act(cluster, grouped(2)) == ["return 1"]


def broken(cluster: SimCluster, group: int) -> str:
    """Let the leader of a group crash; return its name."""
    name = f"{group_set(cluster)['metadata']['name']}-{group}"
    cluster.crash(name)
    cluster.look()
    return name


def test_groups_that_serve_stay_while_a_lower_one_is_broken() -> None:
    cluster = cluster_of(3)
    leader = broken(cluster, 0)
    assert act(cluster, grouped(1)) == ["drain 2"], "group 1 is the first that serves"
    assert any("2 groups stay, not 1" in note for note in cluster.plan(grouped(1)).notes)
    later(cluster, SETTLE_S)
    act(cluster, grouped(1))
    assert act(cluster, grouped(1)) == ["scale to 2"]
    assert cluster.plan(grouped(1)).actions == ()
    cluster.make_ready(leader)
    cluster.look()
    assert act(cluster, grouped(1)) == ["drain 1"], "group 0 serves again"


def test_a_group_that_drains_returns_when_a_lower_one_breaks() -> None:
    cluster = cluster_of(2)
    cluster.look()
    assert act(cluster, grouped(1)) == ["drain 1"]
    broken(cluster, 0)
    assert act(cluster, grouped(1)) == ["return 1"]


def test_no_groups_stay_for_broken_ones_of_a_pool_scaled_to_zero() -> None:
    cluster = cluster_of(2)
    broken(cluster, 0)
    assert act(cluster, grouped(0)) == ["drain 1", "drain 0"]


def test_a_broken_group_below_others_costs_none_of_them_before_new_ones_are_ready() -> None:
    cluster, changed = cluster_of(3), grouped(3, drain={"timeoutSeconds": 5})
    dead, ready = broken(cluster, 0), []
    cluster.picker, cluster.silent_since = None, cluster.now
    for _ in range(60):
        plan = cluster.plan(changed)
        cluster.do(plan)
        cluster.controllers()
        serving = [p for p in cluster.pods.values() if p["metadata"]["labels"].get(SERVING) == "true"]
        ready.append(sum(is_ready(pod) for pod in serving))
        for name in {*cluster.pods} - {dead}:
            cluster.make_ready(name)
        cluster.now += timedelta(seconds=plan.recheck_s or 0)
    assert min(ready) >= 2, "as many as served before"
    assert cluster.plan(changed).actions == ()
    assert ready[-1] == 3


def test_a_rollout_replaces_whole_groups_and_a_deployment_by_groups() -> None:
    cluster = settled(a_pool(replicas=2), platform=PLATFORM)
    assert not cluster.groups()
    for pool in (grouped(2), grouped(2, drain={"timeoutSeconds": 5}), a_pool(replicas=2)):
        ready = []
        for _ in range(60):
            plan = cluster.plan(pool)
            cluster.do(plan)
            cluster.controllers()
            serving = [p for p in cluster.pods.values() if p["metadata"]["labels"].get(SERVING) == "true"]
            ready.append(sum(is_ready(pod) for pod in serving))
            cluster.make_ready()
            cluster.now += timedelta(seconds=plan.recheck_s or 0)
        assert min(ready) >= 2, "as many replicas serve as before, at every step"
        assert cluster.plan(pool).actions == ()
        assert len(cluster.pods) == 2 * pool.spec.accelerator.nodes


def test_a_worker_without_a_node_holds_its_group_back_and_its_cause_is_told() -> None:
    cluster = SimCluster(PLATFORM, capacity=3)
    pool = grouped(2)
    for _ in range(3):
        cluster.do(cluster.plan(pool))
        cluster.controllers()
    for name in [name for name, pod in cluster.pods.items() if pod["metadata"]["labels"][GROUP_INDEX] == "0"]:
        cluster.make_ready(name)
    status = pool_status(cluster.world(pool))
    assert (status["replicas"], status["replicaSummary"]) == (2, "1/2")
    (told,) = (one for one in status["conditions"] if one["type"] == ConditionType.WORKLOADS_READY)
    assert told["reason"] == Reason.INSUFFICIENT_CAPACITY
    (lost,) = (name for name, pod in cluster.pods.items() if "nodeName" not in pod["spec"])
    assert cluster.pods[lost]["metadata"]["labels"][WORKER_INDEX] == "1"
    assert lost in told["message"]


def test_a_ready_group_is_one_ready_replica() -> None:
    cluster = cluster_of(2)
    cluster.look()
    status = pool_status(cluster.world(grouped(2)))
    assert (status["replicas"], status["readyReplicas"], status["replicaSummary"]) == (2, 2, "2/2")
    (told,) = (one for one in status["conditions"] if one["type"] == ConditionType.WORKLOADS_READY)
    assert (told["status"], told["reason"]) == ("True", Reason.PODS_READY)


def test_without_the_api_the_pool_says_what_to_install_and_its_pods_stay() -> None:
    cluster = settled(a_pool(), platform=Platform())
    running = {*cluster.pods}
    plan = cluster.plan(grouped())
    assert not [kind for kind in kinds(plan) if "Deployment" in kind or "LeaderWorkerSet" in kind]
    assert any("the cluster does not have leaderworkerset.x-k8s.io/v1/LeaderWorkerSet" in note for note in plan.notes)
    status = pool_status(cluster.world(grouped()))
    (told,) = (one for one in status["conditions"] if one["type"] == ConditionType.WORKLOADS_READY)
    assert told["reason"] == Reason.LEADER_WORKER_SET_MISSING
    assert "Install LeaderWorkerSet" in told["message"]
    cluster.converge(a_pool())
    assert {*cluster.pods} == running


def test_groups_stay_while_discovery_misses_their_api() -> None:
    cluster = cluster_of(1)
    cluster.platform = replace(PLATFORM, apis=frozenset())
    assert [action for action in cluster.plan(grouped()).actions if action.ref.kind == "LeaderWorkerSet"] == []


def test_a_hand_edit_of_a_group_is_undone() -> None:
    cluster = cluster_of(1)
    group_set(cluster)["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "None"
    (repair,) = cluster.plan(grouped()).actions
    assert isinstance(repair, Apply)
    assert repair.drift == ("spec.leaderWorkerTemplate.restartPolicy",)


@pytest.mark.parametrize(
    ("devices", "parallel", "flags"),
    [
        ({"type": "nvidia", "count": 4}, {"dataParallel": 4}, {"--dp-size": "4"}),
        ({"type": "nvidia", "count": 4}, {"dataParallel": 2}, {"--dp-size": "2", "--tp-size": "2"}),
        ({}, {"dataParallel": 2}, {"--dp-size": "2"}),
        (GPUS, {}, {"--tp-size": "4"}),
        ({"nodes": 2}, {"tensorParallel": 4}, {"--tp-size": "4"}),
    ],
)
def test_our_engine_is_told_how_its_ranks_share_the_devices(
    devices: dict[str, Any], parallel: dict[str, int], flags: dict[str, str]
) -> None:
    (ours,) = template(accelerator=devices, engine=parallel)["spec"]["containers"]
    given = dict(arg.split("=") for arg in ours["args"] if arg.startswith(("--tp-size", "--dp-size")))
    assert given == flags
    ports = [port["name"] for port in ours["ports"] if port["name"].startswith("kv-events")]
    assert len(ports) == parallel.get("dataParallel", 1)


@pytest.mark.parametrize(("nodes", "length", "fits"), [(1, 40, True), (2, 37, True), (2, 38, False)])
def test_names_of_groups_fit_the_stateful_sets_made_for_them(nodes: int, length: int, fits: bool) -> None:
    pool = InferencePool.from_object(
        {
            "apiVersion": "treeline.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": "p" * length, "namespace": "default"},
            "spec": {"model": {"uri": "builtin://tiny"}, "accelerator": {"type": "nvidia", "nodes": nodes}},
        },
        strict=True,
    )
    assert [said.partition(":")[0] for said in violations(pool)] == ([] if fits else ["metadata.name"])


def test_workers_that_a_quota_refuses_are_told_while_they_are_missing() -> None:
    cluster = SimCluster(PLATFORM)
    cluster.do(cluster.plan(grouped()))
    cluster.controllers()
    name = group_set(cluster)["metadata"]["name"]
    worker = cluster.pods.pop(f"{name}-0-1")
    said = (
        f'create Pod {name}-0-1 in StatefulSet {name}-0 failed error: pods "{name}-0-1" is forbidden: exceeded quota: q'
    )
    refused = Event("FailedCreate", said, "2026-11-01T00:00:00Z", f"{name}-0", "")

    def reason() -> str:
        status = pool_status(replace(cluster.world(grouped()), events=(refused,)))
        (told,) = (one for one in status["conditions"] if one["type"] == ConditionType.WORKLOADS_READY)
        return str(told["reason"])

    assert reason() == Reason.QUOTA_EXCEEDED
    cluster.pods[f"{name}-0-1"] = worker
    assert reason() != Reason.QUOTA_EXCEEDED


@pytest.mark.parametrize("forged", ["first", "²", "-1"])
def test_a_forged_number_of_a_group_stops_no_plan_and_hides_no_pod(forged: str) -> None:
    cluster = cluster_of(1)
    leader = cluster.pods[f"{group_set(cluster)['metadata']['name']}-0"]
    leader["metadata"]["labels"][GROUP_INDEX] = forged
    assert cluster.plan(grouped(1)).actions == ()
    single = settled(a_pool(replicas=2), platform=PLATFORM)
    for pod in single.pods.values():
        pod["metadata"]["labels"][WORKER_INDEX] = "1"
    assert pool_status(single.world(a_pool(replicas=2)))["replicaSummary"] == "2/2"
    single.converge(a_pool(replicas=1))
    assert len(single.pods) == 1


def test_the_labels_and_annotations_of_groups_are_not_the_users() -> None:
    given = {WORKER_INDEX: "1", "team": "x"}
    pool = a_pool(template={"metadata": {"labels": given, "annotations": given}})
    made = template(template=pool.spec.template)["metadata"]
    for kind in ("labels", "annotations"):
        assert made[kind]["team"] == "x"
        assert WORKER_INDEX not in made[kind]
    told = template_overruled(pool)
    assert len(told) == 2
    assert all(WORKER_INDEX in path for path in told)


def test_a_claim_that_one_node_can_mount_is_no_claim_for_a_group() -> None:
    cached = {"uri": "hf://org/name", "cache": {"size": "5Gi"}}
    (said,) = (note for note in SimCluster(PLATFORM).plan(grouped(model=cached)).notes if "claim" in note)
    assert "a pod of a group that is on another node cannot start" in said
    assert "ReadWriteMany" in said
