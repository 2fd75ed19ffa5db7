"""Endpoints whose data-parallel ranks publish separately: caches are kept apart, the endpoint is one."""

from __future__ import annotations

from support.epp_core import KEYS, WIDTH, Prompt
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.member import RankLoads
from treeline_epp.picking.decision import Outcome
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.request import Request
from treeline_wire.events import AllBlocksCleared, BlockRemoved
from treeline_wire.load import LoadStat

PROMPT = Prompt([1] * 4 * WIDTH + [2] * 4 * WIDTH)


def two_of_two() -> Picker:
    picker = Picker()
    for name, port in (("a", 1), ("b", 2)):
        picker.add_endpoint(EndpointSpec(name, f"10.0.0.1:{port}"), ranks=2)
    return picker


def request(prompt: Prompt = PROMPT) -> Request:
    # The engine computes a prompt's end always: some text more than what is cached.
    return Request("id", key=prompt.key + b" and more", prompt_tokens_estimate=len(prompt.tokens) + 4)


def cached(picker: Picker, name: str) -> int:
    (known,) = [one.candidate for one in picker.pick(request(), 0.0).ranked if one.candidate.spec.name == name]
    return known.hit.tokens


def test_blocks_removed_by_one_rank_stay_held_by_the_other() -> None:
    picker = two_of_two()
    first, second = picker.endpoints["a"].pods
    for pod in (first, second):
        picker.index.apply(pod, PROMPT.stored(), KEYS)
    whole = cached(picker, "a")
    assert whole > 6 * WIDTH
    picker.index.apply(first, BlockRemoved(PROMPT.hashes[1:]), KEYS)
    assert cached(picker, "a") == whole
    picker.index.apply(second, BlockRemoved(PROMPT.hashes[6:]), KEYS)
    assert 4 * WIDTH <= cached(picker, "a") <= 6 * WIDTH
    picker.index.apply(second, AllBlocksCleared(), KEYS)
    assert cached(picker, "a") <= WIDTH
    assert picker.endpoints["a"].held_tokens == WIDTH
    assert cached(picker, "b") == 0
    picker.index.check()


def test_blocks_of_two_ranks_are_not_one_run() -> None:
    picker = two_of_two()
    first, second = picker.endpoints["a"].pods
    picker.index.apply(first, PROMPT.stored(0, 3), KEYS)
    picker.index.apply(second, PROMPT.stored(), KEYS)
    picker.index.apply(second, BlockRemoved(PROMPT.hashes[1:2]), KEYS)
    assert WIDTH < cached(picker, "a") <= 3 * WIDTH


def test_a_prediction_goes_to_the_rank_with_the_longest_hit_and_is_withdrawn_there() -> None:
    picker = two_of_two()
    second = picker.endpoints["a"].pods[1]
    picker.index.apply(second, PROMPT.stored(0, 4), KEYS)
    decision = picker.pick(request(), 0.0)
    assert (decision.endpoint.name, decision.best.candidate.rank) == ("a", 1)
    lease = picker.reserve(decision, 0.0)
    assert lease.answer.pod is second
    again = picker.pick(request(), 0.1).best.candidate
    assert (again.spec.name, again.rank) == ("a", 1)
    assert again.hit.reach > again.hit.end
    picker.close(lease, 0.2, Outcome.ERROR)
    assert picker.pick(request(), 0.3).ranked[0].candidate.hit.reach == lease.decision.best.candidate.hit.reach


def test_one_rank_that_publishes_shortens_the_predictions_of_all() -> None:
    picker = two_of_two()
    other = Prompt.random(5, 4)
    picker.index.apply(picker.endpoints["a"].pods[1], other.stored(), KEYS)
    picker.set_ready("b", False)
    lease = picker.reserve(picker.pick(request(), 0.0), 0.0)
    assert lease.answer.pod is picker.endpoints["a"].pods[0]
    assert lease.answer.predicted_until == picker.index.limits.prediction_life_s
    picker.set_ready("b", True)
    picker.set_ready("a", False)
    lease = picker.reserve(picker.pick(request(), 0.0), 0.0)
    assert lease.answer.predicted_until == picker.index.limits.eventless_life_s, "of this one no events are known"


def test_an_endpoint_with_fewer_ranks_starts_empty() -> None:
    picker = two_of_two()
    spec, pods = picker.endpoints["a"].spec, picker.endpoints["a"].pods
    picker.index.apply(pods[1], PROMPT.stored(), KEYS)
    assert picker.add_endpoint(spec, ranks=2).pods is pods
    assert len(picker.add_endpoint(spec, ranks=1).pods) == 1
    assert cached(picker, "a") == 0
    picker.remove_endpoint("a")
    picker.remove_endpoint("b")
    picker.index.check()


def test_the_engines_load_needs_a_report_of_every_rank() -> None:
    loads = RankLoads()
    one = LoadStat(1, 2, 3, 400, 0, 5, 6, 7, 1000, 50)
    assert loads.take(0, one, (0, 1)) is None
    both = loads.take(1, LoadStat(10, 20, 30, 400, 1, 50, 60, 7, 3000, 150), (0, 1))
    assert both == LoadStat(11, 22, 33, 800, 0, 55, 66, 14, 4000, 100), "their busy times overlap"
    newer = loads.take(0, LoadStat(2), (0, 1))
    assert newer is not None
    assert newer.num_running == 12
    assert RankLoads().take(0, one, (0,)) is one


def servers(*sizes: int) -> Picker:
    """Return a picker of servers a, b, … with so many ranks each, which requests name."""
    picker = Picker(PickerConfig(scored=8))
    for number, ranks in enumerate(sizes):
        server = EndpointSpec("abc"[number], f"10.0.0.{number + 1}:1")
        for spec in [server.at_rank(rank, ranks) for rank in range(ranks)] if ranks > 1 else [server]:
            picker.add_endpoint(spec)
    return picker


def test_a_named_rank_is_an_endpoint_of_its_own() -> None:
    picker = servers(3)
    assert list(picker.endpoints) == ["a", "a/1", "a/2"]
    assert {one.spec.server for one in picker.endpoints.values()} == {"a"}
    picker.index.apply(picker.endpoints["a/2"].pod, PROMPT.stored(), KEYS)
    picker.on_load("a", LoadStat(num_waiting=4, num_waiting_uncached_tokens=40_000), 0.0)
    picked = picker.pick(request(), 0.0)
    assert (picked.endpoint.name, picked.endpoint.rank, picked.destinations) == ("a/2", 2, ("10.0.0.1:1",))
    assert picker.pick(Request("other", prompt_tokens_estimate=9), 0.0).endpoint.name != "a", "it has work to do"
    picker.index.check()


def test_a_fallback_has_the_rank_that_the_request_names() -> None:
    picker = servers(4, 2)
    for rank, fallbacks in ((3, ()), (1, ("10.0.0.2:1",))):
        picker.index.clear(picker.endpoints["a/3"].pod)
        picker.index.apply(picker.endpoints[f"a/{rank}"].pod, PROMPT.stored(), KEYS)
        decision = picker.pick(request(), 0.0)
        assert (decision.endpoint.rank, decision.destinations[1:]) == (rank, fallbacks)


def test_a_server_with_many_ranks_still_has_another_one_as_fallback() -> None:
    picker = servers(8, 8)
    for rank in range(8):
        picker.index.apply(picker.endpoints["a" if rank == 0 else f"a/{rank}"].pod, PROMPT.stored(), KEYS)
    assert picker.pick(request(), 0.0).destinations == ("10.0.0.1:1", "10.0.0.2:1")


def test_a_prompt_that_a_fallback_answered_is_expected_at_the_rank_that_was_named() -> None:
    picker = servers(2, 2)
    picker.index.apply(picker.endpoints["a/1"].pod, PROMPT.stored(), KEYS)
    lease = picker.reserve(picker.pick(request(), 0.0), 0.0)
    assert lease.endpoint.spec.name == "a/1"
    picker.close(lease, 1.0, Outcome.HEADERS, served="10.0.0.2:1")
    found = {one.candidate.spec.name: one.candidate.hit.reach for one in picker.pick(request(), 1.0).ranked}
    assert found["b/1"] > found["b"] == 0
