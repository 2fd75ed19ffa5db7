"""Loads of calls whose answers are not parsed."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.fake_openai import FakeOpenAI, serving
from treeline_bench.context import ClientFailed
from treeline_bench.serving.messages import Call, Order, Record
from treeline_bench.serving.processes import Load
from treeline_bench.serving.worker import Worker

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-kept: yes\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
CLOSING = b"HTTP/1.1 503 Full\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def answer(body: dict[str, Any]) -> bytes:
    return {"chunked": CHUNKED, "closing": CLOSING}.get(body["call"], OK)


def order(server: FakeOpenAI, *names: str, **rest: Any) -> Order:
    calls = [Call(f"/v1/{name}", json.dumps({"call": name}).encode()) for name in names]
    return Order(host="127.0.0.1", port=server.port, calls=calls, **{"concurrency": 2, **rest})


async def carry(given: Order) -> list[Record]:
    async with asyncio.timeout(60):
        return (await Worker(given, lambda progress: None).run(time.monotonic_ns())).records


def good(records: list[Record]) -> list[Record]:
    return [record for record in records if not record.error]


async def test_a_closed_loop_sends_everything_over_few_connections() -> None:
    with serving(answer) as server:
        records = await carry(order(server, "a", "b", concurrency=3, count=50, keep_header="X-Kept"))
    assert len(records) == len(good(records)) == 50
    assert sorted(record.conversation for record in records) == [0] * 25 + [1] * 25
    assert server.bodies.count({"call": "a"}) == 25
    assert server.connections == 3
    assert all(record.sent_ns < record.done_ns and record.header == "yes" for record in records)


async def test_a_connection_that_the_server_closes_is_replaced() -> None:
    with serving(answer) as server:
        records = await carry(order(server, "closing", "chunked", concurrency=1, count=6))
    assert [record.error for record in records] == ["HTTP 503", ""] * 3
    assert server.connections >= 3


def test_calls_are_one_process_work(tmp_path: Path) -> None:
    with serving(answer) as server, Load(order(server, "a", count=20), 2, tmp_path) as load:
        (told,) = load.run()
    assert len(good(told.records)) == 20


def test_a_load_process_that_cannot_run_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ClientFailed, match="a load process ended"),
        Load(Order(host="127.0.0.1", port=9, calls=[Call("/", b"")], arrivals=[-1.0, "x"]), 1, tmp_path) as load,  # type: ignore[list-item]
    ):
        load.run()
