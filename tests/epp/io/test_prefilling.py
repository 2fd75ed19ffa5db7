"""A stream whose prompt another endpoint computes, with scripted calls in place of engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.epp_io import until
from support.pairs import HANDED_OVER
from support.proxy import begun, head, replies, whole
from treeline_epp.endpoints.http_answer import Answer
from treeline_epp.endpoints.prefill_calls import MOST_CALLS, PrefillCalls
from treeline_epp.endpoints.scraped import ScrapedLoad
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.transfer import Protocol, Role, Transfer
from treeline_epp.extproc.session import ExtProcSession, SessionLimits
from treeline_epp.flow.quotas import Limits, Quotas, QuotaTable
from treeline_epp.metrics import Metrics
from treeline_epp.picking.endpoint import Endpoint
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.exchange import DEFAULT_FLOW
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.prefilling import Prefill, Prefilling
from treeline_epp.requests.router import Router
from treeline_wire import envoy_pb2 as pb

PROMPT = "word " * 20_000
BODY = {"model": "tiny", "prompt": PROMPT, "stream": True}
DONE = Answer(200, {}, json.dumps({"kv_transfer_params": HANDED_OVER}).encode(), True)


@dataclass
class Posted:
    address: str
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    within_s: float
    sent: Callable[[], None]
    ended: Callable[[Answer | None, str], None]
    cancelled: bool = False
    over: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    def end(self, answer: Answer | None, problem: str = "") -> None:
        self.over = True
        self.ended(answer, problem)


@dataclass
class Calls:
    """Stands in for `PrefillCalls`: the test ends each call."""

    full: bool = False
    posted: list[Posted] = field(default_factory=list)
    aborted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(not (one.over or one.cancelled) for one in self.posted)

    def post(
        self,
        _server: str,
        address: str,
        path: str,
        headers: Mapping[str, str],
        body: list[bytes],
        *,
        client: str | None,
        within_s: float,
        sent: Callable[[], None],
        ended: Callable[[Answer | None, str], None],
    ) -> Callable[[], object] | None:
        assert client is None
        if self.full:
            return None
        posted = Posted(address, path, headers, json.loads(b"".join(body)), within_s, sent, ended)
        self.posted.append(posted)
        return posted.cancel

    def abort(self, _server: str, address: str, body: bytes) -> None:
        self.aborted.append((address, json.loads(body)))


class World:
    """A pair of endpoints, and one stream of a proxy that has sent a request."""

    def __init__(
        self, protocol: Protocol, *, full: bool = False, quotas: Quotas | None = None, prompt: str = PROMPT
    ) -> None:
        self.picker, self.calls, self.trouble = Picker(), Calls(full), list[str]()
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            spec = EndpointSpec(name, f"10.0.0.{len(role)}:8000", role=role, transfer=Transfer(protocol))
            self.picker.add_endpoint(spec)
        self.picker.on_load("d", ScrapedLoad(running=16), 0.0)
        self.now, self.metrics = 0.0, Metrics()
        router = Router(self.picker, ModelRegistry(), self.metrics, clock=lambda: self.now)
        router.prefilling = Prefilling(self.picker.parts, self.calls, router.clock, self.trouble.append)  # type: ignore[arg-type]
        router.quotas, self.prefilling = quotas, router.prefilling
        self.session = ExtProcSession(router, SessionLimits(1_000_000))
        fields = {":path": "/v1/completions", ":method": "POST", "x-request-id": "r", "traceparent": "t"}
        list(self.session.answers(head(fields).SerializeToString()))
        self.answering: Iterator[Any] = self.session.answers(
            whole(json.dumps({**BODY, "prompt": prompt}).encode()).SerializeToString()
        )

    def waits(self) -> bool:
        """Go on; return whether the stream waits for a call."""
        self.said = [pb.ProcessingResponse.FromString(one) for one in iter(self._next, None) if isinstance(one, bytes)]
        return self._awaits

    def _next(self) -> bytes | None:
        answer = next(self.answering, None)
        self._awaits = isinstance(answer, Prefill)
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
    assert posted.within_s == pytest.approx(3 * 25_000 / 4000, rel=0.1), "three times the prediction"
    assert world.waits(), "a caller that goes on too early waits again"
    assert world.said == []
    posted.end(DONE)
    assert not world.waits()
    assert world.sent == {**BODY, "kv_transfer_params": HANDED_OVER}
    assert world.reserved == [0, 0]


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("answers", [True, False])
def test_predicted_and_real_seconds_count_for_the_form_that_was_chosen(apart: bool, answers: bool) -> None:
    world = World(Protocol.TREELINE, prompt=PROMPT if apart else "word")
    assert world.waits() == apart
    for posted in world.calls.posted:
        world.now = 2.0
        posted.end(DONE)
        assert not world.waits()
    world.now = 3.0
    kind = "text/event-stream" if answers else "application/json"
    counts = {"x_treeline_cached_tokens": "0", "x_treeline_prompt_tokens": "20000"}
    replies(world.session, begun(content_type=kind, **counts))
    form, metrics = "apart" if apart else "whole", world.metrics
    assert metrics.form_seconds.labels(form)._value.get() == (3.0 if answers else 0.0)
    predicted_s = metrics.form_predicted_seconds.labels(form)._value.get()
    assert (predicted_s == 0.0) if not answers else (5.0 < predicted_s < 8.0) if apart else (0.0 < predicted_s < 0.1)


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
    world.calls.posted[0].sent()
    assert not world.waits()
    assert world.sent["bootstrap_room"] == world.calls.posted[0].body["bootstrap_room"]
    assert world.reserved[0] > 0, "the prompt is still computed"
    world.session.close()
    assert world.calls.posted[0].cancelled, "no answer has begun: the client has left"
    assert world.reserved == [0, 0]


def headers_of(world: World) -> dict[str, str]:
    """Return the headers that go to the endpoint that answers."""
    headers = world.said[-1].request_body.response.header_mutation.set_headers
    return {one.header.key: one.header.raw_value.decode() for one in headers}


def test_our_request_goes_on_when_the_copy_is_on_its_way_and_says_how_long_to_wait() -> None:
    world = World(Protocol.TREELINE)
    assert world.waits()
    (posted,) = world.calls.posted
    assert (posted.body["max_tokens"], posted.body["stream"]) == (1, False)
    posted.sent()
    assert not world.waits()
    assert world.sent == BODY
    where, within = headers_of(world)["x-treeline-pages-from"].split(";within=")
    assert where == "10.0.0.7:8998"
    assert float(within) == pytest.approx(posted.within_s, rel=0.01), "three times the prediction"
    assert world.reserved[0] > 0, "the prompt is still computed"
    world.now = 5.0
    posted.end(Answer(200, {}, b"{}", True))
    assert world.reserved == [0, 0]
    assert world.prefilling.outcomes == {"headers": 1}
    assert world.picker.endpoints["p"].load.own_rate() == pytest.approx(5000, rel=0.1), "its time is the prompt's"


@pytest.mark.parametrize("sent", [True, False])
def test_our_prompt_that_fails_is_computed_by_the_endpoint_that_answers_and_nothing_is_aborted(sent: bool) -> None:
    world = World(Protocol.TREELINE)
    assert world.waits()
    if sent:
        world.calls.posted[0].sent()
        assert not world.waits()
    world.calls.posted[0].end(None, "broken off")
    if not sent:
        assert not world.waits()
    assert ("x-treeline-pages-from" in headers_of(world)) == sent, "nobody waits for what was never asked for"
    assert world.calls.aborted == []
    assert [one > 0 for one in world.reserved] == [False, True]
    assert (world.picker.endpoints["p"].breaker.errors, world.trouble) == (1, ["p"])
    world.session.close()
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
    first.sent()
    assert not world.waits()
    first.end(Answer(503, {}, b"", True))
    assert world.calls.aborted == [("10.0.0.6:8000", {"rid": first.body["rid"]})]


@pytest.mark.parametrize("status", ["400", "500", "503"])
def test_nobody_waits_for_a_prompt_whose_answer_was_refused(status: str) -> None:
    world = World(Protocol.SGLANG)
    assert world.waits()
    world.calls.posted[0].sent()
    assert not world.waits()
    replies(world.session, begun(status))
    assert world.calls.posted[0].cancelled, "the prefill engine would wait for minutes"
    assert world.reserved == [0, 0]


def test_a_client_is_charged_once_for_a_request_that_is_decided_three_times() -> None:
    quotas = Quotas(QuotaTable(default=Limits(tokens_per_minute=40_000)))
    world = World(Protocol.SGLANG, quotas=quotas)
    for _ in range(3):
        assert world.waits()
        world.calls.posted[-1].end(None, "connection refused")
    assert not world.waits()
    assert json.loads(world.said[-1].immediate_response.body)["error"]["code"] == "no_prefill"
    assert quotas.spend(DEFAULT_FLOW, 30_000, 0.0) is not None, "not at all, since nobody computed anything"


def test_a_sidecar_is_told_by_a_header_and_nobody_waits() -> None:
    world = World(Protocol.LLM_D)
    assert not world.waits()
    assert headers_of(world)["x-prefiller-host-port"] == "10.0.0.7:8000"
    assert world.sent == BODY
    assert not world.calls.posted
    assert world.reserved[0] > 0, "until the answer begins"
    world.session.close()
    assert world.reserved == [0, 0]


async def test_no_client_keeps_the_others_out_of_the_calls() -> None:
    hangs, aborted, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Http:
        async def post(self, _address: str, path: str, *_: object, **__: object) -> None:
            if path == "/abort_request":
                aborted.set()
            await hangs.wait()

    calls = PrefillCalls(lambda _server: Http())  # type: ignore[arg-type, return-value]

    def post(client: str | None) -> Callable[[], object] | None:
        return calls.post("p", "a", "/", {}, [], client=client, within_s=9, sent=gone.set, ended=lambda *_: gone.set())

    greedy = [cancel for cancel in (post("greedy") for _ in range(MOST_CALLS)) if cancel is not None]
    assert len(greedy) == len(calls) == MOST_CALLS // 2
    assert post("another") is not None
    more = [cancel for cancel in (post(None) for _ in range(MOST_CALLS)) if cancel is not None]
    assert (len(greedy) + 1 + len(more), post("a third")) == (MOST_CALLS, None)
    calls.abort("d", "a", b"{}")
    await asyncio.wait_for(aborted.wait(), 60)
    for cancel in greedy:
        cancel()
    await until(lambda: len(calls) == MOST_CALLS // 2, "those that were broken off leave room")
    assert post("greedy") is not None
    for cancel in more:
        cancel()
    await until(lambda: len(calls) == 2, "the others, too")
    assert not gone.is_set(), "who breaks a request off knows that it ended"
    hangs.set()


class Interleaving:
    """Streams, calls and endpoints of which anything may happen at any time; in the end nothing may be left."""

    def __init__(self, protocols: Sequence[Protocol]) -> None:
        self.now, self.picker, self.calls, self.answered = 0.0, Picker(), Calls(), 0
        self.specs = [
            EndpointSpec(f"{role[0]}{at}", f"10.0.{at}.{len(role)}:8000", role=role, transfer=Transfer(protocol))
            for at, protocol in enumerate(protocols)
            for role in (Role.PREFILL, Role.DECODE)
        ]
        self.every: list[Endpoint] = []
        for at in range(len(self.specs)):
            self.add(at, True)
        self.router = Router(self.picker, ModelRegistry(), Metrics(), clock=lambda: self.now)
        self.router.prefilling = Prefilling(self.picker.parts, self.calls, self.router.clock)  # type: ignore[arg-type]
        self.router.quotas = self.quotas = Quotas(QuotaTable(default=Limits(requests_per_day=1_000_000)))
        self.streams: list[tuple[ExtProcSession, Iterator[Any]]] = []

    def open(self, _at: int, _how: object) -> None:
        session = ExtProcSession(self.router, SessionLimits(1_000_000))
        fields = {":path": "/v1/completions", ":method": "POST", "x-request-id": f"{len(self.streams)}"}
        list(session.answers(head(fields).SerializeToString()))
        answering = session.answers(whole(json.dumps(BODY).encode()).SerializeToString())
        self.streams.append((session, answering))
        self.go_on(len(self.streams) - 1, None)

    def go_on(self, at: int, status: str | None) -> None:
        """Let a stream go on. If its request is decided and there is a status, the response begins."""
        if self.streams:
            session, answering = self.streams[at % len(self.streams)]
            waits = next((one for one in answering if isinstance(one, Prefill)), None)
            if waits is None and not session.ended and status is not None:
                self.answered += status == "200"
                replies(session, begun(status))

    def close(self, at: int, _how: object) -> None:
        if self.streams:
            self.streams.pop(at % len(self.streams))[0].close()

    def sent(self, at: int, _how: object) -> None:
        if running := [one for one in self.calls.posted if not (one.over or one.cancelled)]:
            running[at % len(running)].sent()

    def end(self, at: int, answer: Answer | None) -> None:
        if running := [one for one in self.calls.posted if not (one.over or one.cancelled)]:
            running[at % len(running)].end(answer, "broken off")

    def fill(self, _at: int, full: bool) -> None:
        self.calls.full = full

    def add(self, at: int, _how: object) -> None:
        spec = self.specs[at % len(self.specs)]
        endpoint = self.picker.add_endpoint(spec)
        self.every.append(endpoint)
        if spec.role is Role.DECODE:
            self.picker.on_load(spec.name, ScrapedLoad(running=16), self.now)

    def switch(self, at: int, role: Role) -> None:
        spec = self.specs[at % len(self.specs)]
        self.every.append(self.picker.add_endpoint(replace(spec, role=role)))

    def remove(self, at: int, _how: object) -> None:
        self.picker.remove_endpoint(self.specs[at % len(self.specs)].name)

    def wait(self, _at: int, seconds: float) -> None:
        self.now += seconds
        self.picker.on_tick(self.now)

    def finish(self) -> None:
        while self.streams:
            self.close(0, None)
        assert len(self.calls) <= self.answered, "nobody wants the others"
        while len(self.calls):
            self.end(0, DONE)
        for endpoint in self.every:
            reservations = endpoint.load.reservations
            reservations.check()
            left = [one for one in reservations._open.values() if not one.answered]  # those that were run for a while
            assert (left, endpoint.unanswered) == ([], 0), endpoint.spec
        router, prefilling = self.router, self.router.prefilling
        assert (router._leases, router._exchanges) == ({}, {})
        assert prefilling.outcomes.total() >= len(self.calls.posted)
        assert (router.metrics.open_streams, router.metrics.internal_errors._value.get()) == (0, 0)
        self.picker.index.check()


STEPS: list[tuple[Callable[[Interleaving, int, Any], None], Any]] = [
    *[
        (Interleaving.open, None),
        (Interleaving.sent, None),
        (Interleaving.go_on, None),
        (Interleaving.go_on, "200"),
        (Interleaving.go_on, "400"),
        (Interleaving.go_on, "500"),
    ]
    * 3,
    *[(Interleaving.end, answer) for answer in (DONE, None, Answer(400, {}, b"", True), Answer(503, {}, b"", True))],
    *[
        (Interleaving.close, None),
        (Interleaving.add, None),
        (Interleaving.remove, None),
        (Interleaving.fill, True),
        (Interleaving.fill, False),
    ],
    *[(Interleaving.switch, role) for role in Role],
    *[(Interleaving.wait, seconds) for seconds in (0.1, 5.0, 700.0)],
]


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from(Protocol), min_size=1, max_size=2),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(STEPS)), max_size=30),
)
def test_no_order_of_events_leaves_anything_reserved(
    protocols: list[Protocol], steps: list[tuple[int, tuple[Callable[[Interleaving, int, Any], None], Any]]]
) -> None:
    world = Interleaving(protocols)
    world.open(0, None)
    for at, (step, how) in steps:
        step(world, at, how)
    world.finish()
