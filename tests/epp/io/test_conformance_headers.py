"""The headers of the Gateways' conformance tests: the client names the endpoint, and the answer names it, too."""

from __future__ import annotations

import pytest
from support.proxy import NONE, head, replies
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.metrics import Metrics
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import Router
from treeline_wire import envoy_pb2 as pb
from treeline_wire import headers as names

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def stream(*, flag: bool) -> ExtProcSession:
    picker = Picker(PickerConfig(fallbacks=0))
    for name, address in (("a", A), ("b", B)):
        picker.add_endpoint(EndpointSpec(name, address))
    router = Router(picker, ModelRegistry(), Metrics(), clients_select=flag)
    return ExtProcSession(router, SessionLimits(1000, strip_response_headers=True, tell_served=flag))


def ask(session: ExtProcSession, selection: str, allowed: str = A) -> pb.ProcessingResponse:
    request = head({":path": "/", ":method": "GET", names.SELECTION: selection}, NONE, end=True)
    request.metadata_context.filter_metadata[names.LB_SUBSET].fields[names.SUBSET].string_value = allowed
    (reply,) = replies(session, request)
    return reply


def respond(session: ExtProcSession, served: str | None) -> tuple[dict[str, bytes], set[str]]:
    request = pb.ProcessingRequest(response_headers=pb.HttpHeaders())
    if served is not None:
        request.metadata_context.filter_metadata[names.LB].fields[names.SERVED].string_value = served
    (reply,) = replies(session, request)
    mutation = reply.response_headers.response.header_mutation
    return {o.header.key: o.header.raw_value for o in mutation.set_headers}, set(mutation.remove_headers)


@pytest.mark.parametrize(("selection", "picked"), [(B, B), ("10.0.0.2", B), (f"{B}, 10.9.9.9:1", B), ("", A)])
def test_the_selection_beats_the_subset(selection: str, picked: str) -> None:
    for _ in range(5):
        reply = ask(stream(flag=True), selection)
        assert reply.dynamic_metadata[names.LB][names.DESTINATION] == picked


def test_a_selection_that_cannot_be_met_is_a_503() -> None:
    for selection in ("10.9.9.9", "nonsense", ","):
        assert ask(stream(flag=True), selection).immediate_response.status.code == 503


def test_without_the_flag_neither_header_means_anything() -> None:
    session = stream(flag=False)
    assert ask(session, B).dynamic_metadata[names.LB][names.DESTINATION] == A
    assert respond(session, A)[0] == {}


@pytest.mark.parametrize(
    ("served", "told"), [(B, B.encode()), (None, b"fail: missing destination endpoint served metadata")]
)
def test_the_served_endpoint_is_reported_and_our_headers_are_removed(served: str | None, told: bytes) -> None:
    session = stream(flag=True)
    ask(session, B)
    assert respond(session, served) == ({names.CONFORMANCE_SERVED: told}, {names.CACHED_TOKENS, names.PROMPT_TOKENS})
