"""The header of a data-parallel rank: set by the picker where it names one, and removed from clients' requests where
not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.proxy import NONE, head, replies
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.metrics import Metrics
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import Router
from treeline_wire import headers as names

ALONE = EndpointSpec("a", "10.0.0.1:8000")
RANKED = ALONE.at_rank(1, 2, frozenset({"/v1/responses"}))


@pytest.mark.parametrize(
    ("endpoint", "path", "sent", "named", "removed"),
    [
        (RANKED, "/v1/completions", {}, b"1", []),
        (RANKED, "/v1/completions", {names.RANK: "0"}, b"1", []),
        (RANKED, "/v1/responses?a=b", {}, None, []),
        (RANKED, "/v1/responses", {names.RANK: "0"}, None, [names.RANK]),
        (ALONE, "/v1/completions", {}, None, []),
        (ALONE, "/v1/completions", {names.RANK: "0"}, None, [names.RANK]),
    ],
)
def test_only_the_picker_names_a_rank(
    endpoint: EndpointSpec, path: str, sent: Mapping[str, str], named: bytes | None, removed: list[str]
) -> None:
    picker = Picker()
    picker.add_endpoint(endpoint)
    session = ExtProcSession(Router(picker, ModelRegistry(), Metrics()), SessionLimits(1000))
    (reply,) = replies(session, head({":path": path, ":method": "GET", **sent}, NONE, end=True))
    mutation = reply.request_headers.response.header_mutation
    found = {option.header.key: option.header.raw_value for option in mutation.set_headers}
    assert found[names.DESTINATION] == b"10.0.0.1:8000"
    assert found.get(names.RANK) == named
    assert list(mutation.remove_headers) == removed
