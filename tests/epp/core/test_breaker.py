"""An endpoint that only answers errors, or is silent, is left out, tried again, and taken back."""

from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.decision import Lease, Outcome
from treeline_epp.picking.endpoint import ERRORS, MAX_OPEN_S, Breaker
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.request import Request
from treeline_wire.load import LoadStat, TreelineLoad

ASK = Request("id", model="m", prompt_tokens_estimate=100)


def make(count: int) -> Picker:
    picker = Picker(PickerConfig())
    for number in range(count):
        spec = EndpointSpec(f"e{number}", f"10.0.0.{number}:8000", models=("m",))
        picker.add_endpoint(spec)
        picker.on_load(spec.name, TreelineLoad(prefill_tokens_per_s=10_000.0), now=0.0)
    return picker


def send(picker: Picker, now: float) -> Lease:
    return picker.reserve(picker.pick(ASK, now), now)


def names(picker: Picker, now: float, count: int = 20) -> set[str]:
    """Return the endpoints that get `count` requests, each answered at once."""
    found = set()
    for _ in range(count):
        lease = send(picker, now)
        found.add(lease.endpoint.spec.name)
        picker.close(lease, now, Outcome.HEADERS, served=lease.endpoint.spec.address)
    return found


def fail(picker: Picker, name: str, now: float) -> None:
    """Send requests until this endpoint has failed as often in a row as it may; all others answer."""
    breaker = picker.endpoints[name].breaker
    while not breaker.tripped:
        lease = send(picker, now)
        bad = lease.endpoint.spec.name == name
        picker.close(lease, now, Outcome.ERROR if bad else Outcome.HEADERS, served=lease.endpoint.spec.address)


def test_errors_in_a_row_exclude_an_endpoint() -> None:
    picker = make(2)
    fail(picker, "e0", 0.0)
    assert names(picker, 0.5) == {"e1"}
    assert not picker.pick(ASK, 0.5).fallbacks, "nor is it a fallback"


def test_an_answer_between_errors_blames_the_requests() -> None:
    breaker = Breaker()
    for _ in range(5):
        for _ in range(ERRORS - 1):
            breaker.on_error(0.0)
        assert breaker.closed_until <= 0.0
        breaker.on_answer()


def test_a_failing_endpoint_is_tried_ever_more_seldom_until_it_answers() -> None:
    breaker, now, pauses = Breaker(), 0.0, []
    for _ in range(ERRORS):
        breaker.on_error(now)
    for _ in range(8):
        begun = now
        while not (now >= breaker.closed_until):
            now += 0.5
        pauses.append(now - begun)
        breaker.on_pick(now)
        breaker.on_error(now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_OPEN_S, MAX_OPEN_S, MAX_OPEN_S]
    breaker.on_answer()
    assert now >= breaker.closed_until
    for _ in range(ERRORS):
        breaker.on_error(now)
    assert now + 1.0 >= breaker.closed_until, "it begins anew"


def test_if_all_endpoints_fail_none_is_excluded() -> None:
    picker = make(2)
    for name in picker.endpoints:
        for _ in range(ERRORS):
            picker.endpoints[name].breaker.on_error(0.0)
    assert names(picker, 0.1) <= {"e0", "e1"}


def test_a_new_process_behind_the_name_starts_clean() -> None:
    picker = make(2)
    fail(picker, "e0", 0.0)
    picker.add_endpoint(EndpointSpec("e0", "10.0.0.0:8000", models=("m",), uid="another"))
    assert not picker.endpoints["e0"].breaker.tripped


def test_another_endpoints_error_does_not_count_for_the_picked_one() -> None:
    picker = make(2)
    for _ in range(2 * ERRORS):
        lease = send(picker, 0.0)
        picker.close(lease, 0.0, Outcome.ERROR, served="10.9.9.9:8000")
    assert not any(e.breaker.errors for e in picker.endpoints.values())


def test_a_silent_engine_is_excluded_until_it_reports_again() -> None:
    picker = make(2)
    for now in (1.0, 2.0, 3.0, 4.0):
        picker.on_load("e1", TreelineLoad(prefill_tokens_per_s=10_000.0), now)
    assert names(picker, 4.0) == {"e1"}
    picker.on_load("e0", TreelineLoad(prefill_tokens_per_s=10_000.0), 4.5)
    assert names(picker, 4.5) == {"e0", "e1"}


def test_engines_that_report_only_under_load_may_be_silent() -> None:
    picker = Picker(PickerConfig())
    for name in ("e0", "e1"):
        picker.add_endpoint(EndpointSpec(name, f"{name}:8000", models=("m",)))
        picker.on_load(name, LoadStat(), now=0.0)
    picker.on_load("e1", LoadStat(), now=9.0)
    assert names(picker, 9.0) == {"e0", "e1"}
