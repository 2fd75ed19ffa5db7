"""Bounds at the edge: the time for a request to arrive, memory, connections, and each client's share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.envoy import self_signed
from support.epp_io import Plane, data_plane, engines, equal, so, until
from support.http import client
from support.ports import free_ports
from support.raw_http import http1, http2
from treeline_epp.extproc.clients import BODIES
from treeline_operator.envoy.config import Limits

pytestmark = [pytest.mark.integration, pytest.mark.deep]

Tasks = list[asyncio.Task[bytes]]

MB = 1024 * 1024
SIZE = 8_000_000


def head(length: int, *, path: str = "/v1/completions", key: str = "") -> bytes:
    fields = f"POST {path} HTTP/1.1\r\nhost: edge\r\ncontent-type: application/json\r\nx-api-key: {key}\r\n"
    return f"{fields}content-length: {length}\r\n\r\n".encode()


async def half_sent(port: int, *, size: int = SIZE, pause_s: float = 0.0, key: str = "") -> bytes:
    """Send a request without its last byte. Return everything received until the connection closed. `pause_s` after
    every megabyte makes it a slow client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        writer.write(head(size, key=key))
        for start in range(0, size - 1, MB):
            writer.write(b"x" * min(MB, size - 1 - start))
            await writer.drain()
            await asyncio.sleep(pause_s)
    try:
        return await reader.read(1 << 16)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def allocated(plane: Plane) -> int:
    """Return the bytes of Envoy's heap in use."""
    async with client() as http:
        return int((await http.get(f"{plane.envoy.admin}/memory")).json()["allocated"])


@contextlib.asynccontextmanager
async def many(count: int, port: int, **options: Any) -> AsyncIterator[Tasks]:
    tasks = [asyncio.create_task(half_sent(port, **options)) for _ in range(count)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_bodies_that_stop_half_way_end_after_the_body_timeout_and_others_are_served_meanwhile(
    tmp_path: Path,
) -> None:
    limits = Limits(body_timeout_s=3.0)
    async with engines(1) as fakes, data_plane(tmp_path, fakes, limits=limits) as plane:
        before = await allocated(plane)
        async with many(10, plane.envoy.config.listen_port) as tasks:
            await until(
                lambda: so(allocated(plane), lambda now: now > before + 10 * SIZE * 0.9), "Envoy holds all of them"
            )
            assert (await plane.complete()).status_code == 200
            assert not any(task.done() for task in tasks)
            answers = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        for answer in answers:
            assert answer.startswith(b"HTTP/1.1 408 ")
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "request_timeout")
        await until(lambda: so(allocated(plane), lambda now: now < before + SIZE), "the memory is free again")
        assert (await plane.complete()).status_code == 200
        assert [seen.path for seen in fakes[0].served] == ["/v1/completions"] * 2


async def test_headers_that_stop_half_way_end_after_their_timeout(tmp_path: Path) -> None:
    limits = Limits(headers_timeout_s=0.5)
    async with engines(1) as fakes, data_plane(tmp_path, fakes, limits=limits) as plane:
        answer = await http1(plane.envoy.config.listen_port, b"POST /v1/completions HTTP/1.1\r\nhost: e\r\nx-a")
        assert answer.status == 408
        assert json.loads(answer.body)["error"]["code"] == "request_timeout"


async def test_an_answer_may_take_longer_than_its_request(tmp_path: Path) -> None:
    limits = Limits(body_timeout_s=0.5)
    async with engines(1) as fakes, data_plane(tmp_path, fakes, limits=limits) as plane:
        fakes[0].hold = asyncio.Event()
        asked = asyncio.create_task(plane.complete())
        await until(lambda: fakes[0].served, "the engine has the request")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asked), 1.5)
        fakes[0].hold.set()
        assert (await asked).status_code == 200


async def test_a_connection_without_a_request_is_closed(tmp_path: Path) -> None:
    limits = Limits(idle_timeout_s=0.5)
    async with engines(1) as fakes, data_plane(tmp_path, fakes, limits=limits) as plane:
        reader, writer = await asyncio.open_connection("127.0.0.1", plane.envoy.config.listen_port)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


async def test_near_the_heap_limit_bodies_are_ended_and_the_memory_stays_below_it(tmp_path: Path) -> None:
    limits = Limits(heap_bytes=64 * MB, body_timeout_s=600)
    (health,) = free_ports(1)
    settings = {"limits": limits, "health_port": health}
    async with engines(1) as fakes, data_plane(tmp_path, fakes, **settings) as plane:
        most, statuses = 0, Counter[int]()
        # 100 ms pass between two looks at the heap: 5 MB.
        slowly = many(20, plane.envoy.config.listen_port, pause_s=0.4)
        async with slowly as tasks, client() as http:
            while sum(task.done() for task in tasks) < 12:  # 160 MB were sent, at most 64 MB fit
                most = max(most, await allocated(plane))
                statuses[(await plane.complete()).status_code] += 1
                # An edge out of memory is no edge that should get no requests.
                assert (await http.get(f"http://127.0.0.1:{health}/ready")).status_code == 200
            assert most < 1.25 * limits.heap_bytes, "160 MB were sent"
            assert set(statuses) <= {200, 503}
            remaining = [task for task in tasks if not task.done()]
            assert (await plane.complete()).status_code in (200, 503)
            for task in remaining:
                task.cancel()
        await until(lambda: equal(plane.status(), 200), "requests are served again")
        overload = await plane.envoy.stats("overload.envoy.load_shed_points.http1_server_abort_dispatch")
        assert max(overload.values()) >= 12


async def test_half_sent_bodies_of_one_key_take_nothing_from_another(tmp_path: Path) -> None:
    limit = 4 * MB
    settings = {
        "limits": Limits(heap_bytes=128 * MB, body_timeout_s=600),
        "api_keys": {"ada": "sk-ada", "bob": "sk-bob"},
        "body_limit": limit,
    }
    flags = ("--max-client-requests", "1000", "--max-body-bytes", str(limit))
    bob = {"x-api-key": "sk-bob"}
    async with engines(1) as fakes, data_plane(tmp_path, fakes, *flags, **settings) as plane:
        tasks: Tasks = []
        async with contextlib.AsyncExitStack() as stack:
            for wave in range(1, 11):  # 400 MB in all
                sent = many(10, plane.envoy.config.listen_port, size=limit - MB // 10, key="sk-ada")
                tasks += await stack.enter_async_context(sent)

                async def refused(count: int = 10 * wave - BODIES, tasks: Tasks = tasks) -> bool:
                    assert (await plane.complete(headers=bob)).status_code == 200
                    return sum(task.done() for task in tasks) >= count

                await until(refused, "so many bodies of a client are on their way, and the others are refused", 60)
            # Who still writes when the connection is closed sees that alone.
            assert {task.result()[:13] for task in tasks if task.done()} <= {b"HTTP/1.1 429 ", b""}
            assert [(await plane.complete(headers=bob)).status_code for _ in range(50)] == [200] * 50


async def test_when_memory_is_short_stalled_bodies_end_before_others_are_refused(tmp_path: Path) -> None:
    limits = Limits(heap_bytes=128 * MB, body_timeout_s=600)
    tasks: Tasks = []
    async with (
        engines(1) as fakes,
        data_plane(tmp_path, fakes, limits=limits) as plane,
        contextlib.AsyncExitStack() as stack,
    ):
        while not any(task.done() for task in tasks):
            held = await allocated(plane)
            if held < limits.heap_bytes * 0.84:
                tasks += await stack.enter_async_context(many(2, plane.envoy.config.listen_port, size=MB))

            async def seen(held: int = held, tasks: Tasks = tasks) -> bool:
                assert (await plane.complete()).status_code == 200
                return await allocated(plane) >= held + MB or any(task.done() for task in tasks)

            await until(seen, "Envoy holds them, or ends some of them", 60)
        assert (await plane.complete()).status_code == 200


async def test_near_the_heap_limit_the_largest_streams_of_http2_are_reset(tmp_path: Path) -> None:
    limits = Limits(heap_bytes=64 * MB, body_timeout_s=600)
    async with engines(1) as fakes, data_plane(tmp_path, fakes, limits=limits) as plane:
        fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", "edge"),
            (":path", "/v1/completions"),
        ]
        fields += [("content-type", "application/json"), ("content-length", str(SIZE))]
        port, body = plane.envoy.config.listen_port, b"x" * (SIZE - 1)
        tasks = [asyncio.create_task(http2(port, fields, body, end=False, timeout_s=60)) for _ in range(10)]
        try:
            done, _ = await asyncio.wait(tasks, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            assert done, "80 MB do not fit into 64"
            assert all(task.result().reset for task in done)
            assert await allocated(plane) < 1.25 * limits.heap_bytes
            await until(lambda: equal(plane.status(), 200), "requests are served beside the streams that are left")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_overloaded_edge_says_so_in_openai_shape(tmp_path: Path) -> None:
    # Less than Envoy itself takes: everything is too much.
    limits = Limits(heap_bytes=32 * MB)

    def tiny(bootstrap: dict[str, object]) -> None:
        (heap,) = [
            monitor["typed_config"]
            for monitor in bootstrap["overload_manager"]["resource_monitors"]  # type: ignore[index]
            if "fixed_heap" in monitor["name"]
        ]
        heap["max_heap_size_bytes"] = "1000000"

    async with engines(1) as fakes, data_plane(tmp_path, fakes, limits=limits, patch=tiny) as plane:
        answers: list[httpx.Response] = []

        async def refused() -> bool:
            with contextlib.suppress(httpx.TransportError):  # it closes connections, too
                answers.append(await plane.complete())
                return answers[-1].status_code == 503
            return False

        await until(refused, "the edge is overloaded")
        answer = answers[-1]
        assert answer.json()["error"]["code"] == "gateway_overloaded"
        assert answer.headers["retry-after"] == "1"


async def test_connections_beyond_the_limit_are_refused_and_health_stays_available(tmp_path: Path) -> None:
    (health,) = free_ports(1)
    settings = {"limits": Limits(connections=3), "health_port": health}
    async with engines(1) as fakes, data_plane(tmp_path, fakes, **settings) as plane:
        port = plane.envoy.config.listen_port
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)

            async def full() -> bool:
                found = await plane.envoy.stats("listener.*downstream_cx_active")
                return sum(v for k, v in found.items() if str(port) in k) >= 3

            await until(full, "three connections are open")
            assert (await http1(port, head(2) + b"{}")).status == 0
            async with client() as http:
                assert (await http.get(f"http://127.0.0.1:{health}/ready")).status_code == 200
        await until(
            lambda: so(http1(port, head(2) + b"{}"), lambda answer: answer.status == 200), "a place is free again"
        )


async def test_idle_connections_end_soon_when_connections_are_scarce(tmp_path: Path) -> None:
    settings = {"limits": Limits(connections=20, idle_timeout_s=600), "api_keys": {"ada": "sk-ada-1"}}
    async with engines(1) as fakes, data_plane(tmp_path, fakes, **settings) as plane:
        port, ours = plane.envoy.config.listen_port, head(2, key="sk-ada-1") + b"{}"
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(25)]
        asked = (  # nothing, half a preface, and all that HTTP/2 needs: then silence
            b"",
            b"PRI * HTTP/2.0\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
            b"GET /v1/models HTTP/1.1\r\nhost: edge\r\n\r\n",
        )
        for number, (_, writer) in enumerate(opened):
            writer.write(asked[number % len(asked)])
        await until(lambda: so(http1(port, ours), lambda answer: answer.status == 200), "a key has a place", 60)
        for _, writer in opened:
            writer.close()


async def test_a_client_that_takes_all_connections_ends_no_slow_answer(tmp_path: Path) -> None:
    """An action that is active has all timers at their least."""
    async with engines(1) as fakes, data_plane(tmp_path, fakes, limits=Limits(connections=20)) as plane:
        fakes[0].hold = asyncio.Event()
        port, action = plane.envoy.config.listen_port, "overload.envoy.overload_actions.reduce_timeouts"
        scale = f"{action}.scale_percent"
        asked = [asyncio.create_task(http1(port, head(2) + b"{}", timeout_s=60)) for _ in range(20)]
        try:
            await until(lambda: so(plane.envoy.stats(action), lambda now: now[scale] > 90), "timers are shortened", 60)
            assert (await http1(port, head(2) + b"{}")).status == 0, "no connection is left"
            assert (await plane.envoy.stats(action))[f"{action}.active"] == 0
        finally:
            fakes[0].hold.set()
            answers = await asyncio.gather(*asked)
        assert {answer.status for answer in answers} == {200}


async def test_connections_without_a_handshake_end_soon_when_connections_are_scarce(tmp_path: Path) -> None:
    limits = Limits(connections=20, idle_timeout_s=600, headers_timeout_s=3600)
    async with engines(1) as fakes, data_plane(tmp_path, fakes, limits=limits, tls=self_signed(tmp_path)) as plane:
        port = plane.envoy.config.listen_port
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(25)]

        async def served() -> bool:
            with contextlib.suppress(httpx.TransportError):
                async with client(base_url=f"https://127.0.0.1:{port}", verify=False) as http:
                    return (await http.get("/v1/models")).status_code == 200
            return False

        await until(served, "somebody else has a place", 60)
        for _, writer in opened:
            writer.close()


@pytest.mark.parametrize("keys", [True, False], ids=["by-key", "by-address"])
async def test_a_client_that_asks_too_often_is_429_and_others_are_served(tmp_path: Path, keys: bool) -> None:
    settings = {"limits": Limits(client_requests_per_s=2)}
    if keys:
        settings["api_keys"] = {"ada": "sk-ada", "bob": "sk-bob"}  # type: ignore[assignment]
    ada, bob = ({"x-api-key": f"sk-{name}", "x-treeline-client": "eve"} for name in ("ada", "bob"))
    async with engines(1) as fakes, data_plane(tmp_path, fakes, **settings) as plane:
        started = time.monotonic()
        answers = await asyncio.gather(*(plane.complete(headers=ada) for _ in range(40)))
        others = (await plane.complete(headers=bob)).status_code
        statuses = Counter(answer.status_code for answer in answers)
        assert statuses.keys() == {200, 429}
        assert statuses[200] <= 5 + 2 * (time.monotonic() - started), "four at once, and two more a second"
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert others == 200 or not keys
        assert len(fakes[0].served) == statuses[200] + (others == 200)


async def test_a_name_of_a_header_with_an_underscore_is_dropped(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        answer = await plane.complete(headers={"x_treeline_client": "eve", "x-fine": "1"})
        seen = answer.json()["headers"]
        assert "x_treeline_client" not in seen
        assert seen["x-fine"] == "1"


async def test_a_long_body_passes_small_buffers(tmp_path: Path) -> None:
    async with engines(1) as fakes, data_plane(tmp_path, fakes) as plane:
        answer = await plane.complete("x" * 20_000_000)
        assert answer.status_code == 200
        assert answer.json()["body_bytes"] > 20_000_000
