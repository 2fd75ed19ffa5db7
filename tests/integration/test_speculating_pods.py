"""Of two equally busy runtimes the picker prefers the one whose steps give several tokens: from scheduler to choice."""

from __future__ import annotations

from pathlib import Path

import msgspec
from support.runtime_engine import Harness, prompt, write_config
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request
from treeline_wire.load import TREELINE_LOAD_TOPIC, TreelineLoad, decode_load, encode

FREE_MS, BUSY_MS = 5.0, 12.0


def busy_report(tiny: Path, **settings: float) -> TreelineLoad:
    """Return the report of a scheduler that decodes 4 requests, as sent, but for the times of this machine."""
    engine = Harness(tiny, **settings)
    for i in range(4):
        engine.submit(str(i), prompt(i, 9), max_new_tokens=100)
    while any(len(engine.tokens(str(i))) < 30 if str(i) in engine.outs else True for i in range(4)):
        engine.step()
    report = msgspec.convert(engine.load(), TreelineLoad, from_attributes=True)
    engine.run()
    told = decode_load(TREELINE_LOAD_TOPIC, encode(report))
    assert isinstance(told, TreelineLoad)
    assert told.running == 4
    return msgspec.structs.replace(told, decode_step_ms=BUSY_MS, prefill_tokens_per_s=1e4)


def test_a_runtime_with_right_guesses_is_preferred_for_long_answers(tmp_path: Path) -> None:
    picker, tiny = Picker(), write_config(tmp_path)
    guesses = {"speculative_simulate_acceptance": 1.0, "speculative_num_draft_tokens": 3}
    for name, settings in (("plain", dict[str, float]()), ("guessing", guesses)):
        picker.add_endpoint(EndpointSpec(name, f"{name}:8000", models=("m",)))
        picker.on_load(name, TreelineLoad(decode_step_ms=FREE_MS, prefill_tokens_per_s=1e4), now=0.0)
        picker.on_load(name, busy_report(tiny, **settings), now=0.0)
    request = Request("id", model="m", prompt_tokens_estimate=100, max_output_tokens=1000)
    decisions = [picker.pick(request, now=0.0) for _ in range(9)]
    assert {decision.endpoint.name for decision in decisions} == {"guessing"}
    scored = {one.candidate.spec.name: one.terms["decode_s"] for one in decisions[0].ranked}
    assert scored["guessing"] == 0.0, "three tokens in 12 ms are as fast as a free engine's steps"
    assert scored["plain"] > 0.1
