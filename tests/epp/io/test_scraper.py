"""Engines that push no load: their metrics are scraped over real sockets, also from those that answer badly or
never."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.epp_io import Plane, RunningPicker, data_plane, engines, equal, running_picker, until
from treeline_epp.endpoints import scraper as module
from treeline_epp.endpoints.model_server_metrics import KNOWN, VLLM, MetricNames, PageReader
from treeline_epp.endpoints.scraped import ScrapedLoad
from treeline_epp.endpoints.scraper import Failure, Scraper, Scraping

PAGE = b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
LOAD = ScrapedLoad(running=3, waiting=2)


def answer(body: bytes = PAGE, status: str = "200 OK", *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(head).encode() + body


@dataclass
class Engine:
    """An HTTP server that answers each GET with `says`: whole, or piece by piece until it blocks."""

    says: Callable[[str], bytes | None]
    asked: list[str] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    connections: int = 0
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                assert "accept-encoding: identity" in head
                self.asked.append(head.split(" ")[1])
                self.open += 1
                self.most_open = max(self.open, self.most_open)
                said = self.says(self.asked[-1])
                if said is None:
                    await reader.read()  # until the other side has had enough
                    self.open -= 1
                    break
                writer.write(said)
                await writer.drain()
                self.open -= 1
        writer.close()


@dataclass
class Looked:
    """A scraper at work."""

    engine: Engine
    scraper: Scraper
    scraping: Scraping
    loads: list[tuple[ScrapedLoad, float]] = field(default_factory=list)


@contextlib.asynccontextmanager
async def looking(
    says: Callable[[str], bytes | None], known: tuple[MetricNames, ...] = (VLLM,), scraping: Scraping | None = None
) -> AsyncIterator[Looked]:
    engine = Engine(says)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.port = server.sockets[0].getsockname()[1]
    scraping = scraping or Scraping()
    loads: list[tuple[ScrapedLoad, float]] = []
    scraper = Scraper("e", f"127.0.0.1:{engine.port}", scraping, lambda found, at: loads.append((found[0], at)))
    scraper.follow(known)
    task = asyncio.create_task(scraper.run())
    try:
        yield Looked(engine, scraper, scraping, loads)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await scraping.http.close()
        server.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "MOST_EACH_SECOND", 1000.0)
    monkeypatch.setattr(module, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(module, "TIMEOUT_S", 0.3)


async def test_an_engine_is_scraped_repeatedly_on_one_connection() -> None:
    began = time.monotonic()
    async with looking(lambda _: answer()) as it:
        await until(lambda: len(it.loads) >= 5, "five looks")
        assert {load for load, _ in it.loads} == {LOAD}
        assert began <= it.loads[0][1] <= it.loads[-1][1] <= time.monotonic()
        assert (it.engine.connections, it.engine.most_open) == (1, 1)
        assert it.scraper.failing is None
        assert it.scraping.scrapes >= 5


async def test_a_stalled_engine_is_not_scraped_twice_at_once() -> None:
    async with looking(lambda _: None) as it:
        await until(lambda: it.scraping.failures[Failure.TIMEOUT] >= 2, "two looks are given up")
        assert it.engine.most_open == 1
        assert (it.loads, it.scraper.failing) == ([], Failure.TIMEOUT)
        it.engine.says = lambda _: answer()
        await until(lambda: it.loads, "it is read again")
        assert it.scraper.failing is None


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (answer(b"", "404 Not Found"), Failure.NO_METRICS),
        (answer(b"", "401 Unauthorized"), Failure.NO_METRICS),
        (answer(b"", "500 Internal Server Error"), Failure.STATUS),
        (answer(b"", "307 Temporary Redirect", "location: http://192.0.2.1/metrics"), Failure.STATUS),
        (answer(b'{"vllm:num_requests_waiting": 2}'), Failure.NO_LOAD),
        (answer(b"vllm:num_requests_waiting NaN\n"), Failure.NO_LOAD),
        (answer(gzip.compress(PAGE), "200 OK", "content-encoding: gzip"), Failure.BAD_ANSWER),
        (answer(PAGE + b"#" * module.MOST_BYTES), Failure.BAD_ANSWER),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", Failure.UNREACHABLE),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", Failure.UNREACHABLE),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n" + PAGE, Failure.TIMEOUT),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 99_999, Failure.UNREACHABLE),
    ],
)
async def test_an_invalid_load_page_is_only_counted_by_its_reason(said: bytes, reason: Failure) -> None:
    async with looking(lambda _: said) as it:
        await until(lambda: it.scraper.failing is not None, "it has failed")
        assert it.scraper.failing is reason
        assert it.loads == []


async def test_a_long_page_does_not_block_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two megabytes of short labels take half a second."""
    threads = []

    read = PageReader.read

    def reading(self: PageReader, page: bytes) -> ScrapedLoad | None:
        threads.append(threading.current_thread())
        return read(self, page)

    monkeypatch.setattr(PageReader, "read", reading)
    labels = b",".join(b'l%d="x"' % i for i in range(20))
    many = b"".join(b'vllm:num_requests_swapped{engine="%d",%b} 1\n' % (i, labels) for i in range(2_000))
    for page, here in ((PAGE, True), (PAGE + many, False)):
        async with looking(lambda _, page=page: answer(page)) as it:  # type: ignore[misc]
            await until(lambda: it.loads, "it was read")
            assert it.loads[0][0] == LOAD
        assert (threads[0] is threading.main_thread()) is here
        threads.clear()


async def test_an_engine_without_metrics_is_rarely_scraped_until_it_may_be_another() -> None:
    async with looking(lambda _: answer(b"", "404 Not Found")) as it:
        await until(lambda: it.scraper.failing, "it has none")
        asked = len(it.engine.asked)
        it.scraper.follow(())
        await until(lambda: it.scraping.pause() < 0.02, "it is let be")
        assert len(it.engine.asked) == asked
        it.engine.says = lambda _: answer()
        it.scraper.follow((VLLM,))
        await until(lambda: it.loads, "the new one is read at once")


async def test_a_scrape_of_a_removed_engine_does_not_count() -> None:
    async with looking(lambda _: None) as it:
        await until(lambda: it.engine.open, "a look is open")
        it.scraper.follow(())
        await until(lambda: not it.engine.open, "it ends")
        assert (it.loads, it.scraper.failing, it.scraper.following) == ([], None, False)


async def test_metrics_are_scraped_at_each_engines_own_path() -> None:
    page = b"trtllm_num_requests_running 3\ntrtllm_num_requests_waiting 2\n"
    pages = {"/metrics": answer(b'[{"iter": 1}]'), "/prometheus/metrics": answer(page)}
    async with looking(pages.__getitem__, KNOWN) as it:
        await until(lambda: len(it.loads) >= 3, "three looks")
        assert it.loads[0][0] == LOAD
        assert it.engine.asked[:3] == ["/metrics", "/prometheus/metrics", "/prometheus/metrics"]


async def test_a_slow_page_is_read_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    read = PageReader.read

    def slow(self: PageReader, page: bytes) -> ScrapedLoad | None:
        began = time.thread_time()
        while b"slow" in page and time.thread_time() < began + 0.02:
            pass
        return read(self, page)

    monkeypatch.setattr(PageReader, "read", slow)
    async with looking(lambda _: answer()) as one, looking(lambda _: answer(PAGE + b"slow 1\n")) as other:
        await until(lambda: other.loads and len(one.loads) >= 10, "ten looks at one")
        assert len(other.loads) == 1


def test_many_engines_are_scraped_less_often_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    scraping = Scraping()
    scraping.count(50)
    assert all(0.5 <= scraping.pause() <= 0.65 for _ in range(50)), "at most twice a second"
    scraping.count(250)
    pauses = [scraping.pause() for _ in range(300)]
    assert 300 / min(pauses) <= module.MOST_EACH_SECOND
    assert len(set(pauses)) > 250, "not all in one moment"


# The whole picker


def page(running: int, waiting: int) -> bytes:
    own = b'{model_name="m",engine="0"}'
    return b"vllm:num_requests_running%s %d.0\nvllm:num_requests_waiting%s %d.0\n" % (own, running, own, waiting)


async def in_flight(picker: RunningPicker) -> list[int | None]:
    pools = (await picker.get("/endpoints")).json()["pools"]
    return [each["in_flight"] for each in pools["default"]["endpoints"]]


async def served(plane: Plane, count: int) -> list[str]:
    asked = [plane.http.post("/v1/completions", json={"model": "tiny", "prompt": f"{i} " * 99}) for i in range(count)]
    return [reply.json()["engine"] for reply in await asyncio.gather(*asked)]


@pytest.mark.integration
async def test_the_less_loaded_of_two_scraped_engines_is_chosen(tmp_path: Path) -> None:
    async with engines(2) as made:
        made[0].documents["/metrics"], made[1].documents["/metrics"] = page(9, 40), page(1, 0)
        async with data_plane(tmp_path, made) as plane:

            async def told(expected: list[int]) -> bool:
                return await in_flight(plane.picker) == expected

            await until(lambda: told([49, 1]), "both are read")
            assert set(await served(plane, 5)) == {"e1"}
            made[0].documents["/metrics"], made[1].documents["/metrics"] = page(0, 0), page(9, 40)
            await until(lambda: told([0, 49]), "they have changed places")
            assert set(await served(plane, 5)) == {"e0"}
            metrics = await plane.picker.metrics()
            assert metrics["treeline_epp_scraped_endpoints"] == 2
            assert metrics["treeline_epp_scrapes_total"] >= 4
            assert metrics["treeline_epp_scrape_age_seconds"] > 0


async def test_an_engine_whose_metrics_fail_is_as_ready_as_before() -> None:
    async with engines(1) as (engine,), running_picker("--endpoint", f"e0={engine.address}") as picker:
        reason = 'treeline_epp_scraped_endpoints_failing{reason="no_metrics"}'
        await until(lambda: equal(picker.metric(reason), 1), "it has no metrics")
        (found,) = (await picker.get("/debug/endpoints")).json()["endpoints"]
        assert (found["state"], found["selectable"], found["silent"]) == ("ready", True, False)
        assert (found["load"], found["load_failing"]) == ("scraped", "no_metrics")
        assert await in_flight(picker) == [None]


async def test_a_returning_engine_is_scraped_again() -> None:
    async with engines(1) as (engine,), running_picker("--endpoint", f"e0={engine.address}") as picker:
        engine.documents["/metrics"] = page(1, 0)
        await engine.stop()
        await until(lambda: state_is(picker, "down"), "it is known to be down")
        assert (await picker.metrics())["treeline_epp_scraped_endpoints"] == 0
        await engine.start()
        await until(lambda: equal(in_flight(picker), [1]), "it is read")


async def state_is(picker: RunningPicker, state: str) -> bool:
    (found,) = (await picker.get("/debug/endpoints")).json()["endpoints"]
    return bool(found["state"] == state)
