"""Simulated engines behind sockets, as clients and pickers see them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
import zmq.asyncio
from tokenizers import Tokenizer
from treeline_sim.connection import CASE_HEADER, MAX_BODY_BYTES
from treeline_sim.model.engine import EngineConfig
from treeline_sim.openai import CHAT, COMPLETIONS, SimCase
from treeline_sim.server import Dialect, ServerConfig, SimServer
from treeline_wire import frames, headers
from treeline_wire.events import BlockStored, decode_batch
from treeline_wire.load import TreelineLoad, decode_load
from treeline_wire.tokenizer import TokenizerBundle

ENGINE = EngineConfig(kv_tokens=8000, block_size=16)
CONFIG = ServerConfig(ENGINE, speedup=20.0, context=4000)
LIMIT_S = 60
WORD = " a"


@asynccontextmanager
async def serving(model: Path, config: ServerConfig = CONFIG) -> AsyncIterator[tuple[SimServer, httpx.AsyncClient]]:
    server = SimServer(config, TokenizerBundle.from_dir(model))
    await server.start()
    try:
        async with (
            asyncio.timeout(LIMIT_S),
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{server.ports['http']}", trust_env=False, timeout=60
            ) as client,
        ):
            yield server, client
    finally:
        await server.close()


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8} | more


async def events(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[httpx.Response, list[Any]]:
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return answer, [json.loads(line) for line in lines[:-1]]


async def test_a_chat_is_streamed_and_cached(model: Path) -> None:
    body = asked("tell me of rivers " * 30, stream=True, stream_options={"include_usage": True})
    async with serving(model) as (server, client):
        first, _ = await events(client, body)
        answer, parts = await events(client, body)
        server.engine.check()
    assert first.headers[headers.CACHED_TOKENS] == "0"
    cached = int(answer.headers[headers.CACHED_TOKENS])
    assert cached > 100
    *_, ending, usage = parts
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    said = "".join(part["choices"][0]["delta"].get("content", "") for part in parts if part["choices"])
    assert said == WORD * 8
    assert ending["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 8
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


async def test_answers_may_be_whole(model: Path) -> None:
    async with serving(model) as (_, client):
        chat = (await client.post("/v1/chat/completions", json=asked("hello"))).json()
        text = (await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})).json()
        ids = (await client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 1})).json()
    assert chat["choices"][0]["message"]["content"] == WORD * 8
    assert (text["choices"][0]["text"], text["usage"]["completion_tokens"]) == (WORD * 3, 3)
    assert ids["usage"]["prompt_tokens"] == 3


async def test_a_prompt_takes_its_simulated_time(model: Path) -> None:
    slow = replace(ENGINE.speed, token_s=0.2)
    config = replace(CONFIG, engine=replace(ENGINE, speed=slow), speedup=1000.0)
    async with serving(model, config) as (server, client):
        body = {"prompt": list(range(100, 3100)), "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert server._now() > 3000 * slow.token_s, "ten minutes of the engine's clock"


async def test_computed_blocks_and_load_are_published(model: Path) -> None:
    context = zmq.asyncio.Context()
    try:
        async with serving(model) as (server, client):
            dealer, load = context.socket(zmq.DEALER), context.socket(zmq.SUB)
            dealer.connect(f"tcp://127.0.0.1:{server.ports['replay']}")
            load.subscribe(b"treeline.load")
            load.connect(f"tcp://127.0.0.1:{server.ports['load']}")
            await client.post("/v1/chat/completions", json=asked("rivers and lakes " * 30))
            await dealer.send_multipart(frames.replay_request(0))
            item = frames.parse_reply(await dealer.recv_multipart())
            assert isinstance(item, frames.ReplayItem)
            (event,) = decode_batch(item.payload).events
            await dealer.send_multipart(frames.hello_request())
            while not isinstance(hello := frames.parse_reply(await dealer.recv_multipart()), frames.Hello):
                pass
            topic, _, payload = frames.parse_live(await load.recv_multipart())
            report = decode_load(topic, payload)
            held = server.engine.cache.cached
    finally:
        context.destroy(linger=0)
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash is None
    assert held >= len(event.block_hashes) > 5
    assert (hello.epoch, hello.oldest) == (1, 0)
    assert isinstance(report, TreelineLoad)
    assert report.pages_total == 500


async def test_a_leaving_clients_request_is_ended(model: Path) -> None:
    async with serving(model, replace(CONFIG, speedup=1.0)) as (server, client):
        body = asked("hello", stream=True, max_tokens=3000)
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_lines())
            assert server.engine.running == 1
        while server.engine.running:  # noqa: ASYNC110 - the server has no word for it
            await asyncio.sleep(0.001)
        server.engine.check()
        assert server.engine.cache.private == 0


async def test_a_full_queue_is_reported(model: Path) -> None:
    engine = replace(ENGINE, max_running=1, max_waiting=1)
    async with serving(model, replace(CONFIG, engine=engine, speedup=1.0)) as (_, client):
        bodies = [asked(f"{number} hello", max_tokens=60) for number in range(4)]
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200, 200, 503, 503]
    assert all(headers.OVERLOADED in answer.headers for answer in answers if answer.status_code == 503)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", b"[]", 400),
        ("/v1/chat/completions", b'{"messages": 5}', 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', 400),
        ("/v1/completions", b'{"prompt": "x", "max_tokens": 1e9}', 400),
        ("/v1/completions", b'{"prompt": "x", "max_tokens": 5000}', 400),
        ("/v1/completions", b'{"prompt": "x", "n": 2}', 400),
        ("/v1/completions", b'{"prompt": []}', 400),
        ("/v1/completions", b"[" * 100_000, 400),
        ("/v1/nothing", b"{}", 404),
        ("/v1/completions", b" " * (MAX_BODY_BYTES + 1), 413),
    ],
)
async def test_unsupported_requests_are_refused_with_a_message(
    model: Path, path: str, body: bytes, status: int
) -> None:
    async with serving(model) as (_, client):
        answer = await client.post(path, content=body)
        assert (await client.get("/health")).status_code == 200
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


async def test_a_prompt_that_memory_cannot_hold_is_refused(model: Path) -> None:
    config = replace(CONFIG, engine=replace(ENGINE, kv_tokens=320))
    async with serving(model, config) as (_, client):
        answer = await client.post("/v1/completions", json={"prompt": [7] * 1000, "max_tokens": 1})
    assert answer.status_code == 400


async def test_in_vllms_dialect_the_engine_names_its_publisher_and_has_metrics(model: Path) -> None:
    async with serving(model, replace(CONFIG, dialect=Dialect.VLLM)) as (server, client):
        answer, parts = await events(client, asked("hello", stream=True))
        sources = (await client.get("/kv_event_sources")).json()
        metrics = (await client.get("/metrics")).text
        assert (await client.get("/server_info")).status_code == 404
    assert headers.CACHED_TOKENS not in answer.headers
    assert len(parts) >= 2
    assert sources["0"]["endpoint"].endswith(str(server.ports["events"]))
    assert 'vllm:num_requests_running{model_name="tiny"} 0' in metrics


def test_a_time_factor_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="1000"):
        ServerConfig(ENGINE, speedup=0.0)


CASES = (
    SimCase(COMPLETIONS, json.dumps({"prompt": "abc def ghi " * 20}).encode(), held=True),
    SimCase(COMPLETIONS, json.dumps({"prompt": "xyz uvw rst " * 20}).encode(), held=False),
    SimCase(CHAT, json.dumps({"messages": [{"role": "user", "content": "hello " * 40}]}).encode(), held=True),
)


async def test_numbered_requests_are_answered_without_reading_their_bodies(model: Path) -> None:
    bundle = TokenizerBundle.from_dir(model)
    tokens = len(Tokenizer.from_str(bundle.tokenizer_json).encode("abc def ghi " * 20).ids)
    async with serving(model, replace(CONFIG, cases=CASES)) as (server, client):
        found = []
        for path, number in ((COMPLETIONS, 0), (COMPLETIONS, 1), (COMPLETIONS, 1), (CHAT, 2), (CHAT, 9)):
            answer = await client.post(path, content=b"not read", headers={CASE_HEADER: str(number)})
            usage = answer.json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == int(answer.headers[headers.CACHED_TOKENS])
            found.append(int(answer.headers[headers.CACHED_TOKENS]))
        assert (server.engine.journal.seq, server.load().running) == (0, 0)
    assert found[:3] == [(tokens - 1) // 16 * 16, 0, 0], "it learns nothing"
    assert found[3] > 0
    assert found[4] == 0
