"""Subset hints: every spelling is read, and the choice is always within the hint."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf import struct_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_epp.endpoints.spec import EndpointSpec, normal_ip
from treeline_epp.extproc.convert import Reader
from treeline_epp.picking.decision import NoEndpoints
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request
from treeline_epp.requests.subset import narrowed, parse_subset
from treeline_wire import envoy_pb2 as pb
from treeline_wire import headers as names

NO_PORTS: list[object] = [None, True, 80.5, -1, 65536, "", [], math.inf]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["10.0.0.1:80", " 10.0.0.2:80 "], {"10.0.0.1:80", "10.0.0.2:80"}),
        ("10.0.0.1:80, 10.0.0.2:80", {"10.0.0.1:80", "10.0.0.2:80"}),
        (["10.0.0.1:80,10.0.0.2", "[::1]:80"], {"10.0.0.1:80", "10.0.0.2", "[::1]:80"}),
        (["[FD00:0::1]", "fd00::2", "[fd00::3]:0080"], {"fd00::1", "fd00::2", "[fd00::3]:80"}),
        ("::1:80", {"::1:80"}),
        ([{"ip": "10.0.0.1", "port": 80.0}, {"address": "::1", "port": "80"}], {"10.0.0.1:80", "[::1]:80"}),
        ({"host": "10.0.0.1"}, {"10.0.0.1"}),
        ([{"ip": "10.0.0.1", "host": "10.0.0.2", "port": 80}], set()),
        ([{"ip": "10.0.0.1", "port": port} for port in NO_PORTS], set()),
        ([], set()),
        ("", set()),
        (7, set()),
        ([1, "10.0.0.1:80"], {"10.0.0.1:80"}),
        ([["10.0.0.1:80"], None, True], set()),
        (["10.0.0.1:", "10.0.0.1:0", "10.0.0.1:80001", "10.0.0.1:http", "pod-1:80", ":80", "*"], set()),
        (None, set()),
    ],
)
def test_a_hint_is_read_in_every_spelling_and_an_unreadable_one_allows_nothing(value: Any, expected: set[str]) -> None:
    assert parse_subset(value) == expected


def test_of_two_hints_the_choice_is_within_both() -> None:
    one, ports = frozenset({"10.0.0.1", "10.0.0.2:80"}), frozenset({"10.0.0.1:80", "10.0.0.2"})
    assert narrowed(one, ports) == narrowed(ports, one) == frozenset({"10.0.0.1:80", "10.0.0.2:80"})
    assert narrowed(None, one) == narrowed(one, None) == narrowed(one, one) == one
    assert narrowed(one, frozenset()) == frozenset()


def message_of(value: struct_pb2.Value) -> frozenset[str] | None:
    request = pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=True))
    request.metadata_context.filter_metadata[names.LB_SUBSET].fields[names.SUBSET].CopyFrom(value)
    return Reader().read(request.SerializeToString()).subset


@pytest.mark.parametrize(
    "value",
    [
        struct_pb2.Value(),
        struct_pb2.Value(number_value=math.nan),
        struct_pb2.Value(null_value=struct_pb2.NULL_VALUE),
        struct_pb2.Value(list_value=struct_pb2.ListValue(values=[struct_pb2.Value(number_value=math.inf)])),
    ],
)
def test_a_hint_that_has_no_json_allows_nothing(value: struct_pb2.Value) -> None:
    assert message_of(value) == frozenset()


PODS = ("10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "[fd00::1]:8000", "[fd00::1]:8001", "10.0.0.10:8000")
PARTS = st.sampled_from(
    [*PODS, "10.0.0.1", "10.0.0.10", "fd00::1", "[fd00::1]", "FD00:0::1", "fd00::1:8000", "10.0.0.1:", "x", "", ":8000"]
)
TEXTS = st.lists(PARTS, max_size=3).map(", ".join)
ITEMS = st.one_of(
    TEXTS,
    st.none() | st.booleans() | st.integers(-1, 70000) | st.floats(allow_nan=False) | st.text(max_size=12),
    st.fixed_dictionaries({"ip": PARTS, "port": st.sampled_from([8000, 8000.0, "8001", None, "x", 1.5])}),
    st.lists(TEXTS, max_size=2),
)
HINTS = st.one_of(ITEMS, st.lists(ITEMS, max_size=4))


def mentions(value: Any) -> list[str]:
    """Return every text of a hint, at any depth: no reader could find more."""
    if isinstance(value, list):
        return [text for item in value for text in mentions(item)]
    if isinstance(value, dict):
        return mentions(list(value.values()))
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else []


@given(HINTS, HINTS, st.booleans())
@settings(derandomize=True, max_examples=300, deadline=None)
def test_the_pick_is_always_within_every_reading_of_the_hints(first: Any, second: Any, both: bool) -> None:
    picker = Picker()
    for address in PODS:
        picker.add_endpoint(EndpointSpec(address, address))
    hints = [first, second] if both else [first]
    subset: frozenset[str] | None = None
    for hint in hints:
        subset = narrowed(subset, parse_subset(hint))
    try:
        picked = picker.pick(Request("r", subset=subset), 0.0).endpoint.address
    except NoEndpoints:
        return
    host = normal_ip(picked.rpartition(":")[0])
    for hint in hints:
        said = mentions(hint)
        assert picked in said or any(normal_ip(text) == host for text in said), (picked, hint)
        if not any(normal_ip(text) for text in said):
            assert picked.rpartition(":")[2] in str(hint)


@given(st.lists(st.sampled_from(PODS), min_size=1, max_size=3))
@settings(derandomize=True, max_examples=50, deadline=None)
def test_endpoints_of_a_plain_hint_are_allowed(addresses: list[str]) -> None:
    assert parse_subset(addresses) == parse_subset(",".join(addresses)) == frozenset(addresses)
