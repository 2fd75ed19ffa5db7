"""The measure of what a request costs above the transport: what it measures is really served."""

from __future__ import annotations

import random

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from support import picker_cost
from treeline_epp.requests.router import Router


def test_its_requests_are_routed_answered_and_completed() -> None:
    router = picker_cost.new_router()
    body = picker_cost.chat_body(random.Random(1))
    assert 900 < len(body) < 1_100
    streams = [picker_cost.messages_of(body, str(number)) for number in range(3)]
    route = Router.route
    with picker_cost.timed_parts() as spent:
        replies = [pb.ProcessingResponse.FromString(data) for data in picker_cost.serve(router, streams)]
    assert [reply.WhichOneof("response") for reply in replies] == [
        "request_headers",
        "request_body",
        "response_headers",
    ]
    assert replies[1].request_body.response.header_mutation.set_headers
    assert {name for name, _, _ in picker_cost.PARTS} - spent.keys() == set()
    assert Router.route is route, "it leaves everything as it was"
    assert router.metrics.registry.get_sample_value("treeline_epp_outcomes_total", {"outcome": "headers"}) == 3
    assert picker_cost.chunks_per_cpu_second(router, picker_cost.DUPLEX, 10) > 0
