"""Decisions whose endpoint pulls a part of the prompt's cache from another one."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.epp_core import KEYS, WIDTH, Prompt
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.transfer import Protocol, Role, Transfer
from treeline_epp.picking.decision import Decision, Outcome
from treeline_epp.picking.pairs import STEP_TOKENS
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.pulls import ASK_S, FEWEST_TOKENS
from treeline_epp.picking.request import Request
from treeline_wire.load import TreelineLoad

OURS = Transfer(Protocol.TREELINE, 5857, (("fingerprint of pages", "ab"),))
BLOCKS = 500
PROMPT = Prompt.random(1, BLOCKS)
LONGER = PROMPT.extended(2, 3)
TOKENS = BLOCKS * WIDTH


def load(**more: float) -> TreelineLoad:
    return TreelineLoad(pages_total=10_000, page_size=4, max_running=8, prefill_tokens_per_s=5_000.0, **more)  # type: ignore[arg-type]


FULL = msgspec.structs.replace(load(), running=8, waiting=80, decode_step_ms=10.0)


def picker_of(here: Transfer | None = OURS, there: Transfer | None = OURS, **more: float) -> Picker:
    """Return a picker of `here`, idle and empty, and `there`, which holds the prompt and is full."""
    picker = Picker(PickerConfig(seed=1))
    for name, transfer in (("here", here), ("there", there)):
        spec = EndpointSpec(name, f"10.0.0.{len(name)}:80", models=("m",), transfer=transfer)
        picker.add_endpoint(spec)
        picker.on_load(name, load(**more), 0.0)
    picker.on_load("there", FULL, 0.0)
    hold(picker, "there")
    return picker


def hold(picker: Picker, name: str, blocks: int = BLOCKS, medium: str = "GPU") -> None:
    picker.index.apply(picker.endpoints[name].pod, PROMPT.stored(0, blocks, medium=medium), KEYS)


def pick(picker: Picker) -> Decision:
    return picker.pick(request(), 0.1)


def request() -> Request:
    return Request("r", model="m", key=LONGER.key, prompt_tokens_estimate=len(LONGER.tokens))


def test_what_another_endpoint_holds_is_pulled_where_that_is_faster_than_computing() -> None:
    decision = pick(picker_of())
    assert (decision.endpoint.name, decision.form) == ("here", "pull")
    assert decision.source is not None
    assert decision.source.name == "there"
    assert decision.pull is not None
    gained = decision.best.ttft_s - decision.ttft_s
    assert gained == pytest.approx(TOKENS / 5_000 - ASK_S - TOKENS * 20e-6 - 2 * 0.01, abs=0.01)
    assert decision.explain()["form"] == "pull"
    assert decision.explain()["source_endpoint"] == "there"


def test_the_measured_speed_of_pulls_decides() -> None:
    assert pick(picker_of(peer_tokens_per_s=50_000.0)).form == "pull"
    slow = pick(picker_of(peer_tokens_per_s=4_000.0))
    assert slow.form == "whole"
    assert slow.pull is not None, "both were compared"
    assert slow.source is None


def test_an_endpoint_that_computes_long_prompts_answers_late() -> None:
    picker = picker_of()
    picker.parts.charge(picker.endpoints["there"], 100_000, 20.0, 0.0)
    decision = pick(picker)
    assert decision.pull is not None
    assert decision.pull.pull["source_s"] == pytest.approx(2 * (STEP_TOKENS / 5_000 + 0.01))
    assert decision.form == "whole"


def test_nothing_is_pulled_for_a_few_tokens_or_from_a_disk() -> None:
    picker = picker_of()
    hold(picker, "here", BLOCKS - FEWEST_TOKENS // WIDTH + 4)
    assert pick(picker).pull is None
    for medium, form in (("CPU", "pull"), ("DISK", "whole")):
        picker = picker_of()
        picker.remove_endpoint("there")
        picker.add_endpoint(EndpointSpec("there", "10.0.0.5:80", models=("m",), transfer=OURS))
        picker.on_load("there", FULL, 0.0)
        hold(picker, "there", medium=medium)
        assert pick(picker).form == form


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (None, OURS),
        (OURS, None),
        (OURS, replace(OURS, port=0)),
        (OURS, replace(OURS, alike=(("fingerprint of pages", "cd"),))),
        (Transfer(Protocol.NIXL), Transfer(Protocol.NIXL)),
    ],
)
def test_endpoints_that_cannot_share_pages_do_not(here: Transfer | None, there: Transfer | None) -> None:
    assert pick(picker_of(here, there)).pull is None
    assert pick(picker_of(replace(OURS, port=0), OURS)).form == "pull", "who pulls needs no port"


def test_an_endpoint_that_is_not_ready_is_not_asked() -> None:
    picker = picker_of()
    picker.set_ready("there", False)
    assert pick(picker).pull is None


def test_a_prefill_endpoint_gives_pages_too() -> None:
    picker = picker_of(there=None)
    spec = EndpointSpec("p", "10.0.0.9:80", models=("m",), transfer=OURS, role=Role.PREFILL)
    picker.add_endpoint(spec)
    hold(picker, "p")
    decision = pick(picker)
    assert decision.source == spec


def test_an_explanation_shows_the_forms() -> None:
    shown = picker_of().explain(request(), 0.1)
    assert (shown.form, shown.source_endpoint, set(shown.forms)) == ("pull", "there", {"whole", "pull"})
    assert shown.forms["pull"].keys() == {"first_token_s", "transfer_s", "source_s"}


def test_a_pulled_prompt_teaches_nothing_of_the_endpoints_cache_and_speed() -> None:
    picker = picker_of()
    lease = picker.reserve(pick(picker), 0.1)
    picker.close(lease, 0.3, Outcome.HEADERS, ttft_s=0.2, cached_tokens=TOKENS, prompt_tokens=len(LONGER.tokens))
    here = picker.endpoints["here"].load
    assert (here.hit_share, here.learned_rate) == (0.0, 0.0)


@given(here=st.integers(0, BLOCKS), there=st.integers(0, BLOCKS), rate=st.sampled_from([0.0, 1_000.0, 1e5, 1e7]))
def test_the_cheaper_form_is_chosen_and_never_predicted_as_longer(here: int, there: int, rate: float) -> None:
    picker = Picker(PickerConfig(seed=1))
    for name, blocks in (("here", here), ("there", there)):
        picker.add_endpoint(EndpointSpec(name, f"10.0.0.{len(name)}:80", models=("m",), transfer=OURS))
        picker.on_load(name, load(peer_tokens_per_s=rate), 0.0)
        if blocks:
            hold(picker, name, blocks)
    decision = pick(picker)
    assert decision.ttft_s <= decision.best.ttft_s
    assert decision.source is None or decision.source != decision.endpoint
    if decision.pull is not None:
        forms = decision.seconds
        assert (decision.form == "pull") == (sum(forms["pull"].values()) < sum(forms["whole"].values()))
        assert decision.pull.pull["first_token_s"] >= -1e-9
