"""`--disable-endpoint-subset-filter`: the proxy's hints, read or not, are passed over."""

from __future__ import annotations

import pytest
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.metrics import Metrics
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.messages import RouteRequest
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.refusals import Refusal
from treeline_epp.requests.router import RoutedRequest, Router


@pytest.mark.parametrize("allowed", [frozenset({"10.9.9.9"}), frozenset[str](), None])
def test_a_subset_limits_nothing_where_the_flag_says_so(allowed: frozenset[str] | None) -> None:
    picker = Picker()
    picker.add_endpoint(EndpointSpec("a", "10.0.0.1:8000"))
    request = RouteRequest({":path": "/", ":method": "GET"}, None, allowed)
    heeding, not_heeding = (Router(picker, ModelRegistry(), Metrics(), heed_subsets=heed) for heed in (True, False))
    found = not_heeding.route(request)
    assert isinstance(found, RoutedRequest)
    assert found.destination == "10.0.0.1:8000"
    assert isinstance(heeding.route(request), Refusal) == (allowed is not None)
