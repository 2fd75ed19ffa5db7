"""A load process's work, against a server in another thread."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.fake_openai import DONE, FakeOpenAI, event, serving, token, usage, whole
from treeline_bench.serving.messages import UNFINISHED, Conversation, LoadReport, Order, Progress, Turn
from treeline_bench.serving.worker import GONE_AFTER, Worker

BAD = b"HTTP/1.1 400 x\r\ncontent-length: 3\r\n\r\nno!"


def conversations(count: int, turns: int = 1, output: int = 3) -> list[Conversation]:
    return [Conversation([Turn([index + 1, 7], 2, output)] * turns) for index in range(count)]


def order(server: FakeOpenAI, what: list[Conversation], **more: Any) -> Order:
    path = "/v1/chat/completions" if more.get("chat") else "/v1/completions"
    settings = {"concurrency": 1, "timeout_s": 20.0, "fields": {"model": "m"}, **more}
    return Order(host="127.0.0.1", port=server.port, path=path, conversations=what, **settings)


async def carry_out(given: Order, told: list[Progress] | None = None) -> LoadReport:
    async with asyncio.timeout(30):
        return await Worker(given, (told if told is not None else []).append).run(time.monotonic_ns())


def hang_up(body: dict[str, Any]) -> Iterator[bytes | None]:
    yield token()
    yield None


def never_ends(body: dict[str, Any]) -> Iterator[bytes | None]:
    yield from (token() for _ in range(10_000_000))


async def test_a_closed_loop_asks_in_order_and_records_everything() -> None:
    told: list[Progress] = []
    with serving() as server:
        given = order(server, conversations(5), headers={"authorization": "Bearer 50%"})
        found = await carry_out(given, told)
    assert [body["prompt"] for body in server.bodies] == [[index + 1, 7] for index in range(5)]
    assert all(body["max_tokens"] == 3 and body["model"] == "m" for body in server.bodies)
    for record in found.records:
        assert record.error == ""
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (2, 3, 1)
        assert len(record.tokens_ns) == 3
        assert record.due_ns <= record.begun_ns <= record.sent_ns <= record.tokens_ns[0] <= record.done_ns
        assert record.tokens_ns == sorted(record.tokens_ns)
    assert told[-1] == Progress(0, 5, 0, 15)
    assert found.gone == ""


async def test_the_requested_number_of_requests_is_in_flight() -> None:
    def answer(body: dict[str, Any]) -> Iterator[bytes]:
        while len(server.bodies) < 8:  # no answer comes before all eight requests
            yield b": wait\n\n"
        yield from whole(body)

    with serving(answer) as server:
        found = await carry_out(order(server, conversations(40), concurrency=8))
    spans = [(record.sent_ns, record.done_ns) for record in found.records]
    most = max(sum(start <= moment < end for start, end in spans) for moment, _ in spans)
    assert most == 8


async def test_an_open_loop_measures_from_the_schedule_even_after_failures() -> None:
    moments = [0.0, 0.05, 0.05, 0.1]
    with serving() as server:
        begin = time.monotonic_ns()
        found = await Worker(order(server, conversations(4), arrivals=moments), [].append).run(begin)
    assert [(record.due_ns - begin) / 1e9 for record in found.records] == pytest.approx(moments, abs=1e-8)
    assert all(record.sent_ns >= record.due_ns for record in found.records)


async def test_each_turn_has_the_answers_so_far() -> None:
    talk = [Conversation([Turn(" one two", 2, 2), Turn(" three", 1, 1), Turn(" four", 1, 1)])]
    with serving() as server:
        found = await carry_out(order(server, talk))
    prompts = [body["prompt"] for body in server.bodies]
    assert prompts == [" one two", " one two word word three", " one two word word three word four"]
    assert [record.asked_prompt_tokens for record in found.records] == [2, 5, 7]
    assert [record.turn for record in found.records] == [0, 1, 2]
    # the next turn is due when the last one has ended
    assert all(one.done_ns <= other.due_ns for one, other in zip(found.records, found.records[1:], strict=False))


async def test_ids_have_as_many_ids_as_the_answer_in_its_place() -> None:
    with serving() as server:
        await carry_out(order(server, conversations(1, turns=2, output=5)))
    assert server.bodies[1]["prompt"] == [1, 7, *[1, 7, 1, 7, 1], 1, 7]


async def test_a_chat_has_roles() -> None:
    talk = [Conversation([Turn("hello", 1, 1), Turn("more", 1, 1)])]
    with serving() as server:
        found = await carry_out(order(server, talk, chat=True))
    assert [(each["role"], each["content"]) for each in server.bodies[1]["messages"]] == [
        ("user", "hello"),
        ("assistant", " word"),
        ("user", "more"),
    ]
    assert found.records[1].error == ""


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (lambda body: BAD, "HTTP 400", "no!"),
        (hang_up, "connection lost", "middle"),
        (lambda body: b"what?\r\n\r\n", "not HTTP", ""),
        (lambda body: iter([b"<html>\n\ndata: <html>\n\n"]), "not a stream", "<html>"),
        (lambda body: iter([token(), DONE]), "no usage", "how many tokens"),
        (lambda body: iter([token(), usage(2, 3)]), "cut short", "without an end"),
        (lambda body: iter([token(), event(error={"message": "sick"})]), "error in the stream", "sick"),
        (never_ends, "timeout", "0.2 s"),
    ],
)
async def test_incomplete_answers_are_classified(answer: Any, kind: str, said: str) -> None:
    with serving(answer) as server:
        found = await carry_out(order(server, conversations(1, turns=2), timeout_s=0.2 if kind == "timeout" else 20))
    [record] = found.records  # and the conversation ends there
    assert record.error == kind
    assert said in record.detail
    assert record.done_ns >= record.sent_ns


async def test_an_answer_may_end_with_its_connection() -> None:
    def answer(body: dict[str, Any]) -> Iterator[bytes | None]:
        yield b"".join(whole(body))
        yield None

    with serving(answer) as server:
        found = await carry_out(order(server, conversations(2)))
    assert [record.error for record in found.records] == ["", ""]


async def test_an_arrival_after_the_end_is_not_waited_for() -> None:
    with serving() as server:
        found = await carry_out(order(server, conversations(2), arrivals=[0.0, 3600.0], seconds=5.0))
    assert len(found.records) == 1


async def test_after_an_error_the_next_conversation_goes_on() -> None:
    answers = iter([lambda body: BAD, hang_up, whole, whole])
    with serving(lambda body: next(answers)(body)) as server:  # type: ignore[no-any-return]
        found = await carry_out(order(server, conversations(4)))
    assert [record.error for record in found.records] == ["HTTP 400", "connection lost", "", ""]


async def test_a_server_that_is_not_there_is_given_up() -> None:
    with serving() as server:
        pass  # gone again
    found = await carry_out(order(server, conversations(1000), concurrency=GONE_AFTER))
    assert "could not be opened" in found.gone
    assert len(found.records) == GONE_AFTER
    assert {record.error for record in found.records} == {"cannot connect"}


async def test_a_server_that_dies_under_the_last_requests_is_gone() -> None:
    def dies(body: dict[str, Any]) -> Iterator[bytes | None]:
        yield token()
        server.close()  # in its own thread
        yield None

    with serving(dies) as server:
        found = await carry_out(order(server, conversations(1)))
    assert [record.error for record in found.records] == ["connection lost"]
    assert "no other could be opened" in found.gone
    with serving(hang_up) as alive:
        found = await carry_out(order(alive, conversations(1)))
    assert [record.error for record in found.records] == ["connection lost"]
    assert not found.gone


async def test_after_its_time_a_load_sends_nothing_and_lets_requests_finish() -> None:
    with serving() as server:
        found = await carry_out(order(server, conversations(100_000), seconds=0.2))
    assert 0 < len(found.records) < 100_000
    assert all(record.error == "" for record in found.records)
    assert all(record.due_ns - found.begin_ns < 1.5e9 for record in found.records)
    assert found.lag_ns
    assert 0 < found.busy_share < 2, "of one core: this process has the server's thread too, a load process has not"


async def stopped_when(under_way: threading.Event, given: Order) -> LoadReport:
    """Return the report of a worker that is stopped when `under_way` is set."""
    worker = Worker(given, [].append)
    running = asyncio.create_task(worker.run(time.monotonic_ns()))
    assert await asyncio.to_thread(under_way.wait, 10)
    worker.stop()
    async with asyncio.timeout(60):
        return await running


async def test_stopping_ends_requests_in_flight_and_marks_them() -> None:
    both = threading.Barrier(2, action=(under_way := threading.Event()).set)

    def answer(body: dict[str, Any]) -> Iterator[bytes]:
        threading.Thread(target=both.wait, args=(10,), daemon=True).start()
        yield from never_ends(body)

    with serving(answer) as server:
        found = await stopped_when(under_way, order(server, conversations(10), concurrency=2))
    assert [record.error for record in found.records] == [UNFINISHED, UNFINISHED]


async def test_stopping_ends_the_wait_for_the_next_arrival() -> None:
    under_way = threading.Event()

    def answer(body: dict[str, Any]) -> Iterator[bytes]:
        yield from whole(body)
        under_way.set()

    with serving(answer) as server:
        found = await stopped_when(under_way, order(server, conversations(2), arrivals=[0.0, 3600.0]))
    assert len(found.records) == 1


async def test_our_own_errors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> bytes:
        raise ZeroDivisionError

    with serving() as server:
        worker = Worker(order(server, conversations(3), concurrency=2), [].append)
        monkeypatch.setattr(worker, "_body", fault)
        with pytest.raises(ExceptionGroup) as raised:
            await worker.run(time.monotonic_ns())
    assert isinstance(raised.value.exceptions[0], ZeroDivisionError)
