"""The picker's rule for endpoints that have no room."""

from __future__ import annotations

import pytest
from support.epp_core import KEYS, Prompt
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.decision import Lease, NoEndpoints, Outcome, Saturated
from treeline_epp.picking.filters import Saturation
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.request import Request
from treeline_wire.load import LoadStat, TreelineLoad


def make(saturation: Saturation | None, *, reports: bool = True) -> Picker:
    picker = Picker(PickerConfig(saturation=saturation))
    for number in range(2):
        picker.add_endpoint(EndpointSpec(f"e{number}", f"10.0.0.{number}:8000", models=("m",)))
        if reports:
            picker.on_load(f"e{number}", TreelineLoad(prefill_tokens_per_s=1000.0), now=0.0)
    return picker


def ask(prompt: Prompt, **fields: object) -> Request:
    return Request("id", model="m", key=prompt.key, prompt_tokens_estimate=len(prompt.tokens), **fields)  # type: ignore[arg-type]


def leases(picker: Picker, request: Request, count: int) -> list[Lease]:
    return [picker.reserve(picker.pick(request, 0.0), 0.0) for _ in range(count)]


@pytest.mark.parametrize("reports", [True, False])
def test_a_bound_by_requests_wins_over_a_cached_prefix(reports: bool) -> None:
    picker = make(Saturation(wait=False, limit=2), reports=reports)
    prompt = Prompt([t % 256 for t in range(1000)])
    picker.index.apply(picker.endpoints["e0"].pod, prompt.stored(), KEYS)
    open_leases = leases(picker, ask(prompt), 4)
    names = [lease.endpoint.spec.name for lease in open_leases]
    assert names[:2] == ["e0", "e0"]
    assert sorted(names) == ["e0", "e0", "e1", "e1"]
    for asking in (picker.pick, picker.check_room):
        with pytest.raises(Saturated):
            asking(ask(prompt), 0.0)
    picker.close(open_leases[0], 0.0, Outcome.HEADERS)
    picker.close(open_leases[0], 0.0, Outcome.HEADERS)
    if not reports:
        assert picker.pick(ask(prompt), 0.0).endpoint.name == names[0]
        assert [endpoint.unanswered for endpoint in picker.endpoints.values()] == [1, 2]


def test_requests_that_engines_report_count() -> None:
    picker = make(Saturation(wait=False, limit=5), reports=False)
    for name in ("e0", "e1"):
        picker.on_load(name, LoadStat(num_running=3, num_waiting=2), now=0.0)
    with pytest.raises(Saturated):
        picker.check_room(Request("id", model="m"), 0.0)
    picker.on_load("e1", LoadStat(num_running=3, num_waiting=1), now=0.0)
    picker.check_room(Request("id", model="m"), 0.0)


def test_a_full_endpoint_that_holds_the_prompt_may_be_worth_the_wait() -> None:
    picker = make(Saturation(wait=True, limit=1.0))
    prompt = Prompt([t % 256 for t in range(9000)])
    picker.index.apply(picker.endpoints["e0"].pod, prompt.stored(), KEYS)
    picker.on_load("e0", TreelineLoad(waiting=1, waiting_uncached_tokens=2000, prefill_tokens_per_s=1000.0), now=0.0)
    assert picker.pick(ask(prompt), 0.0).endpoint.name == "e0"
    picker.on_load("e1", TreelineLoad(waiting=1, waiting_uncached_tokens=1001, prefill_tokens_per_s=1000.0), now=0.0)
    with pytest.raises(Saturated) as caught:
        picker.pick(ask(prompt), 0.0)
    assert caught.value.retry_after_s == pytest.approx(1.0, abs=0.1)


def test_a_request_for_room_is_refused_for_want_of_an_endpoint() -> None:
    picker = make(Saturation(wait=True, limit=1.0))
    with pytest.raises(NoEndpoints):
        picker.check_room(Request("id", model="other"), 0.0)


def test_the_uncached_tokens_are_those_of_the_best_holder() -> None:
    picker, prompt = make(None), Prompt([t % 256 for t in range(1600)])
    assert picker.uncached_tokens(ask(prompt), 0.0) == 1600
    picker.index.apply(picker.endpoints["e1"].pod, prompt.stored(), KEYS)
    assert picker.uncached_tokens(ask(prompt), 0.0) < 20
