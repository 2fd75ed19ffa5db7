"""The explanation of a decision makes the pick's own choice, and gives a reason against each other endpoint."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.epp_core import WIDTH, Prompt
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.decision import PickError
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.policies import POLICIES
from treeline_epp.picking.request import Request
from treeline_epp.requests.decision_log import KEPT, DecisionLog
from treeline_wire.load import TreelineLoad

PROMPT = Prompt([1] * 8 * WIDTH)


def a_picker(policy: str = "predicted_ttft", size: int = 3) -> Picker:
    picker = Picker(PickerConfig(policy, seed=3))
    for number in range(size):
        spec = EndpointSpec(f"e{number}", f"10.0.0.{number}:8000", pool="p", models=("m",))
        picker.add_endpoint(spec)
        picker.on_load(spec.name, TreelineLoad(prefill_tokens_per_s=1e4, waiting_uncached_tokens=number * 100), 0.0)
    return picker


def ask(**fields: object) -> Request:
    given = {"model": "m", "pool": "p", "key": PROMPT.key, "prompt_tokens_estimate": 32, **fields}
    return Request("id", **given)  # type: ignore[arg-type]


def why(picker: Picker, request: Request, now: float = 0.0) -> dict[str, str]:
    return {one.endpoint: one.why for one in picker.explain(request, now).endpoints}


def test_without_endpoints_the_explanation_is_a_refusal() -> None:
    told = Picker().explain(ask(subset=frozenset({"10.0.0.1"})), 0.0)
    assert (told.refusal, told.endpoints) == ("no endpoint is ready", ())


def test_an_excluded_endpoint_has_a_reason_in_words() -> None:
    picker = a_picker(size=8)
    picker.add_endpoint(EndpointSpec("other", "10.1.0.1:8000", pool="q"))
    picker.add_endpoint(EndpointSpec("elsewhere", "10.1.0.2:8000", pool="p", models=("n",)))
    picker.set_ready("e1", False)
    picker.set_draining("e2", True)
    for _ in range(3):
        picker.endpoints["e3"].breaker.on_error(2.5)
    picker.parts.touch(picker.endpoints["e3"])
    for name in ("e0", "e3", "e4", "e5"):
        picker.on_load(name, TreelineLoad(prefill_tokens_per_s=1e4), 3.0)
    found = why(picker, ask(subset=frozenset({f"10.0.0.{n}" for n in range(7)})), now=3.2)
    assert found == {
        "e0": "",
        "e4": "",
        "e5": "",
        "e1": "is not ready",
        "e2": "drains",
        "e3": "answered nothing but errors; tried again in 0.3 s",
        "e6": "has been silent for 3.2 s",
        "e7": "not in the subset that the proxy allows",
        "other": "is of pool q, and the request is for p",
        "elsewhere": "does not serve m",
    }


def test_a_refusal_is_explained_too() -> None:
    picker = a_picker(size=2)
    told = picker.explain(ask(subset=frozenset({"10.9.9.9"})), 0.0)
    assert told.refusal == "no ready endpoint is in the subset that the proxy allows"
    assert {one.why for one in told.endpoints} == {"not in the subset that the proxy allows"}
    picker.on_load("e0", TreelineLoad(prefill_tokens_per_s=1.0, waiting_uncached_tokens=10**7), 0.0)
    picker.on_load("e1", TreelineLoad(prefill_tokens_per_s=1.0, waiting_uncached_tokens=10**7), 0.0)
    told = picker.explain(ask(sheddable=True), 0.0)
    assert "sheddable" in told.refusal
    assert all(one.rank is None and "sheddable" in one.why for one in told.endpoints)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=15, deadline=None)
@given(broken=st.sets(st.integers(0, 5)), silent=st.sets(st.integers(0, 5)), draining=st.sets(st.integers(0, 5)))
def test_the_explanation_equals_the_next_pick_and_changes_nothing(
    policy: str, broken: set[int], silent: set[int], draining: set[int]
) -> None:
    first, second = a_picker(policy, 6), a_picker(policy, 6)
    for picker in (first, second):
        for number in range(6):
            if number not in silent:
                picker.on_load(f"e{number}", TreelineLoad(prefill_tokens_per_s=1e4), 2.0)
            picker.set_draining(f"e{number}", number in draining)
            for _ in range(3 if number in broken else 0):
                picker.endpoints[f"e{number}"].breaker.on_error(3.2)
    for at in range(4):
        request, now = ask(key=b"%d" % at), 3.5
        told = first.explain(request, now)
        if told.refusal:
            with pytest.raises(PickError) as refused:
                first.pick(request, now)
            assert told.refusal == str(refused.value)
            continue
        picked = first.pick(request, now)
        assert second.pick(request, now).destinations == picked.destinations
        (best,) = (one for one in told.endpoints if one.rank == 1)
        assert (best.endpoint, best.terms["cost_s"]) == (picked.endpoint.name, round(picked.best.cost_s, 6))
        assert sorted(one.rank for one in told.endpoints if one.rank) == list(
            range(1, 1 + sum(one.why == "" for one in told.endpoints))
        )
        first.reserve(picked, now)
        second.reserve(picked, now)


def test_the_log_keeps_the_last_decisions_and_no_headers() -> None:
    picker, clock = a_picker(), [0.0]
    log = DecisionLog(lambda: clock[0], lambda: 99.0)
    request = ask(key=b"a" * 10_000)
    for _ in range(KEPT + 5):
        log.add(picker.pick(request, 0.0), None)
    kept = log.listing(1000)
    assert len(kept) == KEPT
    assert "secret" not in str(kept)
    assert "aaaa" not in str(kept), "nor their prompts"
    assert log.listing(0) == []
    assert (kept[0]["at"], kept[0]["endpoint"], kept[0]["policy"]) == (99.0, "e0", "predicted_ttft")


def test_looking_at_all_endpoints_takes_a_fiftieth_of_the_time_at_most() -> None:
    picker, times = a_picker(), iter([10.0, 10.1, 10.2, 15.0, 15.2, 15.3])
    log = DecisionLog(lambda: next(times), lambda: 0.0)
    asked = [log.explained(picker, ask(), 0.0) is not None for _ in range(3)]
    assert asked == [True, False, False]
    assert log.explained(picker, ask(), 0.0) is not None
    log.add(picker.pick(ask(), 0.0), picker.explain(ask(), 0.0))
    assert [one["endpoint"] for one in log.listing(1)[0]["endpoints"]] == ["e0", "e1", "e2"]
