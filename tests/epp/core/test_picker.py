"""Picks, leases and endpoints, with the index underneath."""

import random
from collections import Counter

import pytest
from support.epp_core import KEYS, WIDTH, Prompt
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.kvevents.states import SubscriptionState
from treeline_epp.kvevents.subscription import KvSubscription
from treeline_epp.picking.decision import Decision, NoEndpoints, Outcome, Saturated
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.request import Request
from treeline_wire.events import BlockRemoved
from treeline_wire.frames import Hello, HelloRequest
from treeline_wire.load import LoadStat, TreelineLoad

RATE = 10_000.0


def make(count: int = 3, **config: object) -> Picker:
    picker = Picker(PickerConfig(**config))  # type: ignore[arg-type]
    for number in range(count):
        spec = EndpointSpec(f"e{number}", f"10.0.0.{number}:8000", models=("m",))
        picker.add_endpoint(spec)
        picker.on_load(spec.name, TreelineLoad(prefill_tokens_per_s=RATE), now=0.0)
    return picker


def ask(prompt: Prompt | None = None, **fields: object) -> Request:
    fields.setdefault("model", "m")
    if prompt is not None:
        fields.setdefault("key", prompt.key)
        fields.setdefault("prompt_tokens_estimate", len(prompt.tokens))
        fields.setdefault("namespace", prompt.namespace)
    return Request("id", **fields)  # type: ignore[arg-type]


def store(picker: Picker, name: str, prompt: Prompt) -> None:
    picker.index.apply(picker.endpoints[name].pod, prompt.stored(), KEYS)


def name_of(decision: Decision) -> str:
    return decision.endpoint.name


# Who may be picked


def test_a_picker_without_endpoints_refuses() -> None:
    with pytest.raises(NoEndpoints) as caught:
        Picker().pick(ask(), now=0.0)
    assert (caught.value.status, caught.value.reason) == (503, "rejected-no-endpoints")


def test_draining_and_unready_endpoints_are_not_picked() -> None:
    picker = make(4)
    picker.set_ready("e0", False)
    picker.set_draining("e1", True)
    picker.on_load("e2", TreelineLoad(draining=True), now=0.0)
    assert {name_of(picker.pick(ask(), now=0.0)) for _ in range(20)} == {"e3"}
    picker.set_ready("e3", False)
    with pytest.raises(NoEndpoints):
        picker.pick(ask(), now=0.0)
    picker.set_ready("e0", True)
    assert name_of(picker.pick(ask(), now=0.0)) == "e0"


def test_model_and_pool_limit_the_choice() -> None:
    picker = Picker()
    picker.add_endpoint(EndpointSpec("a", "10.0.0.1:1", pool="p", models=("m1", "m2")))
    picker.add_endpoint(EndpointSpec("b", "10.0.0.2:1", pool="q"))
    assert {name_of(picker.pick(ask(model="m2", pool="p"), 0.0)) for _ in range(9)} == {"a"}
    assert {name_of(picker.pick(ask(model="m3"), 0.0)) for _ in range(9)} == {"b"}, "no models: any model"
    assert {name_of(picker.pick(ask(model="m1"), 0.0)) for _ in range(30)} == {"a", "b"}
    with pytest.raises(NoEndpoints):
        picker.pick(ask(model="m3", pool="p"), 0.0)


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        ({"10.0.0.1:8000"}, {"v4"}),
        ({"10.0.0.1"}, {"v4", "v4-rank1"}),
        ({" 10.0.0.1:8001 "}, {"v4-rank1"}),
        ({"[fd00::1]:8000"}, {"v6"}),
        ({"[FD00:0::0:1]:8000"}, {"v6"}),
        ({"fd00::1"}, {"v6"}),
        ({"[fd00::1]"}, {"v6"}),
        ({"10.0.0.1:8000", "[fd00::1]"}, {"v4", "v6"}),
        ({"10.0.0.9"}, set()),
        (set(), set()),
        ({"nonsense"}, set()),
    ],
)
def test_subsets(subset: set[str], expected: set[str]) -> None:
    picker = Picker()
    picker.add_endpoint(EndpointSpec("v4", "10.0.0.1:8000"))
    picker.add_endpoint(EndpointSpec("v4-rank1", "10.0.0.1:8001"))
    picker.add_endpoint(EndpointSpec("v6", "[fd00::1]:8000"))
    request = ask(subset=frozenset(subset))
    if expected:
        assert {name_of(picker.pick(request, 0.0)) for _ in range(60)} == expected
    else:
        with pytest.raises(NoEndpoints):
            picker.pick(request, 0.0)


def test_the_fallback_is_another_address() -> None:
    picker = Picker(PickerConfig(fallbacks=2))
    for name, address in [("a", "10.0.0.1:1"), ("a-again", "10.0.0.1:1"), ("b", "10.0.0.2:1")]:
        picker.add_endpoint(EndpointSpec(name, address))
    for _ in range(20):
        destinations = picker.pick(ask(), 0.0).destinations
        assert sorted(destinations) == ["10.0.0.1:1", "10.0.0.2:1"]
    assert len(make(1).pick(ask(), 0.0).destinations) == 1


def test_a_saturated_pool_refuses_sheddable_requests() -> None:
    picker = make(2, max_ttft_s=10.0)
    for name in ("e0", "e1"):
        picker.on_load(name, TreelineLoad(prefill_tokens_per_s=RATE, waiting_uncached_tokens=200_000), now=1.0)
    with pytest.raises(Saturated) as caught:
        picker.pick(ask(prompt_tokens_estimate=100, sheddable=True), now=1.0)
    assert (caught.value.status, caught.value.reason) == (429, "rejected-saturated")
    assert caught.value.retry_after_s == pytest.approx(10, abs=0.1), "until the queue is within the limit"
    picker.on_load("e1", TreelineLoad(prefill_tokens_per_s=RATE, waiting_uncached_tokens=150_000), now=1.0)
    decision = picker.pick(ask(prompt_tokens_estimate=100), now=1.0)
    assert decision.endpoint.name == "e1", "what must not be shed goes to the least loaded"


def test_a_long_prompt_does_not_count_as_a_queue() -> None:
    picker = make(2, max_ttft_s=10.0)
    decision = picker.pick(ask(prompt_tokens_estimate=int(60 * RATE), sheddable=True), now=1.0)
    assert decision.best.ttft_s > 10.0


# Endpoints come and go


def test_trap_14_a_new_process_behind_a_name_starts_empty() -> None:
    picker = make(1)
    prompt = Prompt.random(1, 20)
    store(picker, "e0", prompt)
    spec = EndpointSpec("e0", "10.0.0.0:8000", models=("m", "adapter"))
    assert picker.add_endpoint(spec) is picker.endpoints["e0"]
    assert picker.pick(ask(prompt), 0.0).best.candidate.cached_tokens > 0, "the same process with another model list"
    picker.add_endpoint(EndpointSpec("e0", "10.0.0.0:8000", models=("m",), uid="restarted"))
    assert picker.pick(ask(prompt), 0.0).best.candidate.cached_tokens == 0
    picker.remove_endpoint("e0")
    picker.remove_endpoint("e0")
    for step in range(3):
        picker.on_tick(float(step))
    assert picker.index.totals()["blocks"] == 0


def test_a_lease_may_outlive_its_endpoint() -> None:
    picker = make(1)
    prompt = Prompt.random(1, 20)
    decision = picker.pick(ask(prompt), 0.0)
    lease = picker.reserve(decision, 0.0)
    picker.remove_endpoint("e0")
    assert picker.close(lease, 1.0, Outcome.ERROR)
    with pytest.raises(NoEndpoints):
        picker.reserve(decision, 2.0)
    picker.index.check()


def test_reports_of_unknown_endpoints_are_ignored() -> None:
    picker = make(1)
    picker.set_ready("x", True)
    picker.set_draining("x", True)
    picker.on_load("x", LoadStat(), now=0.0)
    assert set(picker.endpoints) == {"e0"}


# Where a request goes


def test_a_prompt_goes_to_its_cached_prefix() -> None:
    picker = make()
    prompt = Prompt.random(1, 100)
    store(picker, "e1", prompt)
    decision = picker.pick(ask(prompt.extended(2, 5)), now=0.0)
    assert name_of(decision) == "e1"
    assert 98 * WIDTH <= decision.best.candidate.cached_tokens <= 100 * WIDTH
    assert decision.best.candidate.cached_tokens + decision.best.candidate.uncached_tokens == 105 * WIDTH
    assert decision.best.ttft_s == pytest.approx(decision.best.candidate.uncached_tokens / RATE)
    assert set(decision.terms) == {"e0", "e1", "e2"}
    assert decision.terms["e0"]["prefill_s"] == pytest.approx(105 * WIDTH / RATE)
    assert decision.explain()["endpoint"] == "e1"


def test_a_prompt_leaves_its_prefix_when_the_queue_costs_more_than_recomputing() -> None:
    picker = make()
    prompt = Prompt.random(1, 100)
    store(picker, "e1", prompt)
    for queued, there in [(300, True), (700, True), (1000, False)]:
        picker.on_load("e1", TreelineLoad(prefill_tokens_per_s=RATE, waiting_uncached_tokens=queued), now=1.0)
        assert (name_of(picker.pick(ask(prompt), now=1.0)) == "e1") is there


def test_slow_steps_move_a_long_answer_from_its_prefix_and_not_a_short_one() -> None:
    picker = make(2)
    prompt = Prompt.random(1, 100)
    store(picker, "e1", prompt)
    for step_ms in (5.0, 55.0):
        report = TreelineLoad(running=8, decode_step_ms=step_ms, prefill_tokens_per_s=RATE)
        picker.on_load("e1", report, now=0.0)
    assert name_of(picker.pick(ask(prompt), 0.0)) == "e0", "64 tokens of 50 ms more each"
    assert name_of(picker.pick(ask(prompt, max_output_tokens=1000), 0.0)) == "e0"
    assert name_of(picker.pick(ask(prompt, max_output_tokens=1), 0.0)) == "e1"


@pytest.mark.parametrize("keyed", [True, False])
def test_unrelated_and_unkeyed_prompts_spread(keyed: bool) -> None:
    picker = make()
    chosen: Counter[str] = Counter()
    for number in range(30):
        request = ask(Prompt.random(number, 50)) if keyed else ask(prompt_tokens_estimate=100)
        decision = picker.pick(request, now=0.1)
        picker.reserve(decision, now=0.1)
        chosen[name_of(decision)] += 1
    assert max(chosen.values()) == min(chosen.values()) == 10


def test_a_confirmed_hit_overrides_a_lower_estimate() -> None:
    picker = make(1)
    prompt = Prompt.random(1, 100)
    store(picker, "e0", prompt)
    decision = picker.pick(ask(prompt, prompt_tokens_estimate=10), now=0.0)
    assert decision.best.candidate.cached_tokens >= 98 * WIDTH
    assert decision.best.candidate.uncached_tokens == 1


def test_an_endpoint_that_refused_is_avoided_for_a_while() -> None:
    picker = make(2)
    prompt = Prompt.random(1, 20)
    store(picker, "e0", prompt)
    lease = picker.reserve(picker.pick(ask(prompt), 0.0), 0.0)
    picker.close(lease, 0.1, Outcome.OVERLOADED)
    assert name_of(picker.pick(ask(prompt), 0.1)) == "e1"
    assert name_of(picker.pick(ask(prompt), 2.0)) == "e0"


# Leases


def test_a_lease_closes_once() -> None:
    picker = make(1)
    lease = picker.reserve(picker.pick(ask(prompt_tokens_estimate=100), 0.0), 0.0)
    load = picker.endpoints["e0"].load
    assert load.reservations.tokens == 100
    assert picker.close(lease, 0.1, Outcome.HEADERS, cached_tokens=0, prompt_tokens=100)
    assert not picker.close(lease, 0.2, Outcome.OVERLOADED)
    assert load.reservations.tokens == 0
    assert load.overloaded_until < 0.2


def test_a_lost_stream_holds_its_reservation_for_three_times_the_prediction_at_most() -> None:
    picker = make(1)
    lease = picker.reserve(picker.pick(ask(prompt_tokens_estimate=50_000), 0.0), 0.0)
    load = picker.endpoints["e0"].load
    picker.on_tick(14.9)
    assert load.reservations.tokens == 50_000
    picker.on_tick(15.1)
    assert load.reservations.tokens == 0
    assert picker.close(lease, 16.0, Outcome.HEADERS)


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.CANCELLED, Outcome.OVERLOADED])
def test_a_failed_request_is_no_longer_predicted(outcome: Outcome) -> None:
    picker = make(1)
    prompt = Prompt.random(1, 50)
    lease = picker.reserve(picker.pick(ask(prompt), 0.0), 0.0)
    assert picker.pick(ask(prompt), 0.0).best.candidate.cached_tokens > 0
    picker.close(lease, 0.1, outcome)
    assert picker.pick(ask(prompt), 2.0).best.candidate.cached_tokens == 0


def test_feedback_counts_only_where_the_picked_endpoint_answered() -> None:
    picker = make(2)
    prompt = Prompt.random(1, 50)
    decision = picker.pick(ask(prompt), 0.0)
    lease = picker.reserve(decision, 0.0)
    (other,) = {"e0", "e1"} - {name_of(decision)}
    picker.close(
        lease,
        0.1,
        Outcome.HEADERS,
        served=picker.endpoints[other].spec.address,
        cached_tokens=9,
        prompt_tokens=10,
    )
    assert picker.endpoints[name_of(decision)].load.hit_share == 0
    assert name_of(picker.pick(ask(prompt), 0.2)) == other, "who answered holds the prompt now"


def test_streaming_answers_train_the_rate_of_engines_that_report_none() -> None:
    picker = Picker()
    picker.add_endpoint(EndpointSpec("e0", "10.0.0.0:1"))
    lease = picker.reserve(picker.pick(ask(prompt_tokens_estimate=1000), 0.0), 0.0)
    picker.close(lease, 0.5, Outcome.HEADERS, ttft_s=0.5, cached_tokens=0, prompt_tokens=1000)
    assert picker.endpoints["e0"].load.own_rate() == 2000
    assert picker.pick(ask(prompt_tokens_estimate=1000), 1.0).best.ttft_s == pytest.approx(0.5)


def test_an_unmeasured_endpoint_is_tried_beside_an_idle_fast_one() -> None:
    picker = make(3)
    picker.on_load("e1", TreelineLoad(prefill_tokens_per_s=RATE / 4), now=0.0)
    picker.on_load("e2", TreelineLoad(prefill_tokens_per_s=RATE / 4), now=0.0)
    picker.add_endpoint(EndpointSpec("new", "10.0.0.9:8000", models=("m",)))
    assert {name_of(picker.pick(ask(prompt_tokens_estimate=1000), 0.0)) for _ in range(20)} == {"e0", "new"}
    picker.on_load("new", TreelineLoad(prefill_tokens_per_s=RATE / 4), now=0.0)
    assert {name_of(picker.pick(ask(prompt_tokens_estimate=1000), 0.0)) for _ in range(20)} == {"e0"}


def test_an_endpoint_with_one_slow_measurement_is_tried_again() -> None:
    """Its first measurement fell into a pause of its machine; the error would stay if all requests went to the
    other."""
    picker = make(2)
    picker.on_load("e1", TreelineLoad(prefill_tokens_per_s=RATE / 20), now=0.0)
    picker.on_load("e0", TreelineLoad(prefill_tokens_per_s=RATE, running=3, waiting_uncached_tokens=500), now=0.0)
    assert name_of(picker.pick(ask(prompt_tokens_estimate=200), 0.0)) == "e1"


def test_an_endpoint_that_is_slow_under_load_gets_less() -> None:
    picker = make(2)
    for number in range(100):
        picker.on_load("e1", TreelineLoad(prefill_tokens_per_s=RATE / 20 + number), now=number / 10)
    picker.on_load("e0", TreelineLoad(prefill_tokens_per_s=RATE, waiting_uncached_tokens=500), now=10.0)
    assert name_of(picker.pick(ask(prompt_tokens_estimate=200), 10.0)) == "e0"


# Events and audits


def live_picker(prompts: list[Prompt]) -> tuple[Picker, KvSubscription]:
    """Return a picker with one endpoint that is followed and holds these prompts."""
    picker = make(1)
    subscription = KvSubscription(picker.index, picker.endpoints["e0"].pod, KEYS)
    assert subscription.on_connected(0.0) == [HelloRequest()]
    subscription.on_reply(Hello(7), 0.0)
    assert subscription.live
    for prompt in prompts:
        store(picker, "e0", prompt)
    return picker, subscription


def answer(picker: Picker, prompt: Prompt, cached: int, now: float) -> None:
    lease = picker.reserve(picker.pick(ask(prompt), now), now)
    picker.close(lease, now, Outcome.HEADERS, cached_tokens=cached, prompt_tokens=len(prompt.tokens))


def test_a_wrong_hit_lowers_trust_in_that_prefix_only() -> None:
    prompts = [Prompt.random(seed, 50) for seed in range(2)]
    picker, _ = live_picker(prompts)
    answer(picker, prompts[0], cached=10 * WIDTH, now=1.0)
    assert picker.pick(ask(prompts[0]), 1.0).best.candidate.hit.tokens == 10 * WIDTH
    assert picker.pick(ask(prompts[1]), 1.0).best.candidate.hit.tokens >= 48 * WIDTH
    assert not picker.endpoints["e0"].pod.rebuild_wanted


def test_wrong_hits_on_unrelated_prefixes_rebuild_the_index() -> None:
    prompts = [Prompt.random(seed, 50) for seed in range(4)]
    picker, subscription = live_picker(prompts)
    for number, prompt in enumerate(prompts):
        answer(picker, prompt, cached=0, now=1.0 + number / 10)
    assert subscription.on_tick(1.5) == [HelloRequest()]
    assert subscription.state is SubscriptionState.HELLO
    assert subscription.counts["rebuilds"] == 1


def test_more_blocks_than_the_engine_can_hold_rebuild_the_index() -> None:
    picker, _ = live_picker([Prompt.random(1, 50)])
    pod = picker.endpoints["e0"].pod
    picker.on_load("e0", TreelineLoad(epoch=7, pages_total=40, page_size=WIDTH), now=1.0)
    assert pod.rebuild_wanted
    pod.rebuild_wanted = False
    picker.on_load("e0", TreelineLoad(epoch=7, pages_total=40, page_size=WIDTH), now=1.1)
    assert not pod.rebuild_wanted, "not at every report"


# Quality


class SimPod:
    """A simple LRU cache of whole prefixes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: dict[int, None] = {}

    def serve(self, group: int) -> tuple[bool, int | None]:
        """Return (hit, evicted group)."""
        hit = self.held.pop(group, 0) is None
        self.held[group] = None
        evicted = next(iter(self.held)) if len(self.held) > self.room else None
        if evicted is not None:
            del self.held[evicted]
        return hit, evicted


def hit_rate(policy: str) -> float:
    """Return the hit rate of 16 shared prefixes × 8 requests on two pods with room for 10 prefixes each: together they
    have room for all, one alone has not."""
    rng = random.Random(5)
    picker = make(2, policy=policy)
    prefixes = [Prompt.random(seed, 64) for seed in range(16)]
    pods = {name: SimPod(10) for name in picker.endpoints}
    order = [group for group in range(16) for _ in range(8)]
    rng.shuffle(order)
    hits = 0
    now = 1.0
    for number, group in enumerate(order):
        now += 0.3
        for name in picker.endpoints:
            picker.on_load(name, TreelineLoad(prefill_tokens_per_s=2000, pages_total=640, page_size=WIDTH), now)
        picker.on_tick(now)
        request = ask(prefixes[group].extended(1000 + number, 4))
        lease = picker.reserve(picker.pick(request, now), now)
        name = lease.endpoint.spec.name
        hit, evicted = pods[name].serve(group)
        hits += hit
        store(picker, name, prefixes[group])
        if hit:  # stored twice by this test, not by the engine
            lease.endpoint.pod.copies.clear()
        if evicted is not None:
            picker.index.apply(lease.endpoint.pod, BlockRemoved(prefixes[evicted].hashes), KEYS)
        cached = 64 * WIDTH if hit else 0
        picker.close(lease, now + 0.1, Outcome.HEADERS, cached_tokens=cached, prompt_tokens=68 * WIDTH)
    picker.index.check()
    return hits / len(order)


def test_prefixes_stay_where_they_are() -> None:
    best = (128 - 16) / 128
    assert hit_rate("treeline") >= best - 0.02
    assert hit_rate("round_robin") < 0.75
    assert hit_rate("random") < 0.75


def test_answered_prompts_that_the_endpoint_did_not_hold_are_counted() -> None:
    picker = make(1)
    endpoint, prompt = picker.endpoints["e0"], Prompt(list(range(10 * WIDTH)))
    for outcome in (Outcome.ERROR, Outcome.HEADERS, Outcome.HEADERS):
        picker.close(picker.reserve(picker.pick(ask(prompt), now=1.0), now=1.0), 1.1, outcome)
    picker.close(picker.reserve(picker.pick(ask(), now=1.0), now=1.0), 1.1, Outcome.HEADERS)
    assert endpoint.keyed_prompts == 2
    assert 10 * WIDTH <= endpoint.new_tokens < 20 * WIDTH, "the second time it was predicted to hold it"
