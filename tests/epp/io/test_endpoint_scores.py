"""What the proxy is told of endpoints beside the destination, where it wants their scores."""

from __future__ import annotations

from pathlib import Path

import pytest
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from support.epp_io import data_plane, engines
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.extproc.session import MOST_SCORES, ExtProcSession, SessionLimits
from treeline_epp.metrics import Metrics
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import Router
from treeline_wire import headers as names
from treeline_wire.load import TreelineLoad

MODES = processing_mode_pb2.ProcessingMode


def router(endpoints: int, *, fallbacks: int = 1) -> Router:
    """Endpoint `n` has n thousand tokens to compute before the next request."""
    picker = Picker(PickerConfig(fallbacks=fallbacks, scored=MOST_SCORES))
    made = Router(picker, ModelRegistry(), Metrics())
    for number in range(endpoints):
        picker.add_endpoint(EndpointSpec(f"e{number}", address(number)))
        load = TreelineLoad(waiting=number, waiting_uncached_tokens=1000 * number, prefill_tokens_per_s=1000.0)
        picker.on_load(f"e{number}", load, made.clock())
    return made


def address(number: int) -> str:
    return f"10.0.{number // 250}.{number % 250 + 1}:8000"


def told(asked: Router, mode: int = MODES.NONE, *, flag: bool = True) -> tuple[list[str], dict[str, float] | None]:
    """`(destinations, scores)` of the one reply that has a destination."""
    session = ExtProcSession(asked, SessionLimits(1 << 20, tell_scores=flag))
    head = pb.ProcessingRequest()
    head.protocol_config.request_body_mode = mode  # type: ignore[assignment]
    method, path = ("GET", "/") if mode == MODES.NONE else ("POST", "/v1/completions")
    for key, value in {":path": path, ":method": method}.items():
        head.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    head.request_headers.end_of_stream = mode == MODES.NONE
    messages = [head]
    if mode != MODES.NONE:
        body = pb.HttpBody(body=b'{"model": "m", "prompt": "hello"}', end_of_stream=True)
        messages.append(pb.ProcessingRequest(request_body=body))
    answers = [data for message in messages for data in session.answers(message.SerializeToString())]
    replies = [pb.ProcessingResponse.FromString(data) for data in answers if isinstance(data, bytes)]
    session.close()
    (metadata,) = [reply.dynamic_metadata[names.LB] for reply in replies if names.LB in reply.dynamic_metadata.fields]
    scores = dict(metadata[names.SCORES].items()) if names.SCORES in metadata.fields else None
    return metadata[names.DESTINATION].split(","), scores


@pytest.mark.parametrize("mode", [MODES.NONE, MODES.BUFFERED, MODES.FULL_DUPLEX_STREAMED])
def test_every_endpoint_has_a_score_and_the_chosen_one_the_greatest(mode: int) -> None:
    destinations, scores = told(router(5), mode)
    assert scores is not None
    assert set(scores) == {address(number) for number in range(5)}, "also of those that were not chosen"
    assert sorted(scores, key=lambda each: -scores[each]) == [address(number) for number in range(5)]
    assert destinations == [address(0), address(1)]
    assert all(0.0 < score <= 1.0 for score in scores.values())
    assert scores[address(3)] == pytest.approx(1 / (1 + 3), rel=0.1), "three seconds of work before it"


def test_without_the_flag_there_is_the_destination_alone() -> None:
    assert told(router(3), flag=False) == ([address(0), address(1)], None)


def test_of_many_endpoints_the_best_have_scores() -> None:
    destinations, scores = told(router(300, fallbacks=0))
    assert scores is not None
    assert destinations == [address(0)]
    assert set(scores) == {address(number) for number in range(MOST_SCORES)}


@pytest.mark.integration
async def test_envoy_takes_them_and_goes_where_it_is_told(tmp_path: Path) -> None:
    async with engines(3) as fakes, data_plane(tmp_path, fakes, "--emit-endpoint-scores") as plane:
        answer = await plane.complete()
        assert answer.status_code == 200
        assert answer.json()["headers"][names.DESTINATION].split(",")[0] in {fake.address for fake in fakes}
        assert (await plane.picker.metrics())['treeline_epp_outcomes_total{outcome="headers"}'] == 1
