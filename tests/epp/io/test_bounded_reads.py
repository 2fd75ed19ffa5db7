"""Engines that answer without end, or byte by byte: probes, documents and metrics are given up soon."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import pytest
from support.epp_io import until
from treeline_epp.endpoints.engine_http import EngineError, EngineHttp
from treeline_epp.endpoints.http_answer import HttpError, HttpTimeout
from treeline_epp.endpoints.http_client import HttpClient
from treeline_epp.endpoints.model_server_metrics import VLLM
from treeline_epp.endpoints.scraped import ScrapedLoad
from treeline_epp.endpoints.scraper import Failure, Scraper, Scraping

INTERIM = b"HTTP/1.1 103 Early Hints\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
PAGE = b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
LATE_S = 60.0
"""Longer than any test: a read that ends before was ended by a bound."""


def each_byte(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 1] for at in range(len(data)))


ENDLESS: dict[str, Callable[[], Iterable[bytes]]] = {
    "interim responses": lambda: itertools.repeat(INTERIM * 400),
    "interim responses one by one": lambda: itertools.repeat(INTERIM),
    "a head byte by byte": lambda: itertools.chain(each_byte(OK), itertools.cycle([b"x", b":", b"y", b"\r\n"])),
    "a body byte by byte": lambda: itertools.chain([OK + b"content-length: 60000\r\n\r\n"], itertools.repeat(b" ")),
    "chunks byte by byte": lambda: itertools.chain([CHUNKED], itertools.cycle(each_byte(b"1\r\n \r\n"))),
    "a chunk's extension byte by byte": lambda: itertools.chain([CHUNKED + b"1;"], itertools.repeat(b"x")),
}


@contextlib.asynccontextmanager
async def engine(says: Callable[[], Iterable[bytes]]) -> AsyncIterator[tuple[str, list[int]]]:
    """Run an engine that sends each piece by itself. Yields its address and the number of bytes sent."""
    sent = [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                for piece in says():
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                    sent[0] += len(piece)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", sent
    finally:
        server.close()


@pytest.mark.parametrize("shape", ENDLESS)
async def test_a_probe_with_an_endless_answer_is_given_up_early(shape: str) -> None:
    async with engine(ENDLESS[shape]) as (address, sent):
        http = EngineHttp(client := HttpClient(), address)
        with pytest.raises((HttpError, EngineError)) as raised:
            await http.fetch("/health", LATE_S, 64 << 10)
        assert not isinstance(raised.value, HttpTimeout)
        assert sent[0] < 8 << 20
        await client.close()


@pytest.mark.parametrize("shape", ENDLESS)
async def test_endless_metrics_are_given_up_early(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeline_epp.endpoints.scraper.TIMEOUT_S", LATE_S)
    monkeypatch.setattr("treeline_epp.endpoints.scraper.INTERVAL_S", 0.0)
    async with engine(ENDLESS[shape]) as (address, sent):
        scraping = Scraping()
        scraper = Scraper("e", address, scraping, lambda _load, _at: None)
        scraper.follow((VLLM,))
        task = asyncio.create_task(scraper.run())
        await until(lambda: scraper.failing is not None, "it is given up")
        assert scraper.failing in (Failure.UNREACHABLE, Failure.BAD_ANSWER)
        assert sent[0] < 8 << 20
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await scraping.http.close()


async def test_an_answer_in_pieces_after_an_interim_one_is_read_and_so_is_the_next() -> None:
    head = b"content-length: %d\r\n\r\n" % len(PAGE)
    pieces = [INTERIM, *each_byte(OK), head, *[PAGE[at : at + 2] for at in range(0, len(PAGE), 2)]]
    async with engine(lambda: pieces) as (address, _):
        http = EngineHttp(client := HttpClient(), address)
        for _ in range(5):
            assert await http.fetch("/metrics", LATE_S, 1000) == (200, PAGE)
        await client.close()
        loads: list[ScrapedLoad] = []
        scraping = Scraping()
        scraper = Scraper("e", address, scraping, lambda found, _at: loads.append(found[0]))
        scraper.follow((VLLM,))
        task = asyncio.create_task(scraper.run())
        await until(lambda: len(loads) >= 3, "three looks")
        assert set(loads) == {ScrapedLoad(running=3, waiting=2)}
        assert not scraping.failures
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await scraping.http.close()


async def test_a_long_document_is_no_head() -> None:
    body = b'"' + b"x" * (1 << 20) + b'"'
    async with engine(lambda: [OK + b"content-length: %d\r\n\r\n" % len(body) + body]) as (address, _):
        http = EngineHttp(client := HttpClient(), address)
        for _ in range(2):
            assert await http.document("/v1/models", str) == "x" * (1 << 20)
        await client.close()
