"""The load client against a server in the same loop, which misbehaves on request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from treeline_bench.client.load import carry_out
from treeline_bench.client.messages import Call, ClosedLoop, Outcome, Paced, Plan, Report
from treeline_bench.client.process import ClientFailed, run_client

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-kept: yes\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
CLOSING = b"HTTP/1.1 503 Full\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Server:
    """Answers by path; keeps what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.connections = 0
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1]
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
                self.bodies.append(await reader.readexactly(length))
                if not await self.answer(path, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, path: bytes, writer: asyncio.StreamWriter) -> bool:
        match path:
            case b"/chunked":
                writer.write(CHUNKED)
            case b"/slowly":
                writer.write(CHUNKED[:60])
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.write(CHUNKED[60:])
            case b"/closing":
                writer.write(CLOSING)
                return False
            case b"/cut":
                writer.write(OK[:-1])
                return False
            case b"/silent":
                await asyncio.sleep(3600)
            case b"/nonsense":
                writer.write(b"what?\r\n\r\n")
            case _:
                writer.write(OK)
        await writer.drain()
        return True


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()


def plan(server: Server, *paths: str, arrivals: ClosedLoop | Paced | None = None, **rest: object) -> Plan:
    calls = [Call(path, f"body {path}".encode()) for path in paths]
    return Plan("127.0.0.1", server.port, calls, arrivals or ClosedLoop(2), **rest)  # type: ignore[arg-type]


async def carry(plan: Plan) -> Report:
    async with asyncio.timeout(60):
        return await carry_out(plan)


async def test_a_closed_loop_sends_everything_over_few_connections() -> None:
    async with serving() as server:
        report = await carry(plan(server, "/a", "/b", arrivals=ClosedLoop(3), count=50))
    assert len(report.outcomes) == len(report.answered()) == 50
    assert sorted(outcome.call for outcome in report.outcomes) == [0] * 25 + [1] * 25
    assert server.bodies.count(b"body /a") == 25
    assert server.connections == 3


async def test_times_are_in_order_and_a_header_is_kept_on_request() -> None:
    async with serving() as server:
        report = await carry(plan(server, "/a", count=1, keep_header="x-kept"))
    (outcome,) = report.outcomes
    assert outcome.sent_ns < outcome.done_ns
    assert outcome.header == "yes"
    assert report.wall_s() == pytest.approx(outcome.latency_ms / 1000)


async def test_a_connection_that_the_server_closes_is_replaced() -> None:
    async with serving() as server:
        report = await carry(plan(server, "/closing", "/chunked", arrivals=ClosedLoop(1), count=6))
    assert [outcome.status for outcome in report.outcomes] == [503, 200] * 3
    assert report.errors() == 3
    assert server.connections >= 3


@pytest.mark.parametrize(
    ("path", "error"), [("/cut", "closed"), ("/nonsense", "not HTTP"), ("/silent", "no answer in 1 s")]
)
async def test_what_is_no_whole_answer_is_an_error(path: str, error: str) -> None:
    async with serving() as server:
        report = await carry(plan(server, path, "/fine", arrivals=ClosedLoop(1), count=2, timeout_s=1))
    bad, good = report.outcomes
    assert bad.status == 0
    assert error in bad.error
    assert good.status == 200


async def test_a_paced_load_keeps_its_pace_and_does_not_wait_for_answers() -> None:
    async with serving() as server:
        report = await carry(plan(server, "/slowly", arrivals=Paced(200, connections=2), count=40))
    assert len(report.answered()) == 40
    sent = sorted(outcome.sent_ns for outcome in report.outcomes)
    assert (sent[-1] - sent[0]) / 1e9 >= 0.15  # 39 gaps of 5 ms
    assert server.connections > 2  # answers take ten gaps: two connections would not do


async def test_a_run_ends_when_its_time_is_over() -> None:
    async with serving() as server:
        report = await carry(plan(server, "/a", seconds=0.2))
    assert report.answered()
    assert report.wall_s() >= 0.1


async def test_plans_without_an_end_or_without_calls_are_refused() -> None:
    endless = Plan("127.0.0.1", 1, [Call("/", b"")], ClosedLoop(1))
    with pytest.raises(ValueError, match="end"):
        await carry_out(endless)
    with pytest.raises(ValueError, match="call"):
        await carry_out(Plan("127.0.0.1", 1, [], ClosedLoop(1), count=1))


async def test_the_client_works_as_a_process(tmp_path: Path) -> None:
    async with serving() as server:
        report = await asyncio.to_thread(run_client, plan(server, "/a", count=20), tmp_path)
    assert len(report.answered()) == 20


def test_a_client_that_cannot_start_its_load_says_why(tmp_path: Path) -> None:
    nobody = Plan("127.0.0.1", 9, [Call("/", b"")], ClosedLoop(1), count=1)
    with pytest.raises(ClientFailed, match="onnect"):
        run_client(nobody, tmp_path)


def test_an_empty_report_has_no_duration() -> None:
    assert Report([]).wall_s() == 0
    assert Outcome(0).latency_ms == 0
