"""Engines' descriptions of themselves, and the watcher that polls them."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from support.epp_io import FakeEngine, small_bundle, until
from treeline_epp.endpoints.adapters.base import EngineInfo, KvSource
from treeline_epp.endpoints.adapters.registry import ANYTHING
from treeline_epp.endpoints.engine_http import EngineError, UnusableError
from treeline_epp.endpoints.http_answer import HttpTimeout
from treeline_epp.endpoints.http_client import HttpClient
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.watcher import EngineClient, EngineState, EngineWatcher, ProbePace, Problem

KV = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "replay_endpoint_port_base": 5657,
    "load_endpoint_port_base": 5757,
    "topic": "",
    "load_topic": "load",
    "block_size": 16,
    "dp_size": 1,
    "curve": False,
}


async def test_a_treeline_runtime_says_everything(http: HttpClient, engine: FakeEngine) -> None:
    engine.documents["/server_info"] = {
        "kv_events": KV,
        "epoch": 2**63,
        "tokenizer_fingerprint": "f",
        "more": 1,
    }
    source = KvSource("127.0.0.1", 5557, 5657, 5757, hello=True)
    info = await EngineClient(http, engine.address).info()
    assert info == EngineInfo(("tiny",), str(2**63), "f", (source,), engine="treeline", obeys_ranks=True)


async def test_other_engines_say_less(http: HttpClient, engine: FakeEngine) -> None:
    client = EngineClient(http, engine.address)
    info = await client.info()
    assert (info.models, info.sources, info.engine) == (("tiny",), (), "openai")
    engine.documents["/server_info"] = {"kv_events": {"publisher": "null"}}
    assert (await client.info()).sources == ()
    engine.documents["/server_info"] = {"kv_events": {**KV, "topic": "kv-events"}}
    assert (await client.info()).sources == (KvSource("127.0.0.1", 5557, 5657, 5757, "kv-events"),)


@pytest.mark.parametrize(
    "host", ["*", "", "0.0.0.0", "::", "[::]", "127.0.0.1", "localhost", "::1", "[::1]", "127.1.2.3"]
)
async def test_a_wildcard_host_means_the_endpoints_own_address(http: HttpClient, engine: FakeEngine, host: str) -> None:
    engine.documents["/server_info"] = {"kv_events": {**KV, "endpoint_host": host}}
    info = await EngineClient(http, engine.address).info()
    assert info.sources == (KvSource("127.0.0.1", 5557, 5657, 5757),)
    assert info.foreign_host is None


@pytest.mark.parametrize(
    "host",
    [
        "10.1.2.3",
        "169.254.169.254",
        "[fd00::1]",
        "kubernetes.default.svc",
        "127.0.0.1.evil.example",
        "0",
        "a\nb",
    ],
)
async def test_no_engine_makes_the_picker_connect_elsewhere(
    http: HttpClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    engine.documents["/server_info"] = {"kv_events": {**KV, "endpoint_host": host}}
    info = await EngineClient(http, engine.address).info()
    assert info.sources == (KvSource("127.0.0.1", 5557, 5657, 5757),)
    assert info.foreign_host == host.strip("[]")
    async with watched(http, engine) as (watcher, _):
        await until(lambda: watcher.info is not None, "the engine to be asked")
        await watcher.probed.wait()
        watcher.probed.clear()
        watcher.probe_now()
        await watcher.probed.wait()
    (line,) = [record.getMessage() for record in caplog.records if "KV sockets" in record.getMessage()]
    assert engine.address in line
    assert "\n" not in line


@pytest.mark.parametrize("document", [b"{", b'{"data": 7}', b"[]"])
async def test_an_answer_that_cannot_be_used_is_a_typed_error(
    http: HttpClient, engine: FakeEngine, document: bytes
) -> None:
    engine.documents["/v1/models"] = document
    with pytest.raises(EngineError):
        await EngineClient(http, engine.address).info()
    engine.documents["/treeline/tokenizer"] = document
    with pytest.raises(EngineError):
        await EngineClient(http, engine.address, "treeline").tokenizer()


async def test_the_tokenizer_comes_from_the_engine(http: HttpClient, engine: FakeEngine) -> None:
    client = EngineClient(http, engine.address, "treeline")
    with pytest.raises(EngineError):
        await client.tokenizer()
    engine.documents["/treeline/tokenizer"] = small_bundle().to_json()
    assert await client.tokenizer() == small_bundle()


async def test_without_ready_the_health_page_is_probed(http: HttpClient, engine: FakeEngine) -> None:
    engine.missing = {"/ready"}
    client = EngineClient(http, engine.address)
    assert await client.ready()
    engine.missing = {"/ready", "/health"}
    assert not await client.ready()


@contextlib.asynccontextmanager
async def watched(http: HttpClient, fake: FakeEngine) -> AsyncIterator[tuple[EngineWatcher, list[EngineState]]]:
    told: list[EngineState] = []

    def report(state: EngineState, info: EngineInfo | None) -> None:
        told.append(state)

    watcher = EngineWatcher(EndpointSpec("e", fake.address), EngineClient(http, fake.address), report, ProbePace())
    task = asyncio.create_task(watcher.run())
    try:
        yield watcher, told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_watcher_reports_every_change_once(http: HttpClient, engine: FakeEngine) -> None:
    engine.ready = False
    async with watched(http, engine) as (watcher, told):
        await until(lambda: told == [EngineState.STARTING], "starting")
        engine.ready = True
        await until(lambda: told[-1] is EngineState.READY, "ready")
        assert watcher.info is not None
        assert watcher.info.models == ("tiny",)
        watcher.probe_now()
        engine.models = ("tiny", "lora")
        await until(lambda: watcher.info and watcher.info.models == ("tiny", "lora"), "new models")
        engine.ready = False
        watcher.probe_now()
        await until(lambda: told[-1] is EngineState.DRAINING, "draining")
        await engine.stop()
        await until(lambda: told[-1] is EngineState.DOWN, "down")
        engine.ready = True
        await engine.start()
        await until(lambda: told[-1] is EngineState.READY, "ready again")
    assert told == [
        EngineState.STARTING,
        EngineState.READY,
        EngineState.READY,
        EngineState.DRAINING,
        EngineState.DOWN,
        EngineState.READY,
    ]


async def test_a_kick_makes_the_watcher_probe_at_once(http: HttpClient, engine: FakeEngine) -> None:
    engine.documents["/server_info"] = {"kv_events": KV}  # it pushes, so it is seldom asked
    async with watched(http, engine) as (watcher, told):
        await until(lambda: told == [EngineState.READY], "ready")
        await engine.stop()
        watcher.probe_now()
        await until(lambda: told[-1] is EngineState.DOWN, "down")


async def test_an_engine_without_models_is_not_ready_which_is_logged_once(
    http: HttpClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.documents["/v1/models"] = b"{"
    async with watched(http, engine) as (watcher, told):
        await until(lambda: told == [EngineState.STARTING], "starting")
        for _ in range(3):
            watcher.probed.clear()
            watcher.probe_now()
            await watcher.probed.wait()
        assert len([record for record in caplog.records if "/v1/models" in record.getMessage()]) == 1
        del engine.documents["/v1/models"]
        await until(lambda: told[-1] is EngineState.READY, "ready")
        assert watcher.probed.is_set()


async def state_of(http: HttpClient, address: str, *, trust_ready: bool) -> EngineState:
    """Return a watcher's state of the engine after its first probe."""

    async def report(_state: EngineState, _info: EngineInfo | None) -> None:
        pass

    spec = EndpointSpec("e", address, trust_ready=trust_ready)
    watcher = EngineWatcher(spec, EngineClient(http, address), report, ProbePace())
    watching = asyncio.create_task(watcher.run())
    await asyncio.wait_for(watcher.probed.wait(), 60)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    return watcher.state


async def test_an_engine_trusted_by_discovery_is_ready_if_it_answers_at_all(
    http: HttpClient, engine: FakeEngine
) -> None:
    async def babble(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x12\x04 not HTTP/1.1\r\n")
        await writer.drain()
        writer.close()

    engine.missing = {"/ready", "/health", "/v1/models"}
    assert await state_of(http, engine.address, trust_ready=True) is EngineState.READY
    assert await state_of(http, engine.address, trust_ready=False) is EngineState.STARTING
    engine.missing = set()
    engine.documents["/v1/models"] = b"echo"
    assert await state_of(http, engine.address, trust_ready=True) is EngineState.READY
    assert await state_of(http, engine.address, trust_ready=False) is EngineState.STARTING
    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await state_of(http, address, trust_ready=True) is EngineState.READY
        assert await state_of(http, address, trust_ready=False) is EngineState.DOWN
    assert await state_of(http, address, trust_ready=True) is EngineState.DOWN
    engine.ready = False
    assert await state_of(http, engine.address, trust_ready=True) is EngineState.STARTING


async def test_an_engine_without_a_probe_is_ready_when_it_lists_models(http: HttpClient, engine: FakeEngine) -> None:
    engine.missing = {"/ready", "/health"}  # Ollama, for one
    assert await state_of(http, engine.address, trust_ready=False) is EngineState.READY


async def test_the_reason_for_an_unready_engine_is_logged(
    http: HttpClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "treeline_epp")
    engine.ready = False
    assert await state_of(http, engine.address, trust_ready=False) is EngineState.STARTING
    assert "endpoint e is starting: its health is not answered 200" in caplog.messages
    await engine.stop()
    assert await state_of(http, engine.address, trust_ready=False) is EngineState.DOWN
    assert any(f"endpoint e is down: http://{engine.address}: Connection refused" in text for text in caplog.messages)


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


async def _bomb(writer: asyncio.StreamWriter) -> None:
    packed = gzip.compress(b" " * 5_000_000)
    writer.write(
        _HEAD + b"connection: close\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed) + packed
    )


async def _endless(writer: asyncio.StreamWriter) -> None:
    writer.write(_HEAD + b"transfer-encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
        await writer.drain()


async def _dripping(writer: asyncio.StreamWriter) -> None:
    writer.write(_HEAD + b"content-length: 60000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def _crumbs(writer: asyncio.StreamWriter) -> None:
    writer.write(_HEAD + b"transfer-encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"1\r\n \r\n" * 10_000)
        await writer.drain()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (_bomb, "encoded"),
        (_endless, "longer than"),
        (_dripping, "no whole answer within"),
        (_crumbs, "comes in crumbs"),
    ],
)
async def test_answers_of_engines_take_bounded_memory_and_time(http: HttpClient, answer: Answer, error: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        client = EngineClient(http, f"{host}:{port}")
        with pytest.raises((HttpTimeout, EngineError), match=error):
            await client.ready()


async def test_a_list_of_models_has_a_bounded_length_and_usable_names(http: HttpClient, engine: FakeEngine) -> None:
    for models in ([{"id": "x" * 1000}], [{"id": ""}], [{"id": f"m{i}"} for i in range(5000)]):
        engine.documents["/v1/models"] = {"data": models}
        with pytest.raises(EngineError):
            await EngineClient(http, engine.address).info()


class SlowToList:
    """An engine that is healthy, and answers the question after its models late and without them."""

    adapter = ANYTHING

    def __init__(self) -> None:
        self.asked, self.answers = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def ready(self) -> bool:
        return True

    async def info(self) -> EngineInfo:
        self.asked.release()
        await self.answers.acquire()
        raise UnusableError("it has no /v1/models")


async def test_the_problem_of_an_engine_stays_while_it_is_asked_again() -> None:
    engine = SlowToList()
    watcher = EngineWatcher(EndpointSpec("e", "127.0.0.1:1"), engine, lambda *_: None, ProbePace())  # type: ignore[arg-type]
    watching = asyncio.create_task(watcher.run())
    await engine.asked.acquire()
    for _ in range(3):
        engine.answers.release()
        watcher.probe_now()
        await engine.asked.acquire()
        assert watcher.problem == Problem("it has no /v1/models", lasting=True)
    watching.cancel()


async def test_waiting_helps_while_connections_are_accepted_and_ended() -> None:
    """A forwarder of ports does so while the engine behind it loads."""
    forwarder = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{forwarder.sockets[0].getsockname()[1]}"
    http = HttpClient()
    watcher = EngineWatcher(EndpointSpec("e", address), EngineClient(http, address), lambda *_: None, ProbePace())
    watching = asyncio.create_task(watcher.run())
    await watcher.probed.wait()
    assert watcher.problem is not None
    assert not watcher.problem.lasting
    watching.cancel()
    await http.close()
    forwarder.close()
