"""Decisions that name one endpoint for the prompt and another for the answer."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_epp.endpoints.scraped import ScrapedLoad
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.transfer import Protocol, Role, Transfer, why_not
from treeline_epp.picking.decision import Decision, Lease, NoEndpoints, Outcome
from treeline_epp.picking.pairs import HANDOVER_S, problem_of
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.request import Request
from treeline_wire.load import TreelineLoad

NIXL, SGLANG, SIDECAR, OURS = (Transfer(protocol) for protocol in Protocol)
LONG = Request("id", prompt_tokens_estimate=40_000, apart=True)
SHORT = Request("id", prompt_tokens_estimate=40, apart=True)


def spec(name: str, role: Role = Role.BOTH, transfer: Transfer | None = NIXL, pool: str = "default") -> EndpointSpec:
    number = sum(map(ord, name)) % 250
    return EndpointSpec(name, f"10.0.0.{number}:8000", pool=pool, role=role, transfer=transfer)


def picker_of(*specs: EndpointSpec, **settings: int) -> Picker:
    picker = Picker(PickerConfig(**settings))
    for one in specs:
        picker.add_endpoint(one)
    return picker


def pair(transfer: Transfer = NIXL) -> Picker:
    return picker_of(spec("p", Role.PREFILL, transfer), spec("d", Role.DECODE, transfer))


def busy(picker: Picker, name: str, running: int = 0, now: float = 0.0) -> None:
    picker.on_load(name, ScrapedLoad(running=running), now)


def prefill_of(decision: Decision) -> str | None:
    return None if decision.prefill is None else decision.prefill.candidate.spec.name


def reserved(picker: Picker) -> dict[str, int]:
    return {name: one.load.reservations.tokens for name, one in picker.endpoints.items()}


# -- the choice


def test_a_long_prompt_is_computed_apart_while_requests_run_at_the_endpoint_that_answers() -> None:
    picker = pair()
    busy(picker, "d", running=16)
    decision = picker.pick(LONG, 0.0)
    assert (decision.endpoint.name, prefill_of(decision)) == ("d", "p")
    assert decision.apart is not None
    assert sum(decision.apart.apart.values()) < sum(decision.apart.whole.values())
    assert decision.ttft_s == decision.apart.ttft_s > HANDOVER_S
    assert decision.destinations == (decision.endpoint.address,), "the prefill endpoint is no fallback"


def test_it_stays_whole_where_nothing_else_runs_or_the_prefill_endpoint_is_busier() -> None:
    picker = pair()
    busy(picker, "d")
    decision = picker.pick(LONG, 0.0)
    assert prefill_of(decision) is None
    assert decision.apart is not None
    assert decision.apart.prompt_s == 0
    busy(picker, "d", running=4, now=0.1)
    assert prefill_of(picker.pick(LONG, 0.1)) == "p"
    picker.parts.charge(picker.endpoints["p"], 400_000, 100.0, 0.1)
    decision = picker.pick(LONG, 0.1)
    assert decision.apart is not None, "both forms were compared"
    assert prefill_of(decision) is None
    assert decision.apart.prompt_s == decision.apart.prefill.prefill_s > 0, "more prefill endpoints would have work"


def test_short_prompts_and_requests_that_cannot_be_split_stay_whole() -> None:
    picker = pair()
    busy(picker, "d", running=2)
    assert picker.pick(SHORT, 0.0).apart is None
    assert picker.pick(Request("id", prompt_tokens_estimate=40_000), 0.0).apart is None


def test_the_cheapest_of_the_fitting_ready_prefill_endpoints_computes_the_prompt() -> None:
    other = replace(NIXL, alike=(("block size", "32"),))
    picker = picker_of(
        spec("d", Role.DECODE, replace(NIXL, alike=(("block size", "16"),))),
        spec("wrong", Role.PREFILL, other),
        spec("q", Role.PREFILL),
        spec("r", Role.PREFILL),
        spec("elsewhere", Role.PREFILL, pool="other"),
    )
    busy(picker, "d", running=64)
    picker.parts.charge(picker.endpoints["q"], 4000, 1.0, 0.0)
    assert prefill_of(picker.pick(LONG, 0.0)) == "r"
    picker.set_ready("r", False)
    assert prefill_of(picker.pick(LONG, 0.0)) == "q"
    for _ in range(3):
        picker.endpoints["q"].breaker.on_error(0.0)
    picker.parts.charge(picker.endpoints["q"], 0, 0.0, 0.0)  # marks it as changed
    assert prefill_of(picker.pick(LONG, 0.0)) is None


def test_prefill_endpoints_serve_no_request_alone() -> None:
    picker = picker_of(spec("p", Role.PREFILL))
    assert not picker.has_ready("default", None)
    with pytest.raises(NoEndpoints):
        picker.pick(LONG, 0.0)
    picker.add_endpoint(spec("d", Role.DECODE))
    assert {picker.pick(request, 0.0).endpoint.name for request in (LONG, SHORT)} == {"d"}
    reasons = {one.endpoint: one.why for one in picker.explain(LONG, 0.0).endpoints}
    assert reasons["p"] == "computes prompts only"


def test_an_endpoint_that_computes_no_prompts_gets_requests_only_with_a_partner() -> None:
    picker = picker_of(spec("d", Role.DECODE, SGLANG))
    with pytest.raises(NoEndpoints, match="compute the prompt"):
        picker.pick(LONG, 0.0)
    picker.add_endpoint(spec("p", Role.PREFILL, SGLANG))
    assert prefill_of(picker.pick(SHORT, 0.0)) == "p", "however short"
    with pytest.raises(NoEndpoints):
        picker.pick(replace_apart(SHORT), 0.0)
    with pytest.raises(NoEndpoints, match="compute the prompt"):
        picker.pick(Request("id", apart=True, subset=frozenset({picker.endpoints["d"].spec.address})), 0.0)
    picker.add_endpoint(spec("whole", Role.BOTH, None))
    assert picker.pick(replace_apart(SHORT), 0.0).endpoint.name == "whole"
    picker.set_ready("p", False)
    assert picker.pick(SHORT, 0.0).endpoint.name == "whole"


def replace_apart(request: Request) -> Request:
    return Request(request.request_id, prompt_tokens_estimate=request.prompt_tokens_estimate)


def test_a_fallback_can_take_over_what_the_first_one_was_sent() -> None:
    specs = [spec("d", Role.DECODE), spec("e", Role.DECODE), spec("whole"), spec("p", Role.PREFILL)]
    picker = picker_of(*specs, fallbacks=3)
    for name in ("d", "e"):
        busy(picker, name, running=16)
    picker.parts.charge(picker.endpoints["whole"], 4000, 1.0, 0.0)
    apart, whole = picker.pick(LONG, 0.0), picker.pick(SHORT, 0.0)
    assert prefill_of(apart) == "p"
    assert {one.name for one in apart.fallbacks} == {"d", "e"} - {apart.endpoint.name}
    assert len(whole.fallbacks) == 2
    picker = picker_of(spec("whole"), spec("d", Role.DECODE, SGLANG), spec("p", Role.PREFILL, SGLANG))
    picker.parts.charge(picker.endpoints["d"], 4000, 1.0, 0.0)
    decision = picker.pick(SHORT, 0.0)
    assert (decision.endpoint.name, decision.fallbacks) == ("whole", ())


def test_no_fallback_gets_its_prompts_in_another_way() -> None:
    picker = picker_of(
        spec("s", Role.DECODE, SIDECAR), spec("m", Role.DECODE, SGLANG), spec("p", Role.PREFILL, SGLANG), fallbacks=3
    )
    busy(picker, "s", running=16)
    picker.parts.charge(picker.endpoints["m"], 400_000, 100.0, 0.0)
    decision = picker.pick(LONG, 0.0)
    assert (decision.endpoint.name, prefill_of(decision), decision.fallbacks) == ("s", "p", ())


def test_a_pool_whose_endpoints_compute_no_prompts_is_ready_with_a_prefill_endpoint() -> None:
    picker = picker_of(spec("d", Role.DECODE, SGLANG))
    assert not picker.has_ready("default", None)
    picker.add_endpoint(spec("p", Role.PREFILL, SGLANG))
    assert picker.has_ready("default", None)


def test_measured_transfers_count() -> None:
    picker = pair()
    for at, (tokens, seconds) in enumerate([(0.0, 0.0), (100_000.0, 500.0)]):
        picker.on_load("d", ScrapedLoad(running=16, transfers=(tokens, seconds)), float(at))
    decision = picker.pick(LONG, 1.0)
    assert decision.apart is not None
    assert decision.apart.apart["transfer_s"] == pytest.approx(HANDOVER_S + 40_000 * 0.005)
    assert prefill_of(decision) is None


@pytest.mark.parametrize(("token_s", "after"), [(1e-4, 2048 * 1e-4), (5e-4, 40_000 * 5e-4 - 10.0)])
def test_of_our_transfer_only_what_comes_after_the_prompt_counts(token_s: float, after: float) -> None:
    picker = pair(OURS)
    load = TreelineLoad(pages_total=10_000, page_size=16, prefill_tokens_per_s=4000.0, running=16)
    for name in ("p", "d"):
        picker.on_load(name, msgspec.structs.replace(load, peer_tokens_per_s=1 / token_s), 0.0)
    decision = picker.pick(LONG, 0.0)
    assert decision.apart is not None
    assert decision.apart.apart["transfer_s"] == pytest.approx(HANDOVER_S + after)


def test_an_endpoint_without_measurements_is_taken_for_as_fast_as_the_other_one() -> None:
    for measured in ("p", "d"):
        picker = pair()
        busy(picker, "d", running=16)
        picker.endpoints[measured].load.train(100, 100, 1.0, 0.0)
        for ready in (False, True):  # marks it as changed
            picker.set_ready(measured, ready)
        decision = picker.pick(LONG, 0.0)
        assert decision.apart is not None
        assert decision.apart.whole["first_token_s"] == pytest.approx(200, rel=0.01)
        assert decision.apart.apart["first_token_s"] == pytest.approx(200, rel=0.01)
        assert prefill_of(decision) == "p"


def test_each_prompt_measures_its_endpoint_and_a_late_one_too() -> None:
    picker = pair()
    busy(picker, "d", running=16)
    lease = leased(picker)
    picker.parts.prefilled(lease, Outcome.ERROR, 10.0, took_s=10.0)
    assert picker.endpoints["p"].load.own_rate() == 4000
    busy(picker, "d", running=16, now=10.0)
    lease = picker.reserve(picker.pick(LONG, 10.0), 10.0)
    picker.parts.prefilled(lease, Outcome.HEADERS, 60.0, took_s=50.0)
    assert picker.endpoints["p"].load.own_rate() < 4000


# -- leases


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("served", [None, "10.0.0.99:1"])
def test_a_lease_of_two_endpoints_charges_both_and_releases_both(outcome: Outcome, served: str | None) -> None:
    picker = pair()
    busy(picker, "d", running=16)
    decision = picker.pick(LONG, 0.0)
    lease = picker.reserve(decision, 0.0)
    assert reserved(picker) == {"p": 40_000, "d": 0}
    assert len(picker.endpoints["d"].load.reservations) == 1, "it counts as a request there"
    assert picker.close(lease, 0.1, outcome, served=served, ttft_s=0.1)
    assert reserved(picker) == {"p": 0, "d": 0}
    assert not picker.close(lease, 0.2, outcome)
    picker.remove_endpoint("p")
    with pytest.raises(NoEndpoints):
        picker.reserve(decision, 0.3)
    assert len(picker.endpoints["d"].load.reservations) == 0, "the one that is left is not charged either"


@given(st.permutations(["prefilled", "answered", "gone"]), st.sampled_from(list(Outcome)), st.booleans())
def test_each_order_of_ends_leaves_no_reservation(events: list[str], outcome: Outcome, called: bool) -> None:
    picker = pair()
    busy(picker, "d", running=16)
    lease = picker.reserve(picker.pick(LONG, 0.0), 0.0)
    assert lease.prefill is not None
    lease.prefill.cancel = (lambda: None) if called else None
    for event in events:
        if event == "prefilled":
            picker.parts.prefilled(lease, outcome, 0.1)
        else:
            picker.close(lease, 0.2, Outcome.HEADERS if event == "answered" else Outcome.CANCELLED, ttft_s=0.1)
        for endpoint in picker.endpoints.values():
            endpoint.load.reservations.check()
    assert reserved(picker) == {"p": 0, "d": 0}
    assert [len(one.load.reservations) for one in picker.endpoints.values()] == [0, 0]


def test_a_prompt_that_failed_is_charged_where_the_answer_is_computed() -> None:
    picker = pair()
    busy(picker, "d", running=16)
    lease = leased(picker)
    picker.parts.prefilled(lease, Outcome.ERROR, 0.1)
    assert reserved(picker) == {"p": 0, "d": 40_000}
    assert picker.endpoints["p"].breaker.errors == 1
    lease = leased(picker)
    picker.parts.prefilled(lease, Outcome.HEADERS, 0.1)
    assert picker.endpoints["p"].breaker.errors == 0


def leased(picker: Picker) -> Lease:
    return picker.reserve(picker.pick(LONG, 0.0), 0.0)


def test_both_endpoints_are_predicted_to_hold_the_prompt_until_one_fails() -> None:
    picker = pair()
    busy(picker, "d", running=16)
    request = Request("id", key=b"abcd" * 40_000, prompt_tokens_estimate=40_000, apart=True)
    lease = picker.reserve(picker.pick(request, 0.0), 0.0)

    def holders() -> set[str]:
        match = picker.index.match("default", None, request.key or b"", 0.1)
        return {name for name, one in picker.endpoints.items() if match.hit(one.pod).reach}

    assert holders() == {"p", "d"}
    picker.parts.prefilled(lease, Outcome.ERROR, 0.1)
    assert holders() == {"d"}
    picker.close(lease, 0.1, Outcome.CANCELLED)
    assert holders() == set()


# -- pairs that fit


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        (NIXL, NIXL, ""),
        (NIXL, SIDECAR, ""),
        (None, SIDECAR, ""),
        (None, NIXL, "name it"),
        (NIXL, None, "name it"),
        (SGLANG, NIXL, "sglang at the prefill endpoint and nixl at the decode endpoint"),
        (replace(NIXL, alike=(("block size", "16"),)), NIXL, ""),
        (
            replace(NIXL, alike=(("version of vLLM", "1"), ("block size", "16"))),
            replace(NIXL, alike=(("block size", "32"), ("version of vLLM", "1"))),
            "the block size is 16 at the prefill endpoint and 32 at the decode endpoint",
        ),
        (
            replace(NIXL, alike=(("model", "a"),)),
            replace(SIDECAR, alike=(("model", "b"),)),
            "the model is a at the prefill endpoint and b at the decode endpoint",
        ),
    ],
)
def test_engines_that_do_not_fit_are_told_apart(prefill: Transfer | None, decode: Transfer | None, why: str) -> None:
    found = why_not(prefill, decode)
    assert (why in found) if why else not found


def test_an_endpoint_without_a_partner_has_a_problem() -> None:
    p, d, s = spec("p", Role.PREFILL), spec("d", Role.DECODE), spec("s", Role.DECODE, SGLANG)
    assert problem_of(p, [p]) == ("its pool has no decode endpoint yet", False)
    assert problem_of(d, [d]) == ("", False), "it serves whole requests"
    assert problem_of(s, [s]) == ("its pool has no prefill endpoint yet", False)
    assert problem_of(p, [p, d, s]) == ("", False)
    text, in_vain = problem_of(s, [p, s])
    assert text.startswith("it cannot be paired with p: nixl at the prefill endpoint")
    assert in_vain
    assert problem_of(spec("b"), [p, d, s]) == ("", False)


def test_our_runtimes_fit_if_they_make_the_same_pages_and_the_prefill_endpoint_gives_them() -> None:
    here, other = (replace(OURS, alike=(("fingerprint of pages", one),)) for one in ("ab", "cd"))
    assert why_not(here, replace(here, port=0)) == ""
    assert "--kv-transfer-port" in why_not(replace(here, port=0), here)
    assert "fingerprint" in why_not(here, other)


def test_what_an_endpoint_says_of_a_prompt_from_elsewhere_teaches_nothing_of_its_cache_and_speed() -> None:
    picker = pair(OURS)
    busy(picker, "d", running=64)
    for prefilled in (True, False):
        lease = picker.reserve(picker.pick(LONG, 0.0), 0.0)
        assert lease.prefill is not None
        if prefilled:
            picker.parts.prefilled(lease, Outcome.HEADERS, 1.0)
        picker.close(lease, 2.0, Outcome.HEADERS, ttft_s=2.0, cached_tokens=39_000, prompt_tokens=40_000)
        load = picker.endpoints["d"].load
        assert (load.hit_share, load.learned_rate) == (0.0, 0.0)
