"""Which pods have which adapters, as pods come and go, answer or not, and sources change."""

from __future__ import annotations

from datetime import timedelta

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.operator_status import NOW, model, observed, pool
from treeline_operator.plan import adapters as plans
from treeline_operator.plan.adapters import MOST_TEXT, SETTLE_S, AdapterPod, AdapterState, plan_adapters
from treeline_operator.status.models import model_statuses
from treeline_wire import labels
from treeline_wire.live_adapters import AdapterReport, version_name, wishes_of, wishes_text

NOTHING = AdapterReport()
TINY = pool(engine={"lora": {"claims": ["sets"]}})


def adapted(name="sql", uri="hf://o/a", *, replicas=None, digest=None, told=None, **spec):
    adapter = {"uri": uri} | ({"replicas": replicas} if replicas else {}) | ({"digest": digest} if digest else {})
    made = model(name, model_name=name, adapter=adapter, **spec)
    return made if told is None else made.model_copy(update={"status": {"adapter": told}})


def version(made):
    return version_name(made.spec.model_name, made.spec.adapter.uri, made.spec.adapter.digest or "")


def pod(name, text="[]", report=NOTHING, *, ready=True, role="both"):
    status = {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}
    meta = {"labels": {labels.ROLE: role, labels.SERVING: "true"}, "annotations": {labels.ADAPTERS: text}}
    return AdapterPod.of(observed("Pod", name, meta=meta, status=status), report)


class Cluster:
    """Pods that do what their annotations ask, when they are told to answer."""

    def __init__(self, *names):
        self.pods = {name: pod(name) for name in names}
        self.models = {}
        self.told = {}
        self.broken = set()
        self.now = NOW
        self.states: dict[str, AdapterState] = {}

    def models_told(self):
        for name, made in self.models.items():
            told = self.told.get(name)
            yield made if told is None else made.model_copy(update={"status": {"adapter": told}})

    def plan(self):
        plan = plan_adapters(self.models_told(), [TINY], {"tiny": [*self.pods.values()]}, self.now)
        self.states, self.again_s = plan.states, plan.again_s
        for of, text in plan.writes:
            before = self.pods[of.ref.name]
            self.pods[before.name] = pod(before.name, text, before.report, ready=before.ready)
        statuses = model_statuses(self.models_told(), [TINY], self.now, self.states)
        self.told = {name: dict(status["adapter"]) for name, status in statuses.items() if "adapter" in status}
        return plan.writes

    def answer(self, name):
        one = self.pods[name]
        good = {wish.name: "d" for wish in one.asked.values() if (name, wish.uri) not in self.broken}
        bad = {version: "no" for version in one.asked if version not in good}
        self.pods[name] = pod(name, one.text, AdapterReport(good, bad), ready=one.ready)

    def settle(self):
        """All pods answer and time passes, until nothing is planned."""
        for _ in range(8):
            for name in self.pods:
                self.answer(name)
            self.now += timedelta(seconds=SETTLE_S)
            if not self.plan() and self.again_s != 1.0:
                return
        raise AssertionError("the plan does not come to rest")

    def holders(self, wanted):
        return {one.name for one in self.pods.values() if wanted in one.asked}

    def serving(self, name):
        """The ready pods that can answer for a model's name."""
        served = self.told.get(name, {}).get("name", "")
        return {one.name for one in self.pods.values() if one.ready and one.has(served)}


NAMES = st.sampled_from(["sql", "poet"])
URIS = st.sampled_from(["hf://o/a", "hf://o/b", "hf://o/c"])
REPLICAS = st.none() | st.integers(1, 2)
PODS = st.sampled_from([f"pod-{number}" for number in range(3)])


class Journey(RuleBasedStateMachine):
    @initialize(count=st.integers(0, 3))
    def begin(self, count):
        self.cluster = Cluster(*(f"pod-{number}" for number in range(count)))
        self.left = {}

    @rule(name=NAMES, uri=URIS, replicas=REPLICAS)
    def want(self, name, uri, replicas):
        self.cluster.models[name] = adapted(name, uri, replicas=replicas)

    @rule(name=NAMES)
    def delete(self, name):
        self.cluster.models.pop(name, None)
        self.cluster.told.pop(name, None)
        self.left = {(other, old): at for (other, old), at in self.left.items() if other != name}

    @rule(name=PODS)
    def come(self, name):
        self.cluster.pods.setdefault(name, pod(name))

    @rule(name=PODS)
    def go(self, name):
        self.cluster.pods.pop(name, None)

    @rule(name=PODS, ready=st.booleans())
    def ready(self, name, ready):
        if (one := self.cluster.pods.get(name)) is not None:
            self.cluster.pods[name] = pod(name, one.text, one.report, ready=ready)

    @rule(name=PODS, uri=URIS)
    def break_(self, name, uri):
        self.cluster.broken.add((name, uri))

    @rule(name=PODS)
    def answer(self, name):
        if name in self.cluster.pods:
            self.cluster.answer(name)

    @rule()
    def answer_all(self):
        for name in self.cluster.pods:
            self.cluster.answer(name)

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds):
        self.cluster.now += timedelta(seconds=seconds)

    @rule()
    def heal(self):
        self.cluster.broken.clear()
        self.cluster.settle()
        ready = {one.name for one in self.cluster.pods.values() if one.ready}
        for name, made in self.cluster.models.items():
            wanted = min(made.spec.adapter.replicas or len(ready), len(ready))
            holders = self.cluster.holders(version(made)) & ready
            assert len(holders) == wanted
            assert self.cluster.serving(name) == holders
        versions = {version(made) for made in self.cluster.models.values()}
        for one in self.cluster.pods.values():
            assert not one.ready or one.asked.keys() <= versions, "what nobody wants is unloaded"

    @invariant()
    def no_request_loses_its_last_pod_and_a_plan_is_not_repeated(self):
        cluster = self.cluster
        served = {name: told["name"] for name, told in cluster.told.items() if "name" in told}
        before = {name: cluster.serving(name) for name in cluster.models}
        cluster.plan()
        for name, could in before.items():
            assert not could or cluster.serving(name), "the last pod with an adapter was told to drop it"
        for name, old in served.items():
            self.left.setdefault((name, old), cluster.now)
            if cluster.told[name]["name"] == old:
                self.left[name, old] = cluster.now
        for (name, old), at in self.left.items():
            if name in cluster.models and cluster.now - at < timedelta(seconds=SETTLE_S - 1):
                kept = {one.name for one in cluster.pods.values() if one.ready and old in one.report.loaded}
                assert not kept or kept & cluster.holders(old), "requests may be on their way to what served"
        assert not cluster.plan()


TestJourney = Journey.TestCase
TestJourney.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.fixture
def five():
    made = Cluster(*(f"pod-{number}" for number in range(5)))
    for number in range(20):
        made.models[f"m{number}"] = adapted(f"m{number}", replicas=2)
    made.settle()
    return made


def test_adapters_are_spread_and_only_those_of_a_pod_that_goes_move(five):
    before = {name: five.holders(version(made)) for name, made in five.models.items()}
    assert {len(holders) for holders in before.values()} == {2}
    assert len({holder for holders in before.values() for holder in holders}) == 5
    del five.pods["pod-2"]
    five.settle()
    for name, made in five.models.items():
        after = five.holders(version(made))
        assert len(after) == 2
        assert before[name] - {"pod-2"} <= after, "no adapter leaves a pod because another pod went"


def test_a_pod_that_comes_back_gets_its_adapters_and_others_keep_them_until_it_has():
    cluster = Cluster("pod-0", "pod-1", "pod-2")
    cluster.models["sql"] = made = adapted(replicas=1)
    cluster.settle()
    (first,) = cluster.holders(version(made))
    gone = cluster.pods.pop(first)
    cluster.settle()
    (other,) = cluster.holders(version(made))
    cluster.pods[gone.name] = pod(gone.name)
    cluster.plan()
    assert cluster.holders(version(made)) == {first, other}
    cluster.settle()
    assert cluster.holders(version(made)) == {first}


def test_another_source_is_loaded_beside_the_old_one_gets_the_requests_and_then_the_old_one_leaves():
    cluster = Cluster("pod-0", "pod-1")
    cluster.models["sql"] = old = adapted(uri="hf://o/a")
    cluster.settle()
    cluster.models["sql"] = new = adapted(uri="hf://o/b")
    cluster.plan()
    assert cluster.holders(version(old)) == cluster.holders(version(new)) == {"pod-0", "pod-1"}
    cluster.answer("pod-0")
    cluster.plan()
    assert cluster.told["sql"]["name"] == version(old), "one of two pods does not have it yet"
    cluster.answer("pod-1")
    cluster.plan()
    assert cluster.told["sql"]["name"] == version(new)
    assert cluster.holders(version(old)), "requests may be on their way"
    cluster.now += timedelta(seconds=SETTLE_S)
    cluster.plan()
    assert not cluster.holders(version(old))


def test_a_source_that_cannot_be_loaded_takes_nothing_away_and_says_where_and_why():
    cluster = Cluster("pod-0", "pod-1", "pod-2")
    cluster.models["sql"] = old = adapted(uri="hf://o/a")
    cluster.settle()
    cluster.models["sql"] = adapted(uri="hf://o/b")
    cluster.broken.add(("pod-1", "hf://o/b"))
    cluster.settle()
    assert cluster.told["sql"]["name"] == version(old)
    assert cluster.holders(version(old)) == {"pod-0", "pod-1", "pod-2"}
    (status,) = model_statuses(cluster.models_told(), [TINY], cluster.now, cluster.states).values()
    condition = status["conditions"][1]
    assert (condition["type"], condition["status"], condition["reason"]) == ("AdapterLoaded", "False", "AdapterFailing")
    assert condition["message"].startswith("loaded on 2 of 3 pods: pod pod-1: no. Correct spec.adapter")
    assert (status["adapter"]["loaded"], status["adapter"]["wanted"]) == (2, 3)


@pytest.mark.parametrize("text", ["no json", '[{"x":' + "[" * 99_999], ids=["words", "deep"])
def test_an_annotation_that_somebody_else_wrote_is_written_over(text):
    ((_, text),) = plan_adapters([adapted()], [TINY], {"tiny": [pod("p", text)]}, NOW).writes
    assert wishes_of(text).keys() == {version(adapted())}


def test_a_silent_pod_is_named_and_holds_up_no_other():
    pods = [pod("pod-0", report=AdapterReport(errors={"": "it does not answer"})), pod("pod-1")]
    plan = plan_adapters([adapted()], [TINY], {"tiny": pods}, NOW)
    assert written(plan) == ["pod-0", "pod-1"]
    assert plan.states["sql"].problems == {"pod-0": "it does not answer"}


@pytest.mark.parametrize(
    ("of", "uri", "why"),
    [
        (pool(), "hf://o/a", "pool tiny has no engine.lora"),
        (TINY, "pvc://others/a", "claim others is none of engine.lora.claims of pool tiny"),
    ],
)
def test_a_pool_that_cannot_have_an_adapter_says_so_and_keeps_what_serves(of, uri, why):
    served = adapted(uri="hf://o/first")
    wishes = wishes_text(_wishes(served))
    there = pod("pod-0", wishes, AdapterReport({version(served): "d"}))
    made = adapted(uri=uri, told={"name": version(served), "since": "2026-11-01T00:00:00Z"})
    plan = plan_adapters([made], [of], {"tiny": [there]}, NOW)
    assert not plan.writes
    (status,) = model_statuses([made], [of], NOW, plan.states).values()
    assert (status["conditions"][1]["reason"], status["adapter"]["name"]) == ("AdapterRefused", version(served))
    assert why in status["conditions"][1]["message"]


def test_a_pool_that_cannot_have_an_adapter_any_more_keeps_it_where_it_is():
    made = adapted(uri="pvc://others/a")
    wishes = wishes_text(_wishes(made, pool(engine={"lora": {"claims": ["others"]}})))
    there = pod("pod-0", wishes, AdapterReport({version(made): "d"}))
    served = adapted(uri="pvc://others/a", told={"name": version(made), "since": "2026-11-01T00:00:00Z"})
    assert not plan_adapters([served], [TINY], {"tiny": [there]}, NOW).writes


def test_a_claim_of_the_pool_is_no_reason_to_refuse():
    assert plan_adapters([adapted(uri="pvc://sets/a")], [TINY], {"tiny": [pod("p")]}, NOW).writes


def test_pods_with_different_files_under_one_name_are_a_problem():
    made = adapted()
    wishes = wishes_text(_wishes(made))
    pods = [pod(name, wishes, AdapterReport({version(made): digest})) for name, digest in ("ax", "by")]
    states = plan_adapters([made], [TINY], {"tiny": pods}, NOW).states
    (status,) = model_statuses([made], [TINY], NOW, states).values()
    assert "with different files: x on a, y on b. Set spec.adapter.digest" in status["conditions"][1]["message"]
    assert "digest" not in status["adapter"]


def test_more_adapters_than_an_annotation_has_room_for_take_no_others_away():
    cluster = Cluster("pod-0", "pod-1")
    cluster.models = {f"m{number}": adapted(f"m{number}", f"s3://bucket/{'x' * 480}{number}") for number in range(400)}
    cluster.settle()
    before = {name: cluster.serving(name) for name in cluster.models}
    served = [name for name in before if before[name]]
    assert served == [f"m{number}" for number in range(len(served))], "the oldest"
    assert 300 < len(served) < 400
    assert all(len(one.text) <= MOST_TEXT for one in cluster.pods.values())
    full = "its annotation has no room for more adapters"
    assert cluster.states["m399"].problems == dict.fromkeys(cluster.pods, full)
    cluster.models = {"older": adapted("older", f"s3://bucket/{'y' * 480}"), **cluster.models}
    cluster.settle()
    assert {name: cluster.serving(name) for name in before} == before
    del cluster.models["m0"]
    cluster.settle()
    assert cluster.serving("older") == {"pod-0", "pod-1"}


def test_what_pods_are_asked_for_is_looked_through_once_for_all_models(monkeypatch):
    cluster = Cluster("pod-0", "pod-1", "pod-2")
    cluster.models = {f"m{number}": adapted(f"m{number}") for number in range(40)}
    cluster.plan()
    for name in cluster.pods:
        cluster.answer(name)
    cluster.plan()
    looks, model_name = [], plans._model_name
    monkeypatch.setattr(plans, "_model_name", lambda wish: looks.append(wish) or model_name(wish))
    cluster.plan()
    assert not any(state.is_settled(cluster.now) for state in cluster.states.values())
    assert len(looks) == 3 * 40


def test_each_side_of_a_pool_has_its_own_pods_and_a_draining_pod_keeps_what_it_has():
    made = adapted(replicas=1)
    pods = [pod("a", role="prefill"), pod("b", role="prefill"), pod("c", role="decode")]
    asked = written(plan_adapters([made], [TINY], {"tiny": pods}, NOW))
    assert len(asked) == 2
    assert "c" in asked
    wishes = wishes_text(_wishes(made))
    leaving = pod("z", wishes, AdapterReport({version(made): "d"}), ready=False)
    assert written(plan_adapters([made], [TINY], {"tiny": [leaving, pod("a")]}, NOW)) == ["a"]


def test_adapters_of_models_that_cannot_be_read_stay_and_those_of_nobody_go():
    wishes = wishes_text(_wishes(adapted("sql")))
    there = pod("p", wishes)
    assert not plan_adapters([], [TINY], {"tiny": [there]}, NOW, unread={"sql"}).writes
    ((_, text),) = plan_adapters([], [TINY], {"tiny": [there]}, NOW).writes
    assert text == "[]"


def written(plan):
    return [of.ref.name for of, _ in plan.writes]


def _wishes(made, of=TINY):
    ((_, text),) = plan_adapters([made], [of], {"tiny": [pod("x")]}, NOW).writes
    return wishes_of(text).values()
