"""Rollouts on full nodes end, drop no stream, and keep serving meanwhile."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pool_world import NOW, SimCluster, a_pool, is_ready
from treeline_operator import names
from treeline_operator.actions import Mark
from treeline_operator.api.pool import InferencePool
from treeline_operator.plan import facts
from treeline_wire.labels import SERVING

SURGE_S = 120
DRAIN_S = 60
STEP_S = 1.0


def pool(replicas: int, revision: int, **spec: Any) -> InferencePool:
    engine = {"contextLength": 512 + revision, **spec.pop("engine", {})}
    return a_pool(replicas=replicas, engine=engine, drain={"timeoutSeconds": DRAIN_S}, **spec)


class Full:
    """A cluster without spare room, second by second: pods take time to start, streams begin and end."""

    def __init__(self, replicas: int, start_s: int = 40, seed: int = 0) -> None:
        self.cluster = SimCluster(capacity=replicas)
        self.cluster.look()
        self.cluster.converge(pool(replicas, 0))
        self.began = self.cluster.now
        self.start_s = start_s
        self.placed: dict[str, float] = {}
        self.random = random.Random(seed)
        self.least = replicas
        self.dropped: list[str] = []

    @property
    def elapsed(self) -> float:
        return (self.cluster.now - self.began).total_seconds()

    def serving(self) -> int:
        """Return the pods that are ready and in the rotation."""
        labels = [pod["metadata"]["labels"] for pod in self.cluster.pods.values() if is_ready(pod)]
        return sum(label[SERVING] == "true" for label in labels)

    def second(self, asked: InferencePool) -> tuple[str, ...]:
        """Let one second pass. Return the planner's notes."""
        cluster = self.cluster
        cluster.now += timedelta(seconds=STEP_S)
        self._streams()
        cluster.look()
        plan = cluster.plan(asked)
        for action in plan.actions:
            if isinstance(action, Mark) and action.step == "release":
                self._check(action)
        cluster.do(plan)
        before = set(cluster.pods)
        cluster.controllers()
        for name in before - set(cluster.pods):
            cluster.streams.pop(name, None)
        self._start()
        self.least = min(self.least, self.serving())
        return plan.notes

    def _streams(self) -> None:
        cluster, chance = self.cluster, self.random
        for name, pod in cluster.pods.items():
            count = cluster.streams.get(name, 0)
            ended = sum(chance.random() < 0.1 for _ in range(count))
            began = is_ready(pod) and pod["metadata"]["labels"][SERVING] == "true" and chance.random() < 0.3
            cluster.streams[name] = count - ended + began

    def _check(self, mark: Mark) -> None:
        since = mark.annotations[names.DRAINING_SINCE]
        waited = self.cluster.now - timedelta(seconds=DRAIN_S)
        if self.cluster.streams.get(mark.ref.name) and waited.isoformat(timespec="milliseconds") < since:
            self.dropped.append(mark.ref.name)

    def _start(self) -> None:
        for name, pod in self.cluster.pods.items():
            if pod["spec"].get("nodeName") and not is_ready(pod):
                self.placed.setdefault(name, self.elapsed)
                if self.elapsed - self.placed[name] >= self.start_s:
                    self.cluster.make_ready(name)

    def is_rolled(self, asked: InferencePool) -> bool:
        wanted = {obj["metadata"]["labels"][names.REVISION] for obj in self._kept()}
        pods = self.cluster.pods.values()
        revisions = {pod["metadata"]["labels"][names.REVISION] for pod in pods}
        return len(wanted) == 1 and revisions == wanted and self.serving() == asked.spec.replicas

    def _kept(self) -> list[dict[str, Any]]:
        return [obj for obj in self.cluster.deployments().values() if obj["spec"]["replicas"]]


@settings(max_examples=25, deadline=None)
@given(
    replicas=st.integers(1, 4),
    start_s=st.sampled_from([5, 40, 200]),
    surge=st.sampled_from([1, 2, "50%"]),
    missing=st.sampled_from([0, 0, 1, "34%"]),
    seed=st.integers(0, 9),
)
def test_a_rollout_on_full_nodes_ends_in_bounded_time_and_drops_nothing(
    replicas: int, start_s: int, surge: int | str, missing: int | str, seed: int
) -> None:
    world = Full(replicas, start_s, seed)
    rollout = {"maxSurge": surge, "maxUnavailable": missing, "surgeTimeoutSeconds": SURGE_S}
    asked = pool(replicas, 1, rollout=rollout)
    share = int(str(missing).removesuffix("%")) * replicas // 100 if isinstance(missing, str) else missing
    # A pod at a time: its drain, the start of the one in its place, and some seconds between.
    bound_s = SURGE_S + replicas * (DRAIN_S + start_s + SURGE_S + 10)
    while not world.is_rolled(asked):
        world.second(asked)
        assert world.elapsed < bound_s, "no progress"
    assert world.least >= replicas - max(1, share), "more pods were missing than one, or than are allowed to"
    assert world.dropped == []


def test_no_pod_is_removed_before_the_deadline() -> None:
    world, asked = Full(2), pool(2, 1)
    while world.elapsed < SURGE_S:
        notes = world.second(asked)
        assert world.serving() == 2
    assert any(note.startswith("InsufficientCapacity: no node has room for 1 pod(s)") for note in notes)


def test_new_nodes_in_time_save_every_old_pod() -> None:
    world, asked = Full(2), pool(2, 1)
    for _ in range(60):
        world.second(asked)
    world.cluster.capacity = 3
    while not world.is_rolled(asked):
        world.second(asked)
        assert world.elapsed < 400
    assert world.least == 2, "there was room, so no pod had to go first"


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        (
            {"template": {"spec": {"nodeSelector": {"gpu": "misspelt"}}}},
            "node(s) didn't match Pod's node affinity",
        ),
        pytest.param(
            {"engine": {"resources": {"requests": {"cpu": "64"}}}}, "Insufficient cpu", marks=pytest.mark.deep
        ),
        pytest.param({}, "node(s) had untolerated taint {sick: true}", marks=pytest.mark.deep),
        pytest.param({}, "pod has unbound immediate PersistentVolumeClaims", marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.deep)])
def test_a_pod_that_does_not_fit_in_an_old_ones_place_removes_none(
    change: dict[str, Any], lacking: str, replicas: int
) -> None:
    world, asked = Full(replicas), pool(replicas, 1, **change)
    world.cluster.lacking = lacking
    notes: tuple[str, ...] = ()
    while world.elapsed < 2 * SURGE_S:
        notes = world.second(asked)
    assert world.least == replicas
    assert any("the new ones would not fit in their place" in note for note in notes)


def test_a_quota_that_is_used_up_makes_room_in_the_same_way() -> None:
    """Pods that are refused do not exist: their Deployment shows since when."""
    cluster, asked = SimCluster(), pool(2, 1)
    cluster.look()
    cluster.converge(pool(2, 0))
    cluster.do(cluster.plan(asked))
    (new,) = (obj for obj in cluster.deployments().values() if "--context-length" in str(obj) and "513" in str(obj))
    said = {"type": "ReplicaFailure", "status": "True", "lastTransitionTime": cluster.now.isoformat()}
    for words, takes in (("exceeded quota: gpus, requested", True), ("denied by policy", False)):
        new["status"] = {"conditions": [{**said, "message": f"pods is forbidden: {words}"}]}
        cluster.now += timedelta(seconds=SURGE_S)
        cluster.look()
        steps = [action.step for action in cluster.plan(asked).actions if isinstance(action, Mark)]
        assert steps == (["drain"] if takes else [])


@pytest.mark.deep
def test_a_rollback_midway_ends_too() -> None:
    world, there, back = Full(3), pool(3, 1), pool(3, 0)
    while world.elapsed < SURGE_S + 90:
        world.second(there)
    while not world.is_rolled(back):
        world.second(back)
        assert world.elapsed < 1500
    assert world.least >= 2
    assert world.dropped == []


# ---- what fits ----------------------------------------------------------------------------------------------


def spec(cpu: str = "2", gpus: int = 1, **more: Any) -> dict[str, Any]:
    asked = {"requests": {"cpu": cpu, "nvidia.com/gpu": str(gpus)}, "limits": {"nvidia.com/gpu": str(gpus)}}
    return {"containers": [{"name": "runtime", "resources": asked}], **more}


def homeless(message: str) -> dict[str, Any]:
    told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"metadata": {"name": "p"}, "status": {"conditions": [told]}}


GPUS = "0/9 nodes are available: 3 Insufficient nvidia.com/gpu, 6 node(s) had untolerated taint {x: }. preemption: 0/9"


@pytest.mark.parametrize(
    ("message", "new", "old", "fits"),
    [
        (GPUS, spec(), spec(), True),
        (GPUS, spec(cpu="4"), spec(), True),
        (GPUS, spec(gpus=2), spec(), False),
        (GPUS, spec(gpus=1), spec(gpus=2), True),
        (GPUS, spec(nodeSelector={"a": "b"}), spec(), False),
        (GPUS, spec(nodeSelector={"a": "b"}), spec(nodeSelector={"a": "b"}), True),
        (GPUS, spec(affinity={"nodeAffinity": {}}), spec(), False),
        ("0/1 nodes are available: 1 Insufficient cpu.", spec(cpu="4"), spec(), False),
        (
            "0/1 nodes are available: 1 Insufficient cpu, 1 Insufficient nvidia.com/gpu.",
            spec(cpu="1"),
            spec(),
            True,
        ),
        ("0/1 nodes are available: 1 Too many pods.", spec(), spec(), True),
        ("0/1 nodes are available: 1 node(s) were unschedulable.", spec(), spec(), False),
        ("", spec(), spec(), False),
        (
            GPUS,
            spec(initContainers=[{"name": "model", "resources": {"requests": {"nvidia.com/gpu": "3"}}}]),
            spec(),
            False,
        ),
    ],
)
def test_a_pod_fits_where_the_same_nodes_lack_no_more_than_the_old_one_has(
    message: str, new: dict[str, Any], old: dict[str, Any], fits: bool
) -> None:
    assert facts.fits_in_place([homeless(message)], new, old) is fits


def test_the_longest_wait_counts() -> None:
    at = (NOW - timedelta(seconds=30)).isoformat()
    pods = [homeless(GPUS) | {"metadata": {"creationTimestamp": at}}, homeless(GPUS)]
    assert facts.waited_s(pods, None, NOW) == 30
    assert facts.waited_s(pods, (NOW - timedelta(seconds=50)).isoformat(), NOW) == 50
    assert facts.waited_s([], None, NOW) == 0
