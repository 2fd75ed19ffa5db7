"""Each client's share of the memory of requests in flight."""

import asyncio
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from treeline_runtime.gate import MAX_GENERATIONS_OF_CLIENT
from treeline_runtime.messages import CustomProcessor, GenerateReq, Grammar, HeardReq, Reply, SamplingParams, encode
from treeline_runtime.server.app import Observed
from treeline_runtime.server.dependencies import _Reading
from treeline_runtime.server.errors import RETRY, ApiError
from treeline_runtime.server.http import ApiRequest
from treeline_runtime.server.jobs import Answered, Generations
from treeline_runtime.server.limits import (
    GENERATION_BYTES,
    INLINE_BYTES,
    ByteBudget,
    Limits,
    Reservation,
    TooMuchInFlight,
)
from treeline_runtime.server.metrics import Metrics
from treeline_runtime.server.pacing import Pacer
from treeline_runtime.server.sampling import SamplingDefaults
from treeline_runtime.server.service import Service, State
from treeline_runtime.tokenizer_manager import DpRank, TokenizerManager
from treeline_wire import headers as wire_headers

CLIENTS = st.sampled_from(["one", "two", "three", None])


def test_a_client_that_fills_its_share_leaves_room_for_another() -> None:
    budget = ByteBudget(1 << 20)
    hostile = [Reservation(budget, "hostile", free=0) for _ in range(1 << 10)]
    with suppress(TooMuchInFlight):
        for reservation in hostile:
            reservation.grow(1 << 10)
    assert budget.used == 1 << 19
    other = Reservation(budget, "other", free=0)
    other.grow(1 << 18)
    for reservation in hostile:
        reservation.release()
    other.grow(1 << 18)
    other.release()
    assert budget.used == 0


def test_a_request_that_never_fits_is_refused_for_good() -> None:
    budget = ByteBudget(1 << 20)
    with pytest.raises(ApiError) as refused:
        Reservation(budget, "one", free=0).grow((1 << 19) + 1)
    assert refused.value.status == 413
    Reservation(budget, None, free=0).grow(1 << 20)


@given(st.lists(st.tuples(CLIENTS, st.integers(0, 300)), max_size=60))
def test_every_sequence_stays_within_the_budget_and_returns_all(steps: list[tuple[str | None, int]]) -> None:
    budget = ByteBudget(1000)
    held: list[tuple[int, str | None]] = []
    for client, size in steps:
        try:
            budget.reserve(size, client)
        except TooMuchInFlight:
            if held:
                budget.release(*held.pop(0))
        else:
            held.append((size, client))
        named = sum(size for size, owner in held if owner == client)
        assert budget.used == sum(size for size, _ in held) <= 1000
        assert client is None or named <= 500
    for one in held:
        budget.release(*one)
    assert (budget.used, budget._held) == (0, {})


class Sent(list[Any]):
    def send(self, message: Any) -> bool:
        self.append(message)
        return True


def service(budget: int) -> tuple[Service, Sent]:
    """Return a service whose messages are only recorded."""
    sent, metrics, nothing = Sent(), Metrics("m"), cast(Any, None)
    manager = TokenizerManager(metrics, [DpRank(sent, Sent())])
    state = State(ready=True)
    made = Service("m", nothing, SamplingDefaults(), manager, metrics, state, ByteBudget(budget))
    made.limits = Limits(4096, 4096)
    return made, sent


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(stop=("x" * 1024,) * 64),
        SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.5)),
        SamplingParams(stop_token_ids=tuple(range(100_000, 100_128))),
        SamplingParams(grammar=Grammar("regex", "a" * 4096)),
        SamplingParams(logit_processor=CustomProcessor("p", "x" * 4096)),
        SamplingParams(),
    ],
    ids=["stop", "logit_bias", "stop_token_ids", "grammar", "processor", "name and salt"],
)
async def test_everything_that_generations_carry_counts_as_bytes_in_flight(sampling: SamplingParams) -> None:
    made, sent = service(64 << 20)
    job = Generations(rid="r" * 128, prompts=[GenerateReq("", [1], sampling, "s" * 1024)] * 2, n=64)
    inflight = await made.open(job)
    for message in sent:  # it goes on as the scheduler answers
        if isinstance(message, HeardReq):
            made.manager.on_reply(Reply(message.id))
    generations = [encode(message) for message in sent if isinstance(message, GenerateReq)]
    assert len(generations) == job.generations
    carried = sum(map(len, generations)) + (job.generations - 1) * GENERATION_BYTES
    assert carried - INLINE_BYTES <= made.budget.used <= carried + 16 * job.generations
    inflight.close()
    assert made.budget.used == 0


async def test_a_request_that_does_not_fit_is_refused_before_a_copy() -> None:
    made, sent = service(1 << 20)
    with pytest.raises(ApiError) as refused:
        await made.open(
            Generations(rid="r", prompts=[GenerateReq("", [1], SamplingParams(stop=("x" * 1024,) * 64))], n=64)
        )
    assert (refused.value.status, sent, made.budget.used) == (413, [], 0)


async def test_an_admitted_request_is_refused_if_an_operation_begins_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, sent = service(1 << 20)

    async def rest(_: Pacer) -> None:
        made.state.pausing = True

    monkeypatch.setattr(Pacer, "rest", rest)
    with pytest.raises(ApiError) as refused:
        await made.open(Generations(rid="r", prompts=[GenerateReq("", [1], SamplingParams())]))
    assert (refused.value.status, sent, made.budget.used) == (503, [], 0)


async def test_more_generations_than_a_client_may_have_are_429_and_another_client_is_served() -> None:
    made, _ = service(1 << 30)
    jobs = [Generations(rid=str(i), prompts=[GenerateReq("", [1], SamplingParams())], n=1024) for i in range(18)]
    assert MAX_GENERATIONS_OF_CLIENT == 16 * 1024
    opened = [await made.open(job, asking("hostile")) for job in jobs[:16]]
    with pytest.raises(ApiError, match="prompts x n") as refused:
        await made.open(jobs[16], asking("hostile"))
    assert (refused.value.status, refused.value.headers) == (429, RETRY)
    held = made.budget.used
    for client in ("other", None):
        (await made.open(jobs[17], asking(client))).close()
    assert made.budget.used == held
    for _ in range(2):
        opened[0].close()
    opened[0] = await made.open(jobs[16], asking("hostile"))
    with pytest.raises(ApiError):
        await made.open(jobs[17], asking("hostile"))
    for inflight in opened:
        inflight.close()
    assert (made.budget.used, len(made.manager.ranks[0].gate), made.manager.ranks[0].gate._in_flight) == (0, 0, {})


def asking(client: str | None = None, body: bytes = b"") -> ApiRequest:
    headers = [] if client is None else [(wire_headers.CLIENT.encode(), client.encode())]
    made = ApiRequest({"type": "http", "headers": headers}, cast(Any, None))
    made.parts, made.size, made.reservation = [body], len(body), Reservation(ByteBudget(1 << 20), None)
    return made


async def no_message(*_: object) -> Any:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("answered", [True, False])
async def test_a_connection_keeps_nothing_of_ended_requests(answered: bool) -> None:
    """The server keeps the scope until the next request comes on the connection, or for as long as it stays open."""
    request = asking(body=b"x" * 100)
    closed: list[bool] = []
    request.inflight = cast(Any, SimpleNamespace(close=lambda: closed.append(True)))
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "state": {"asked": request}}

    async def fails(_scope: Any, _receive: Any, send: Any) -> None:
        if answered:
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
        raise RuntimeError

    with nullcontext() if answered else pytest.raises(RuntimeError):
        await Observed(fails, service(0)[0])(scope, no_message, no_message)
    assert scope["state"] == {}
    assert (request.parts, request.inflight, closed) == ([], None, [True])


async def test_a_500_leaves_the_connection_open() -> None:
    """An exception that leaves the application closes the connection."""
    sent: list[Any] = []

    async def fails(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        raise RuntimeError

    async def send(message: Any) -> None:
        sent.append(message)

    await Observed(fails, service(0)[0])({"type": "http", "method": "GET", "path": "/x"}, no_message, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


SLOW = b'{"a":[' + b"9.092e300," * 100 + b"1]}"


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b'{"a":1}', "here"),
        (b'{"a":[' + b"0.5," * 1000 + b"1e-5]}", "here"),
        (b'{"a":"' + b"x" * INLINE_BYTES + b'"}', "in a process"),
        (SLOW, "in a process"),
        (b'{"a":"{' + SLOW.replace(b'"', b'\\"') + b'}"}', "in a process"),
    ],
)
async def test_large_or_slow_bodies_are_read_in_a_process(body: bytes, where: str) -> None:
    read: list[str] = []

    class Pool:
        async def read(self, *_: object) -> Answered:
            read.append("in a process")
            return Answered(b"")

    class Here:
        def read(self, *_: object) -> Answered:
            read.append("here")
            return Answered(b"")

    service: Any = SimpleNamespace(pool=Pool(), reader=Here(), limits=None, state=State())
    await Service.read(service, asking(body=body), "chat")
    assert read == [where]


def test_a_body_of_slow_numbers_for_an_endpoint_that_takes_no_prompt_is_refused() -> None:
    with pytest.raises(ApiError, match="too many long numbers"):
        asking(body=SLOW).json_object()
    assert asking(body=b'{"timeout":1e-3}').json_object() == {"timeout": 0.001}


async def test_a_drain_waits_for_no_body_that_is_still_on_its_way() -> None:
    """Who sends one for ever keeps no server; once it is there, the drain waits for the answer."""
    made, _ = service(1 << 20)
    app = SimpleNamespace(state=SimpleNamespace(service=made, guard=lambda _: None))
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "state": {}, "app": app}
    parts = asyncio.Queue[Any](1)
    reading = asyncio.create_task(_Reading(100, generates=True)(Request(scope, parts.get)))
    for _ in range(3):
        await parts.put({"type": "http.request", "body": b"x", "more_body": True})
        await asyncio.sleep(0)
        assert (made.active, made.came, made.idle.is_set()) == (1, 1, True)
    await parts.put({"type": "http.request", "body": b"x"})
    asked = await reading
    assert (made.active, made.came, made.idle.is_set()) == (1, 1, False)
    asked.end()
    assert (made.active, made.came, made.idle.is_set()) == (0, 1, True)
