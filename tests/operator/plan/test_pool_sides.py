"""Pools with `spec.prefill`: what pods of each side are started with, and rollouts of both sides together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.api_prefill import REFUSED_PREFILL
from support.api_specs import document
from support.pool_world import EVERY_API, SimCluster, a_pool, is_ready, kinds, settled
from treeline_operator import names
from treeline_operator.actions import Mark, Scale
from treeline_operator.api.pool import InferencePool
from treeline_operator.api.rules import violations
from treeline_operator.plan.engines import KEYS_DIR
from treeline_operator.plan.revision import existing_revisions
from treeline_operator.plan.rollout import Revision, RolloutPolicy
from treeline_operator.plan.runtime import pod_template
from treeline_operator.plan.sides import SideNumbers, next_steps
from treeline_operator.world import Images, PickerEndpoint, PickerView, Platform
from treeline_runtime.args import parse_args
from treeline_wire.labels import KV_TRANSFER, ROLE, SERVING

SAMPLES = Path(__file__).parents[3] / "manifests" / "samples"
SURGE = RolloutPolicy()


def pair(*, prefill: dict[str, Any] | None = None, engine: str = "vllm", **spec: Any) -> InferencePool:
    """Return a pool with a side that computes prompts, on GPUs."""
    length = spec.pop("length", 4096)
    made = {"accelerator": {"type": "nvidia"}, "engine": {"type": engine, "contextLength": length}, **spec}
    return a_pool(prefill={} if prefill is None else prefill, **made)


def whole(**spec: Any) -> InferencePool:
    """Return the same pool without that side."""
    return a_pool(accelerator={"type": "nvidia"}, engine={"type": "vllm", "contextLength": 4096}, **spec)


def sides(pool: InferencePool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod templates of both sides: the one that answers, the one that computes prompts."""
    return pod_template(pool, "abc", Images()), pod_template(pool, f"abc{names.PREFILL}", Images())


def container(template: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in template["spec"]["containers"] if one["name"] == "runtime")


# ---- pods -----------------------------------------------------------------------------------------------------------


def test_both_vllm_sides_start_with_the_connector_and_their_own_address() -> None:
    answers, prompts = sides(pair())
    assert (answers["metadata"]["labels"][ROLE], prompts["metadata"]["labels"][ROLE]) == ("decode", "prefill")
    for one in (answers, prompts):
        args, env = container(one)["args"], {entry["name"]: entry for entry in container(one)["env"]}
        config = yaml.safe_load(args[args.index("--kv-transfer-config") + 1])
        assert config["kv_connector"] == "NixlConnector"
        assert (config["kv_role"], config["kv_load_failure_policy"]) == ("kv_both", "recompute")
        assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"] == "5600"
        assert one["metadata"]["annotations"][KV_TRANSFER] == "nixl"
    assert container(answers) == container(prompts)
    alone = pod_template(whole(), "abc", Images())
    assert "--kv-transfer-config" not in container(alone)["args"]
    assert alone["metadata"]["labels"][ROLE] == "both"


def test_sglang_sides_start_in_their_modes() -> None:
    for one, mode in zip(sides(pair(engine="sglang")), ("decode", "prefill"), strict=True):
        args = container(one)["args"]
        assert args[args.index("--disaggregation-mode") + 1] == mode
        assert args[args.index("--disaggregation-bootstrap-port") + 1] == "8998"


def test_our_own_sides_give_each_other_pages_and_so_do_pods_without_sides() -> None:
    kept = {"engine": {"type": "treeline", "hostCache": "2Gi", "dataParallel": 2}}
    two = {"accelerator": {"type": "nvidia", "count": 2}}
    for one in (*sides(a_pool(prefill={}, **kept, **two)), pod_template(a_pool(**kept, **two), "abc", Images())):
        args = parse_args(container(one)["args"])
        assert (args.host_cache, args.kv_transfer_port, args.curve_dir) == (2 << 30, 5857, KEYS_DIR)
        assert {"name": "kv-transfer-1", "containerPort": 5858, "protocol": "TCP"} in container(one)["ports"]
        assert container(one)["resources"]["requests"]["memory"] == "18Gi", "2 × (4 + 4) and the cache"
    assert container(pod_template(a_pool(**kept), "abc", Images()))["resources"]["requests"]["memory"] == "3072Mi"


@pytest.mark.parametrize(("text", "message"), REFUSED_PREFILL)
def test_what_no_engine_can_do_is_refused_with_the_fix(text: str, message: str) -> None:
    try:
        told = "; ".join(violations(InferencePool.from_object(document("InferencePool", text), strict=True)))
    except ValueError as refused:
        told = str(refused)
    assert message in told


def test_what_the_prefill_side_does_not_say_is_as_for_the_pool() -> None:
    pool = pair(
        template={"spec": {"priorityClassName": "high", "nodeSelector": {"zone": "a"}}},
        prefill={
            "accelerator": {"type": "nvidia", "count": 2, "class": "NVIDIA-H200"},
            "template": {"spec": {"nodeSelector": {"zone": None, "fast": "yes"}}},
        },
    )
    answers, prompts = sides(pool)
    assert container(prompts)["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert container(answers)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "--tensor-parallel-size=2" in container(prompts)["args"]
    assert prompts["spec"]["priorityClassName"] == "high"
    assert prompts["spec"]["nodeSelector"] == {"fast": "yes", "nvidia.com/gpu.product": "NVIDIA-H200"}
    assert answers["spec"]["nodeSelector"] == {"zone": "a"}


def test_an_invalid_prefill_template_changes_no_pods() -> None:
    cluster = settled(pair())
    plan = cluster.plan(pair(prefill={"template": {"spec": {"containers": None}}}))
    assert plan.actions == ()
    assert any("containers cannot be removed" in note for note in plan.notes)


# ---- objects --------------------------------------------------------------------------------------------------------


def test_a_revision_is_a_deployment_for_each_side() -> None:
    cluster = settled(pair(replicas=3, prefill={"replicas": 2}))
    made = cluster.deployments()
    answers = next(name for name in made if not name.endswith(names.PREFILL))
    assert {name: obj["spec"]["replicas"] for name, obj in made.items()} == {answers: 3, f"{answers}-prefill": 2}
    selectors = [obj["spec"]["selector"]["matchLabels"][names.REVISION] for obj in made.values()]
    assert len(set(selectors)) == 2, "no pod is of two Deployments"


def test_prefill_replicas_scale_alone_and_with_the_pool_to_zero() -> None:
    cluster = settled(pair(replicas=2))
    (action,) = cluster.plan(pair(replicas=2, prefill={"replicas": 3})).actions
    assert isinstance(action, Scale)
    assert (action.ref.name.endswith(names.PREFILL), action.replicas, action.why) == (True, 3, "3 replicas wanted")
    cluster.converge(pair(replicas=0, prefill={"replicas": 3}))
    assert cluster.pods == {}
    cluster.converge(pair(replicas=1, prefill={"replicas": 3}))
    assert count(cluster) == {"decode": 1, "prefill": 3}


@pytest.mark.parametrize("prefill", [{"accelerator": {"type": "nvidia", "count": 2}}, {"template": {"spec": {"x": 1}}}])
def test_a_change_of_the_prefill_side_makes_both_anew(prefill: dict[str, Any]) -> None:
    cluster = settled(pair())
    made = [kind for kind in kinds(cluster.plan(pair(prefill=prefill))) if kind.startswith("Apply Deployment")]
    assert [kind.endswith(names.PREFILL) for kind in made] == [False, True]


def test_only_a_pools_own_pods_reach_the_ports_of_transfers() -> None:
    own = {"from": [{"podSelector": {"matchLabels": {"treeline.dev/pool": "tiny", names.COMPONENT: "runtime"}}}]}
    cluster = settled(pair())
    assert own in cluster.get("NetworkPolicy", "tiny-pods")["spec"]["ingress"]
    cluster.converge(whole())
    assert own not in cluster.get("NetworkPolicy", "tiny-pods")["spec"]["ingress"]


def test_our_own_pods_reach_each_other_at_the_port_for_pages_alone() -> None:
    own = {"podSelector": {"matchLabels": {"treeline.dev/pool": "tiny", names.COMPONENT: "runtime"}}}
    pages = {"ports": [{"port": 5857, "protocol": "TCP"}]}

    def met(cluster: SimCluster) -> list[dict[str, Any]]:
        spec = cluster.get("NetworkPolicy", "tiny-pods")["spec"]
        ways = [("from", way) for way in spec["ingress"]] + [("to", way) for way in spec["egress"]]
        return [{k: v for k, v in way.items() if k != side} for side, way in ways if way.get(side) == [own]]

    ours = a_pool(prefill={}, accelerator={"type": "nvidia"}, engine={"hostCache": "1Gi"})
    cluster = settled(ours)
    assert met(cluster) == [pages, pages]
    cluster.converge(pair())
    cluster.do(cluster.plan(ours))
    assert met(cluster) == [{}, {}], "the old pods choose their ports"
    cluster.converge(ours)
    assert met(cluster) == [pages, pages]
    cluster.converge(wide := a_pool(accelerator={"type": "cpu"}, engine={"hostCache": "1Gi", "dataParallel": 2}))
    two = {"ports": [{"port": 5857, "protocol": "TCP", "endPort": 5858}]}
    for after, last in ((ours, [pages, pages]), (wide, [two, two]), (a_pool(), [])):
        cluster.do(cluster.plan(after))
        assert met(cluster) == [two, two], "the pods of both revisions give pages"
        cluster.converge(after)
        assert met(cluster) == last


def test_gateways_see_the_pods_that_answer_alone_once_there_are_no_others() -> None:
    front = {"gateway": {"parentRefs": [{"name": "front"}]}}
    cluster = settled(whole(**front), platform=Platform(apis=EVERY_API))

    def selected() -> Any:
        found = [obj for ref, obj in cluster.objects.items() if ref.name == "tiny-gie"]
        return found[0]["spec"]["selector"]["matchLabels"].get(ROLE)

    cluster.do(cluster.plan(pair(**front)))
    assert selected() is None
    cluster.converge(pair(**front))
    assert selected() == "decode"


@pytest.mark.parametrize("name", ["vllm-prefill", "prefill"])
def test_a_sample_plans_a_deployment_for_each_side(name: str) -> None:
    sample = yaml.safe_load((SAMPLES / f"{name}.yaml").read_text())
    cluster = settled(a_pool("pair", **sample["spec"]))
    assert count(cluster) == {"decode": 2, "prefill": 1}


# ---- rollouts -------------------------------------------------------------------------------------------------------


def count(cluster: SimCluster, *, only_ready: bool = False) -> dict[str, int]:
    """Return the pods of each role."""
    found: dict[str, int] = {}
    for pod in cluster.pods.values():
        if is_ready(pod) or not only_ready:
            role = pod["metadata"]["labels"][ROLE]
            found[role] = found.get(role, 0) + 1
    return found


def paired(cluster: SimCluster) -> bool:
    """Whether pods of one revision are ready on both sides, or one that needs no other is."""
    able = [p["metadata"]["labels"] for p in cluster.pods.values() if is_ready(p)]
    serving = {(one[names.REVISION].removesuffix(names.PREFILL), one[ROLE]) for one in able if one[SERVING] == "true"}
    return any(role == "both" or {(of, "decode"), (of, "prefill")} <= serving for of, role in serving)


def numbers(desired: int, target: Revision, *olds: Revision) -> SideNumbers:
    return SideNumbers(desired, SURGE, target, olds)


def test_old_pods_wait_for_the_other_side_of_the_new_revision() -> None:
    answers = numbers(2, Revision("b", 1, 1), Revision("a", 2, 2))
    waits = next_steps(answers, numbers(1, Revision("b-prefill", 1, 0), Revision("a-prefill", 1, 1)))
    assert [step.replicas for step in waits] == [{"a": 2, "b": 1}, {"a-prefill": 1, "b-prefill": 1}]
    goes = next_steps(answers, numbers(1, Revision("b-prefill", 1, 1), Revision("a-prefill", 1, 1)))
    assert [step.replicas for step in goes] == [{"a": 1, "b": 2}, {"a-prefill": 1, "b-prefill": 1}]
    both = numbers(2, Revision("b", 2, 2), Revision("a", 1, 1))
    ends = next_steps(both, numbers(1, Revision("b-prefill", 1, 1), Revision("a-prefill", 1, 1)))
    assert [step.replicas for step in ends] == [{"a": 0, "b": 2}, {"a-prefill": 0, "b-prefill": 1}]


def test_of_old_revisions_the_same_one_stays_on_both_sides() -> None:
    answers = numbers(1, Revision("c", 1), Revision("a", 1, 1), Revision("b", 1, 1))
    prompts = numbers(1, Revision("c-prefill", 1), Revision("a-prefill", 1, 0), Revision("b-prefill", 1, 1))
    assert [step.replicas for step in next_steps(answers, prompts)] == [
        {"a": 0, "b": 1, "c": 1},
        {"a-prefill": 0, "b-prefill": 1, "c-prefill": 1},
    ]


def test_of_old_revisions_one_whose_prefill_side_was_deleted_leaves_first() -> None:
    cluster = settled(before := pair(replicas=2))
    (alone,) = (one for one in existing_revisions(cluster.world(before)) if not names.is_prefill(one.name))
    left = replace(alone.measured(None, cluster.now), name="b")
    olds = SideNumbers(2, SURGE, Revision("c", 1), (Revision("a", 1, 1), left))
    prompts = SideNumbers(1, SURGE, None, (Revision("a-prefill", 1, 1),))
    assert [one.replicas for one in next_steps(olds, prompts)] == [{"a": 1, "b": 1, "c": 1}, {"a-prefill": 1}]


def test_prefill_pods_stay_while_pods_answer_by_them() -> None:
    before = pair(replicas=2)
    cluster = settled(before)
    after = whole(replicas=2)
    for _ in range(40):
        cluster.do(cluster.plan(after))
        cluster.controllers()
        assert paired(cluster)
        cluster.make_ready()
    cluster.converge(after)
    assert count(cluster) == {"both": 2}


def test_a_pool_gets_its_prefill_side_while_the_old_pods_serve() -> None:
    cluster = settled(whole(replicas=2))
    after = pair(replicas=2)
    for _ in range(40):
        cluster.do(cluster.plan(after))
        cluster.controllers()
        assert paired(cluster)
        cluster.make_ready()
    cluster.converge(after)
    assert count(cluster) == {"decode": 2, "prefill": 1}


def test_a_prefill_pod_drains_as_the_others_do() -> None:
    pool = pair(prefill={"replicas": 2})
    cluster = settled(pool)
    prompts = sorted(name for name, pod in cluster.pods.items() if pod["metadata"]["labels"][ROLE] == "prefill")
    cluster.streams = {prompts[0]: 1}
    cluster.look()
    fewer = pair()
    marked = [action for action in cluster.plan(fewer).actions if isinstance(action, Mark)]
    assert [(one.ref.name, one.step) for one in marked] == [(prompts[1], "drain")], "the one without requests leaves"
    cluster.converge(fewer)
    assert prompts[0] in cluster.pods


def test_new_pods_that_the_picker_cannot_pair_replace_none() -> None:
    cluster = settled(pair())
    old = sorted(cluster.pods)
    changed = pair(length=512)
    for _ in range(3):
        cluster.do(cluster.plan(changed))
        cluster.controllers()
        cluster.make_ready()
        listed = tuple(PickerEndpoint(name, f"{name}:8000", name in old) for name in cluster.pods)
        cluster.picker = PickerView(True, {"tiny": listed}, at=cluster.now)
    assert set(old) <= set(cluster.pods)
    assert not any(isinstance(action, Mark) for action in cluster.plan(changed).actions)


@settings(max_examples=25, deadline=None)
@example(story=["flip", "one", "one", "ready", "ready"], prompts=1)
@given(
    story=st.lists(st.sampled_from(["flip", "one", "one", "ready", "crash", "up", "down", "more"]), max_size=16),
    prompts=st.integers(1, 3),
)
def test_every_random_rollout_keeps_a_pair_and_converges(story: list[str], prompts: int) -> None:
    """The whole planner over the simulated cluster; `PairStory` tells many more of these of its core."""
    replicas, length = 3, 4096

    def wanted() -> InferencePool:
        return pair(replicas=replicas, length=length, prefill={"replicas": prompts})

    cluster = settled(wanted())
    for event in story:
        waiting = sorted(name for name, pod in cluster.pods.items() if not is_ready(pod))
        if event == "flip":
            length = 512 if length == 4096 else 4096
        elif event == "ready":
            cluster.make_ready()
        elif event == "one" and waiting:
            cluster.make_ready(waiting[-1])
        elif event == "crash" and waiting:
            cluster.crash(waiting[0])
        elif event in ("up", "down"):
            replicas = 4 if event == "up" else 2
        elif event == "more":
            prompts = prompts % 3 + 1
        cluster.do(cluster.plan(wanted()))
        cluster.controllers()
        assert paired(cluster)
    for pod in cluster.pods.values():
        pod["status"].pop("containerStatuses", None)
    cluster.converge(wanted())
    assert count(cluster, only_ready=True) == {"decode": replicas, "prefill": prompts}
    assert len({pod["metadata"]["labels"][names.REVISION] for pod in cluster.pods.values()}) == 2


SIDES = ("", names.PREFILL)


class PairStory(RuleBasedStateMachine):
    """Both sides of a pool whose spec flips between revisions while pods start, fail, find no place and come back."""

    @initialize(
        answers=st.integers(1, 5),
        prompts=st.integers(1, 4),
        surge=st.integers(0, 2),
        missing=st.sampled_from([0, 0, 0, 1]),
        spare=st.integers(1, 3),
    )
    def begin(self, answers: int, prompts: int, surge: int, missing: int, spare: int) -> None:
        self.desired = {"": answers, names.PREFILL: prompts}
        self.policy = RolloutPolicy(max_surge=surge, max_unavailable=missing)
        self.spare = spare
        self.target = "a"
        self.bad: set[str] = set()
        self.pods: dict[str, list[str]] = {name + side: [] for name in "abc" for side in SIDES}
        """The states of a revision's pods: pending, starting, ready or failing."""
        self.end_well()

    @rule(other=st.sampled_from([1, 2]))
    def flip(self, other: int) -> None:
        self.target = "abc"[("abc".index(self.target) + other) % 3]
        self.move()

    @rule(side=st.sampled_from(SIDES))
    def flip_to_one_that_fails_on_a_side(self, side: str) -> None:
        self.flip(1)
        self.bad.add(self.target + side)
        self.all_proceed()

    @rule(side=st.sampled_from(SIDES), desired=st.integers(1, 5))
    def scale(self, side: str, desired: int) -> None:
        self.desired[side] = desired
        self.move()

    @rule(name=st.sampled_from("abc"), side=st.sampled_from(SIDES))
    def mend(self, name: str, side: str) -> None:
        self.bad.discard(name + side)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.policy = RolloutPolicy(
            max_surge=self.policy.max_surge, max_unavailable=self.policy.max_unavailable, paused=paused
        )
        self.move()

    @rule(name=st.sampled_from("abc"), side=st.sampled_from(SIDES))
    def one_pod_flaps(self, name: str, side: str) -> None:
        states = self.pods[name + side]
        if "ready" in states:
            states[states.index("ready")] = "starting"
        self.move()

    @rule(name=st.sampled_from("abc"), side=st.sampled_from(SIDES))
    def some_pods_proceed(self, name: str, side: str) -> None:
        self.proceed(name + side)
        self.move()

    @rule()
    def all_proceed(self) -> None:
        for name in self.pods:
            self.proceed(name)
        self.move()

    def teardown(self) -> None:
        """With good pods and room for a surge, the rollout ends with the target alone on both sides."""
        if not hasattr(self, "pods"):
            return
        self.bad = set()
        self.pause(paused=False)
        self.end_well()

    def end_well(self) -> None:
        wanted = {self.target + side: ["ready"] * count for side, count in self.desired.items()}
        for _ in range(60):
            if {name: states for name, states in self.pods.items() if states} == wanted:
                self.move()
                break
            self.all_proceed()
        assert {name: states for name, states in self.pods.items() if states} == wanted

    # ---- the simulated cluster ------------------------------------------------------------------------------

    def move(self) -> None:
        before, ready = self.pairs(), {side: self.ready(side) for side in SIDES}
        self.apply()
        for side, desired in self.desired.items():
            assert self.ready(side) >= min(ready[side], max(0, desired - self.policy.absent)), "ready pods were taken"
        assert self.policy.absent or not before or self.pairs(), "the last pair was taken apart"

    def pairs(self) -> list[str]:
        return [name for name in "abc" if all("ready" in self.pods[name + side] for side in SIDES)]

    def ready(self, side: str) -> int:
        return sum(self.pods[name + side].count("ready") for name in "abc")

    def apply(self) -> None:
        def seen(name: str) -> Revision:
            states = self.pods[name]
            return Revision(name, len(states), states.count("ready"), states.count("pending"), states.count("failing"))

        measured = [
            SideNumbers(
                self.desired[side],
                self.policy,
                seen(self.target + side),
                [seen(name + side) for name in "abc" if name != self.target],
            )
            for side in SIDES
        ]
        for step in next_steps(*measured):
            for name, replicas in step.replicas.items():
                states = self.pods[name]
                # A ReplicaSet gives up pods without a place first, then those that are not ready.
                states.sort(key=["ready", "failing", "starting", "pending"].index)
                del states[replicas:]
                states += ["pending"] * (replicas - len(states))

    def proceed(self, name: str) -> None:
        side = names.PREFILL if names.is_prefill(name) else ""
        for index, state in enumerate(self.pods[name]):
            placed = sum(s != "pending" for one in "abc" for s in self.pods[one + side])
            if state == "pending" and placed < self.desired[side] + self.spare:
                self.pods[name][index] = "starting"
            elif state == "starting" or (state == "failing" and name not in self.bad):
                self.pods[name][index] = "failing" if name in self.bad else "ready"


TestPairStory = PairStory.TestCase
TestPairStory.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
