"""A stream whose prompt another endpoint computes, with scripted calls in place of engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.pairs import HANDED_OVER
from support.proxy import head, whole
from treeline_epp.endpoints.http_answer import Answer
from treeline_epp.endpoints.prefill_calls import PrefillCall
from treeline_epp.endpoints.scraped import ScrapedLoad
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.transfer import Protocol, Role, Transfer
from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.metrics import Metrics
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.prefilling import Prefilling
from treeline_epp.requests.router import Router
from treeline_wire import envoy_pb2 as pb

BODY = {"model": "tiny", "prompt": "word " * 20_000, "stream": True}
DONE = Answer(200, {}, json.dumps({"kv_transfer_params": HANDED_OVER}).encode(), True)


@dataclass
class Posted:
    call: PrefillCall
    address: str
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    ended: Callable[[PrefillCall], None]
    cancelled: bool = False

    def end(self, answer: Answer | None, problem: str = "") -> None:
        self.call.answer, self.call.problem = answer, problem
        self.ended(self.call)
        self.call.finish()


@dataclass
class Calls:
    """Stands in for `PrefillCalls`: the test ends each call."""

    full: bool = False
    posted: list[Posted] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.posted)

    def post(
        self,
        _server: str,
        address: str,
        path: str,
        headers: Mapping[str, str],
        body: Sequence[bytes],
        *,
        limit_s: float,
        after_s: float = 0.0,
        until_sent: bool = False,
        ended: Callable[[PrefillCall], None] = lambda _call: None,
    ) -> PrefillCall | None:
        if self.full:
            return None
        call = PrefillCall(limit_s, until_sent=until_sent)
        posted = Posted(call, address, path, headers, json.loads(b"".join(body)), ended)
        call.cancel = lambda: setattr(posted, "cancelled", True)  # type: ignore[method-assign]
        self.posted.append(posted)
        return call


class World:
    """A pair of endpoints, and one stream of a proxy that has sent a request."""

    def __init__(self, protocol: Protocol, *, body: dict[str, Any] | None = None, full: bool = False) -> None:
        self.picker, self.calls, self.trouble = Picker(), Calls(full), list[str]()
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            spec = EndpointSpec(name, f"10.0.0.{len(role)}:8000", role=role, transfer=Transfer(protocol))
            self.picker.add_endpoint(spec)
        self.picker.on_load("d", ScrapedLoad(running=16), 0.0)
        router = Router(self.picker, ModelRegistry(), Metrics(), clock=lambda: 0.0)
        router.prefilling = Prefilling(self.picker.parts, self.calls, router.clock, self.trouble.append)  # type: ignore[arg-type]
        self.metrics, self.prefilling = router.metrics, router.prefilling
        self.session = ExtProcSession(router, SessionLimits(1_000_000))
        fields = {":path": "/v1/completions", ":method": "POST", "x-request-id": "r", "traceparent": "t"}
        list(self.session.answers(head(fields).SerializeToString()))
        data = json.dumps(BODY if body is None else body).encode()
        self.answering: Iterator[Any] = self.session.answers(whole(data).SerializeToString())

    def waits(self) -> bool:
        """Go on; return whether the stream waits for a call."""
        self.said = [pb.ProcessingResponse.FromString(one) for one in iter(self._next, None) if isinstance(one, bytes)]
        return self._awaits

    def _next(self) -> bytes | None:
        answer = next(self.answering, None)
        self._awaits = isinstance(answer, PrefillCall)
        return None if self._awaits else answer

    @property
    def sent(self) -> dict[str, Any]:
        """The body that goes to the endpoint that answers."""
        reply = self.said[-1].request_body.response
        return json.loads(reply.body_mutation.body) if reply.body_mutation.body else BODY

    @property
    def reserved(self) -> list[int]:
        return [one.load.reservations.tokens for one in self.picker.endpoints.values()]


def test_a_stream_waits_for_the_prompt_and_asks_its_proxy_to_wait_as_well() -> None:
    world = World(Protocol.NIXL)
    assert world.waits()
    assert world.said[0].override_message_timeout.seconds > 60
    (posted,) = world.calls.posted
    assert (posted.address, posted.path) == ("10.0.0.7:8000", "/v1/completions")
    assert posted.headers == {"x-request-id": "r", "traceparent": "t"}
    assert posted.body["max_tokens"] == 1
    assert posted.call.limit_s == pytest.approx(3 * 25_000 / 4000, rel=0.1), "three times the prediction"
    assert world.waits(), "a caller that goes on too early waits again"
    assert world.said == []
    posted.end(DONE)
    assert not world.waits()
    assert world.sent == {**BODY, "kv_transfer_params": HANDED_OVER}
    assert world.reserved == [0, 0]


@pytest.mark.parametrize(
    ("answer", "errors"),
    [
        (None, 1),
        (Answer(503, {}, b"", True), 1),
        (Answer(200, {}, b"{}", True), 1),
        (Answer(400, {}, b"", True), 0),
    ],
)
def test_a_prompt_that_fails_is_computed_by_the_endpoint_that_answers(answer: Answer | None, errors: int) -> None:
    world = World(Protocol.NIXL)
    assert world.waits()
    world.calls.posted[0].end(answer, "broken off")
    assert not world.waits()
    assert world.sent == BODY
    assert [one > 0 for one in world.reserved] == [False, True]
    assert world.picker.endpoints["p"].breaker.errors == errors == len(world.trouble)
    world.session.close()
    assert world.reserved == [0, 0]


def test_a_client_that_leaves_breaks_off_the_call() -> None:
    world = World(Protocol.NIXL)
    assert world.waits()
    world.session.close()
    assert world.calls.posted[0].cancelled
    assert world.reserved == [0, 0]
    assert world.picker.endpoints["p"].breaker.errors == 0
    world.calls.posted[0].end(DONE)  # the answer had come already
    assert world.prefilling.outcomes == {"cancelled": 1}


def test_with_too_many_calls_under_way_requests_are_whole() -> None:
    world = World(Protocol.NIXL, full=True)
    assert not world.waits()
    assert world.sent == BODY
    assert [one > 0 for one in world.reserved] == [False, True]


def test_sglangs_request_goes_on_when_the_copy_is_on_its_way() -> None:
    world = World(Protocol.SGLANG)
    assert world.waits()
    world.calls.posted[0].call.on_sent()
    assert not world.waits()
    assert world.sent["bootstrap_room"] == world.calls.posted[0].body["bootstrap_room"]
    assert world.reserved[0] > 0, "the prompt is still computed"
    world.session.close()
    assert world.calls.posted[0].cancelled, "no answer has begun: the client has left"
    assert world.reserved == [0, 0]


def test_another_room_is_tried_if_nobody_gets_sglangs_copy() -> None:
    world = World(Protocol.SGLANG)
    for _ in range(3):
        assert world.waits()
        world.calls.posted[-1].end(None, "connection refused")
    assert not world.waits()
    assert len({one.body["bootstrap_room"] for one in world.calls.posted}) == 3
    assert world.said[-1].immediate_response.status.code == 503
    assert json.loads(world.said[-1].immediate_response.body)["error"]["code"] == "no_prefill"
    assert world.reserved == [0, 0]


def test_the_endpoint_that_waits_in_vain_is_told_to_abort() -> None:
    world = World(Protocol.SGLANG)
    assert world.waits()
    first = world.calls.posted[0]
    first.call.on_sent()
    assert not world.waits()
    first.end(Answer(503, {}, b"", True))
    abort = world.calls.posted[1]
    assert (abort.address, abort.path, abort.body) == ("10.0.0.6:8000", "/abort_request", {"rid": first.body["rid"]})


def test_a_sidecar_is_told_by_a_header_and_nobody_waits() -> None:
    world = World(Protocol.LLM_D)
    assert not world.waits()
    headers = world.said[-1].request_body.response.header_mutation.set_headers
    assert b"10.0.0.7:8000" in [one.header.raw_value for one in headers if one.header.key == "x-prefiller-host-port"]
    assert world.sent == BODY
    assert not world.calls.posted
    assert world.reserved[0] > 0, "until the answer begins"
    world.session.close()
    assert world.reserved == [0, 0]
