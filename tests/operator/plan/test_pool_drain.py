"""Draining pods: out of the rotation, waited for, released; and the invariants of every step."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.pool_world import NOW, SimCluster, a_pool, is_ready
from treeline_operator import names
from treeline_operator.actions import Action, Mark, Plan, Scale
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan.drain import BLIND_S, SETTLE_S, DrainPolicy, drain_step, stamp, victims
from treeline_operator.world import PickerEndpoint
from treeline_wire.labels import SERVING

TIMEOUT_S = 60


def pool(replicas: int, **spec: Any) -> InferencePool:
    return a_pool(replicas=replicas, **spec)


def cluster_of(replicas: int, **streams: int) -> SimCluster:
    """Return a cluster with ready pods `p1`, `p2`, … of one revision, a picker that lists them, and their streams."""
    cluster = SimCluster()
    cluster.converge(pool(replicas))
    cluster.rename_pods("p{}")
    cluster.streams = dict(streams)
    cluster.look()
    return cluster


def words(actions: tuple[Action, ...]) -> list[str]:
    found = []
    for action in actions:
        if isinstance(action, Mark):
            found.append(f"{action.step} {action.ref.name}")
        elif isinstance(action, Scale):
            found.append(f"scale to {action.replicas}")
        else:
            found.append(f"{type(action).__name__} {action.ref.kind}")
    return found


def act(cluster: SimCluster, asked: InferencePool) -> list[str]:
    plan = cluster.plan(asked)
    cluster.do(plan)
    return words(plan.actions)


def later(cluster: SimCluster, seconds: float) -> None:
    cluster.now += timedelta(seconds=seconds)
    if cluster.picker is not None:
        cluster.look()


# ---- stories, step by step ----------------------------------------------------------------------------------


def test_idle_pods_are_gone_after_a_second() -> None:
    cluster = cluster_of(4, p2=1)
    one = pool(1)
    assert act(cluster, one) == ["drain p4", "drain p3", "drain p1"], "the least in flight, the newest first"
    cluster.look()
    assert cluster.plan(one).actions == (), "the picker may have sent them something in the meantime"
    assert cluster.plan(one).recheck_s == pytest.approx(SETTLE_S)
    later(cluster, SETTLE_S)
    assert act(cluster, one) == ["release p4", "release p3", "release p1"]
    assert act(cluster, one) == ["scale to 1"]
    cluster.controllers()
    assert list(cluster.pods) == ["p2"]
    assert cluster.plan(one) == Plan()


def test_streams_are_waited_for_one_pod_at_a_time() -> None:
    cluster = cluster_of(3, p1=5, p2=2, p3=1)
    one = pool(1)
    act(cluster, one)
    later(cluster, 30)
    plan = cluster.plan(one)
    assert plan.actions == ()
    assert plan.recheck_s == TIMEOUT_S - 30
    assert plan.notes == (
        "pod p3 leaves: 1 request left, until 2026-11-01T00:01:00.000Z at the latest",
        "pod p2 leaves: 2 requests left, until 2026-11-01T00:01:00.000Z at the latest",
    )
    cluster.streams["p2"] = 0
    cluster.look()
    assert [*act(cluster, one), *act(cluster, one)] == ["release p2", "scale to 2"]
    cluster.controllers()
    assert set(cluster.pods) == {"p1", "p3"}
    later(cluster, 30)
    (release,) = cluster.plan(one).actions
    assert isinstance(release, Mark)
    assert (release.step, release.in_flight, release.cut_off) == ("release", 1, True)


def test_a_pods_marks_are_set_on_leaving_and_cleared_on_return() -> None:
    cluster = cluster_of(2, p1=1)
    (drains,) = cluster.plan(pool(1)).actions
    assert isinstance(drains, Mark)
    assert drains.object == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p2",
            "namespace": "serving",
            "uid": cluster.pods["p2"]["metadata"]["uid"],
            "labels": {SERVING: "false"},
            "annotations": {names.DRAINING_SINCE: "2026-11-01T00:00:00.000Z"},
        },
    }
    act(cluster, pool(1))
    later(cluster, SETTLE_S)
    (release,) = cluster.plan(pool(1)).actions
    assert isinstance(release, Mark)
    assert release.annotations == drains.annotations | {names.DELETION_COST: "-2147483648"}
    act(cluster, pool(1))
    (back,) = cluster.plan(pool(2)).actions
    assert isinstance(back, Mark)
    assert (back.labels, back.annotations) == ({SERVING: "true"}, {})


def test_a_pod_that_stays_after_all_serves_again_before_a_new_one_is_made() -> None:
    for steps in range(3):
        cluster = cluster_of(4)
        for _ in range(steps):
            act(cluster, pool(1))
            later(cluster, SETTLE_S)
        before = set(cluster.pods)
        cluster.converge(pool(3))
        cluster.converge(pool(3))
        assert set(cluster.pods) <= before
        assert len(cluster.pods) == 3
        assert all(pod["metadata"]["labels"][SERVING] == "true" for pod in cluster.pods.values())
        assert not any(
            names.DRAINING_SINCE in pod["metadata"]["annotations"]
            for pod in cluster.pods.values()
            if "annotations" in pod["metadata"]
        )


def test_a_revert_after_a_scale_down_raises_replicas_before_clearing_marks() -> None:
    cluster = cluster_of(2)
    act(cluster, pool(1))
    later(cluster, SETTLE_S)
    assert [*act(cluster, pool(1)), *act(cluster, pool(1))] == ["release p2", "scale to 1"]
    assert act(cluster, pool(2)) == ["scale to 2", "return p2"], "its ReplicaSet had not looked yet"
    cluster.controllers()
    assert set(cluster.pods) == {"p1", "p2"}


def test_scaling_down_and_up_again_keeps_every_pod() -> None:
    other = {"engine": {"contextLength": 512}}
    cluster = cluster_of(3)
    before = set(cluster.pods)
    for _ in range(4):
        act(cluster, pool(3, **other))
        cluster.controllers()
        cluster.make_ready()
        later(cluster, 0.1)
    assert sum(pod["metadata"]["labels"][SERVING] == "false" for pod in cluster.pods.values()) == 1
    cluster.converge(pool(3))
    assert set(cluster.pods) == before
    assert cluster.plan(pool(3)).actions == ()


def test_a_rollout_makes_no_more_pods_than_the_surge_allows_while_old_ones_drain() -> None:
    other = {"engine": {"contextLength": 512}}
    cluster = cluster_of(2, p1=1, p2=1)
    for _ in range(6):
        act(cluster, pool(2, **other))
        cluster.controllers()
        cluster.make_ready()
        later(cluster, 5)
        assert len(cluster.pods) == 3
    cluster.streams.clear()
    cluster.converge(pool(2, **other))
    assert len(cluster.pods) == 2


def test_a_replace_rollout_waits_for_nothing() -> None:
    replaces = {"rollout": {"strategy": "Replace"}}
    cluster = cluster_of(3, p1=1, p2=1, p3=1)
    assert act(cluster, pool(2, **replaces)) == ["release p3"]
    assert act(cluster, pool(2, **replaces)) == ["scale to 2"]


def test_pods_that_never_served_go_at_once_and_first() -> None:
    cluster = cluster_of(2)
    act(cluster, pool(4))
    cluster.controllers()
    new = sorted(set(cluster.pods) - {"p1", "p2"}, reverse=True)
    later(cluster, 1)
    assert act(cluster, pool(1)) == [*(f"release {name}" for name in sorted(new)), "drain p2"]
    assert act(cluster, pool(1)) == ["scale to 2"]
    cluster.controllers()
    assert set(cluster.pods) == {"p1", "p2"}


def test_a_pod_is_not_released_while_an_earlier_one_drains() -> None:
    """A ReplicaSet removes the pod that is not ready first, whatever the deletion costs; that pod has a stream."""
    cluster = cluster_of(3, p2=1)
    status = cluster.pods["p2"]["status"]
    status["conditions"] = [c for c in status["conditions"] if c["type"] != "Ready"]
    status["containerStatuses"] = [{"name": "runtime", "ready": False, "started": True, "state": {"running": {}}}]
    assert act(cluster, pool(1)) == ["drain p2", "drain p3"]
    later(cluster, 5)
    assert act(cluster, pool(1)) == []
    cluster.streams["p2"] = 0
    cluster.look()
    assert act(cluster, pool(1)) == ["release p2", "release p3"]


# ---- unreachable pickers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked_s", [0, 30], ids=["there is none", "it falls silent while a pod is waited for"])
def test_without_a_picker_pods_are_waited_for_as_long_as_it_may_return(asked_s: int) -> None:
    cluster = cluster_of(2, p1=2, p2=1)
    act(cluster, pool(1))
    later(cluster, asked_s)
    cluster.be_silent()
    assert (cluster.plan(pool(1)).actions, cluster.plan(pool(1)).recheck_s) == ((), BLIND_S)
    later(cluster, BLIND_S - 1)
    assert (cluster.plan(pool(1)).actions, cluster.plan(pool(1)).recheck_s) == ((), 1.0)
    later(cluster, 1)
    assert [*act(cluster, pool(1)), *act(cluster, pool(1))] == ["release p2", "scale to 1"]


def test_a_picker_that_was_not_asked_yet_is_awaited() -> None:
    cluster = cluster_of(2)
    cluster.picker, cluster.silent_since = None, None
    act(cluster, pool(1))
    later(cluster, TIMEOUT_S - 1)
    assert cluster.plan(pool(1)).actions == ()
    later(cluster, 1)
    assert act(cluster, pool(1)) == ["release p2"]


def listing(cluster: SimCluster, **changes: Any) -> None:
    """Let the picker list all pods in this state."""
    cluster.look()
    assert cluster.picker is not None
    told = {"ready": True, "draining": False, "in_flight": 0, **changes}
    cluster.picker.pools["tiny"] = tuple(PickerEndpoint(n, f"{n}:1", **told) for n in sorted(cluster.pods))


@pytest.mark.parametrize("told", [{"in_flight": None, "draining": True}, {"in_flight": 0}])
def test_an_endpoint_without_reports_is_waited_for_briefly(told: dict[str, Any]) -> None:
    """The causes: an engine that does not report, or a picker that does not know yet that the pod drains."""
    cluster = cluster_of(2)
    listing(cluster, **told)
    act(cluster, pool(1))
    cluster.now += timedelta(seconds=BLIND_S - 1)
    listing(cluster, **told)
    assert cluster.plan(pool(1)).actions == ()
    cluster.now += timedelta(seconds=1)
    assert act(cluster, pool(1)) == ["release p2"]


def test_an_old_answer_does_not_count() -> None:
    cluster = cluster_of(2)
    act(cluster, pool(1))
    cluster.look()
    cluster.now += timedelta(seconds=5)
    assert cluster.plan(pool(1)).actions == ()
    cluster.look()
    assert act(cluster, pool(1)) == ["release p2"]


def test_the_picker_names_the_least_busy_pod_before_one_leaves() -> None:
    cluster = cluster_of(2)
    cluster.streams["p2"] = 1
    cluster.now += timedelta(seconds=5)
    plan = cluster.plan(pool(1))
    assert plan.actions == ()
    assert plan.recheck_s == 0.25
    cluster.look()
    assert act(cluster, pool(1)) == ["drain p1"]


def test_a_picker_whose_answer_grows_old_is_not_waited_for_forever() -> None:
    cluster = cluster_of(2)
    cluster.now += timedelta(seconds=31)
    assert act(cluster, pool(1)) == ["drain p2"]


@pytest.mark.parametrize("since", ["", "yesterday", "2027-01-01T00:00:00Z", "2026-11-01T00:00:00"])
def test_an_impossible_time_is_rewritten(since: str) -> None:
    cluster = cluster_of(2)
    meta = cluster.pods["p2"]["metadata"]
    meta["labels"][SERVING] = "false"
    meta["annotations"] = {names.DRAINING_SINCE: since}
    assert act(cluster, pool(1)) == ["drain p2"]
    assert cluster.pods["p2"]["metadata"]["annotations"][names.DRAINING_SINCE] == stamp(NOW)


def test_a_pod_taken_out_of_rotation_by_hand_serves_again() -> None:
    cluster = cluster_of(2)
    cluster.pods["p1"]["metadata"]["labels"][SERVING] = "false"
    assert act(cluster, pool(2)) == ["return p1"]


# ---- order --------------------------------------------------------------------------------------------------


def a_pod(name: str, *, ready: bool = True, age_s: int = 0, **meta: Any) -> dict[str, Any]:
    created = NOW - timedelta(seconds=age_s)
    told = {"name": name, "uid": name, "labels": {SERVING: "true"}, "creationTimestamp": created.isoformat()}
    status = {"conditions": [{"type": "Ready", "status": str(ready)}], "phase": "Running"}
    return {"metadata": {**told, **meta}, "spec": {"nodeName": "n"}, "status": status}


def test_the_order_in_which_pods_go() -> None:
    drains = {"labels": {SERVING: "false"}, "annotations": {names.DRAINING_SINCE: stamp(NOW)}}
    released = {**drains, "annotations": {**drains["annotations"], names.DELETION_COST: names.LOWEST_COST}}
    pods = [
        a_pod("busy"),
        a_pod("old", age_s=100),
        a_pod("new"),
        a_pod("warm"),
        a_pod("draining", **drains),
        a_pod("released", **released),
        a_pod("unready", ready=False),
    ]
    told = {"busy": (3, 0), "warm": (0, 500), "draining": (9, 900)}
    endpoints = {n: PickerEndpoint(n, n, True, False, *told.get(n, (0, 10))) for n in ("old", "new", *told)}
    policy = DrainPolicy(NOW, timedelta(seconds=60), endpoints=endpoints)
    order = [pod["metadata"]["name"] for pod in victims(pods, 0, policy)]
    assert order == ["unready", "released", "draining", "new", "old", "warm", "busy"]
    assert [pod["metadata"]["name"] for pod in victims(pods, 5, policy)] == ["unready", "released"]


def test_a_cost_of_another_owner_is_left_alone() -> None:
    theirs = a_pod("a", annotations={names.DELETION_COST: "5"})
    assert drain_step([theirs], 1, 1, DrainPolicy(NOW, timedelta(seconds=60)), "").marks == ()


# ---- any story ----------------------------------------------------------------------------------------------


class DrainStory(RuleBasedStateMachine):
    """A pool is scaled and rolled back and forth while streams and pickers come and go, and operators are killed
    midway."""

    @initialize(replicas=st.integers(1, 4), missing=st.sampled_from([0, 0, 1]), timeout=st.sampled_from([5, 60]))
    def begin(self, replicas: int, missing: int, timeout: int) -> None:
        self.replicas, self.revision, self.missing, self.timeout = replicas, 0, missing, timeout
        self.cluster = SimCluster()
        self.cluster.look()
        self.cluster.converge(self.pool())
        self.served_enough = True

    def pool(self) -> InferencePool:
        rollout, drain = {"maxUnavailable": self.missing}, {"timeoutSeconds": self.timeout}
        engine = {"contextLength": 512 + self.revision}
        return a_pool(replicas=self.replicas, rollout=rollout, drain=drain, engine=engine)

    # ---- what people do

    @rule(replicas=st.integers(0, 5))
    def scale(self, replicas: int) -> None:
        self.replicas = replicas
        self.served_enough = self.serving() >= self.floor()

    @rule()
    def roll_or_revert(self) -> None:
        self.revision = 1 - self.revision

    # ---- what requests do

    @rule(picks=st.lists(st.integers(0, 9), min_size=1, max_size=6))
    def streams_begin(self, picks: list[int]) -> None:
        able = [n for n, pod in sorted(self.cluster.pods.items()) if is_ready(pod) and self.reachable(pod)]
        for pick in picks if able else ():
            name = able[pick % len(able)]
            self.cluster.streams[name] = self.cluster.streams.get(name, 0) + 1

    def reachable(self, pod: dict[str, Any]) -> bool:
        """Return whether requests may reach the pod: it serves, or did a moment ago and picks of then arrive now."""
        since = pod["metadata"].get("annotations", {}).get(names.DRAINING_SINCE)
        return since is None or stamp(self.cluster.now - timedelta(seconds=0.9)) < since

    @rule(pick=st.integers(0, 9))
    def a_stream_ends(self, pick: int) -> None:
        busy = sorted(n for n, count in self.cluster.streams.items() if count)
        if busy:
            self.cluster.streams[busy[pick % len(busy)]] -= 1

    # ---- what time and the cluster do

    @rule(seconds=st.sampled_from([0.5, 1, 3, 11, 40]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.now += timedelta(seconds=seconds)

    @rule(seconds=st.sampled_from([0, 0.5, 1]))
    def the_picker_tells(self, seconds: float) -> None:
        self.cluster.now += timedelta(seconds=seconds)
        self.cluster.look()

    @rule()
    def the_picker_is_gone(self) -> None:
        self.cluster.be_silent()

    @rule()
    def controllers_act(self) -> None:
        before, there = self.serving(), dict(self.cluster.pods)
        self.cluster.controllers()
        assert self.serving() >= min(before, self.floor()), "serving pods were taken away"
        for name in there.keys() - self.cluster.pods.keys():
            self.cluster.streams.pop(name, None)
            marks = there[name]["metadata"].get("annotations", {})
            assert marks.get(names.DELETION_COST) == names.LOWEST_COST, "one went that was not meant"

    @rule()
    def pods_become_ready(self) -> None:
        self.cluster.make_ready()
        self.served_enough = self.served_enough or self.serving() >= self.floor()

    # ---- what operators do

    @rule(times=st.integers(1, 2))
    def the_operator_acts(self, times: int) -> None:
        for _ in range(times):
            self.carry_out(lambda actions: actions)

    @rule(count=st.integers(0, 2))
    def the_operator_is_killed(self, count: int) -> None:
        self.carry_out(lambda actions: actions[:count])

    def carry_out(self, part: Callable[[tuple[Action, ...]], tuple[Action, ...]]) -> None:
        before, plan = self.serving(), self.cluster.plan(self.pool())
        for action in plan.actions:
            if isinstance(action, Mark) and action.step == "release":
                self.check_release(action)
        self.cluster.do(Plan(part(plan.actions)))
        assert self.serving() >= min(before, self.floor()), "serving pods were taken out of the rotation"
        self.served_enough = self.served_enough or self.serving() >= self.floor()

    def check_release(self, mark: Mark) -> None:
        """Check that a pod with streams is not released before its time, if a picker can report them."""
        cluster = self.cluster
        if cluster.streams.get(mark.ref.name) and is_ready(cluster.pods[mark.ref.name]):
            since = mark.annotations[names.DRAINING_SINCE]
            waited = stamp(cluster.now - timedelta(seconds=self.timeout)) >= since
            silent_since = cluster.silent_since if cluster.picker is None else cluster.picker.at
            assert silent_since is not None
            begun = max(stamp(silent_since), since)
            unseen = stamp(cluster.now - timedelta(seconds=10)) >= begun  # no report of it for so long
            assert waited or unseen, f"{mark.ref.name} has streams: {mark.why}"

    # ---- what always holds

    @invariant()
    def never_under_serves(self) -> None:
        if hasattr(self, "cluster") and self.served_enough:
            assert self.serving() >= self.floor()

    def teardown(self) -> None:
        """If nothing else happens, everything drains, whether streams end or not and whether a picker is there or
        not."""
        if not hasattr(self, "cluster"):
            return
        self.cluster.converge(self.pool())
        assert self.cluster.plan(self.pool()).actions == ()
        assert len(self.cluster.pods) == self.serving() == self.replicas

    def floor(self) -> int:
        return max(0, self.replicas - self.missing)

    def serving(self) -> int:
        pods = self.cluster.pods.values()
        return sum(is_ready(pod) and pod["metadata"]["labels"][SERVING] == "true" for pod in pods)


TestDrainStory = DrainStory.TestCase
TestDrainStory.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
