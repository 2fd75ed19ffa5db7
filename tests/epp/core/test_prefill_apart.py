"""A decision that names one endpoint for the prompt and another for the answer."""

from __future__ import annotations

import msgspec
import pytest
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.decision import NoEndpoints, Outcome
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_decision_of_two_endpoints_charges_both_and_releases_both(outcome: Outcome) -> None:
    picker = Picker()
    for number in range(3):
        picker.add_endpoint(EndpointSpec(f"e{number}", f"10.0.0.{number}:8000"))
    decision, second = (
        picker.pick(Request("id", prompt_tokens_estimate=900, subset=frozenset({host})), now=0.0)
        for host in ("10.0.0.0", "10.0.0.1")
    )
    lease = picker.reserve(msgspec.structs.replace(decision, prefill=second.best), now=0.0)

    def charged() -> dict[str, int]:
        return {name: len(one.load.reservations) for name, one in picker.endpoints.items()}

    both = {decision.endpoint.name, second.endpoint.name}
    assert len(both) == 2
    assert charged() == {name: int(name in both) for name in picker.endpoints}
    assert picker.close(lease, now=0.1, outcome=outcome, ttft_s=0.1)
    assert set(charged().values()) == {0}
    assert not picker.close(lease, now=0.2, outcome=outcome)
    picker.remove_endpoint(second.endpoint.name)
    with pytest.raises(NoEndpoints):
        picker.reserve(msgspec.structs.replace(decision, prefill=second.best), now=0.3)
    assert set(charged().values()) == {0}, "the one that is left is not charged either"
