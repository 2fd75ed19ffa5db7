"""The simulated engine, seen as a picker sees it: HTTP, a SUB socket, a DEALER socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import zmq
import zmq.asyncio
from tokenizers import Tokenizer
from treeline_bench.processes import answers
from treeline_sim.cache import SimCache
from treeline_sim.connection import CASE_HEADER
from treeline_sim.engine import CHAT, COMPLETIONS, SimCase, SimEngine, SimOptions
from treeline_wire import frames, headers
from treeline_wire.events import BlockStored, block_hash, decode_batch, hash_of, root_digest
from treeline_wire.load import LoadStat, TreelineLoad, decode_load
from treeline_wire.tokenizer import TokenizerBundle

LIMIT_S = 60


def body(text: str) -> bytes:
    return json.dumps({"model": "tiny", "prompt": text}).encode()


CASES = (
    SimCase(COMPLETIONS, body("abc def ghi " * 20), held=True),
    SimCase(COMPLETIONS, body("xyz uvw rst " * 20), held=False),
    SimCase(CHAT, json.dumps({"messages": [{"role": "user", "content": "hello " * 40}]}).encode(), held=True),
)


def cached(answer: httpx.Response) -> int:
    """The prompt tokens that the engine says it had."""
    return int(answer.headers[headers.CACHED_TOKENS])


@dataclass
class Running:
    engine: SimEngine
    ports: Mapping[str, int]

    async def send(self, path: str, content: bytes, more: Mapping[str, str]) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as http:
            return await http.post(f"http://127.0.0.1:{self.ports['http']}{path}", content=content, headers=more)

    async def post(self, case: int) -> httpx.Response:
        return await self.send(CASES[case].path, CASES[case].body, {CASE_HEADER: str(case)})

    async def get(self, path: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports["http"])
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        return answer

    async def get_json(self, path: str) -> dict[str, object]:
        head, _, content = (await self.get(path)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        found: dict[str, object] = json.loads(content)
        return found


@asynccontextmanager
async def running(model: Path, *, fixed: bool = False) -> AsyncIterator[Running]:
    engine = SimEngine(SimOptions(model, cases=CASES, epoch=77, fixed=fixed))
    stop, told = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(engine.run(stop, told.set_result))
    try:
        async with asyncio.timeout(LIMIT_S):
            yield Running(engine, await told)
    finally:
        stop.set()
        await task


@asynccontextmanager
async def dealer(port: int) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    sock = context.socket(zmq.DEALER)
    sock.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield sock
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def subscriber(port: int) -> AsyncIterator[zmq.asyncio.Socket]:
    """A SUB socket that has arrived: the publisher knows of its subscription."""
    context = zmq.asyncio.Context()
    sock = context.socket(zmq.SUB)
    monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    sock.subscribe(b"")
    sock.connect(f"tcp://127.0.0.1:{port}")
    await monitor.recv_multipart()
    sock.disable_monitor()
    try:
        yield sock
    finally:
        context.destroy(linger=0)


async def test_it_describes_itself_as_a_runtime_does(model: Path) -> None:
    async with running(model) as sim:
        info = await sim.get_json("/server_info")
        bundle = TokenizerBundle.from_json((await sim.get("/treeline/tokenizer")).partition(b"\r\n\r\n")[2])
        models = await sim.get_json("/v1/models")
        missing = await sim.get("/nothing")
        assert await asyncio.to_thread(answers, f"http://127.0.0.1:{sim.ports['http']}/ready")
    assert (info["epoch"], info["draining"]) == (77, False)
    kv_events = info["kv_events"]
    assert isinstance(kv_events, dict)
    assert kv_events["endpoint_port_base"] == sim.ports["events"]
    assert kv_events["replay_endpoint_port_base"] == sim.ports["replay"]
    assert kv_events["load_endpoint_port_base"] == sim.ports["load"]
    assert kv_events["block_size"] == 16
    assert info["tokenizer_fingerprint"] == bundle.fingerprint
    assert "tiny" in json.dumps(models)
    assert missing.startswith(b"HTTP/1.1 404 ")


async def test_what_it_holds_is_what_it_says_it_cached(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(json.loads(CASES[0].body)["prompt"]).ids
    async with running(model) as sim:
        outcome = await sim.post(0)
        chat = await sim.post(2)
    assert outcome.status_code == chat.status_code == 200
    assert cached(outcome) == (len(ids) - 1) // 16 * 16
    assert cached(chat) > 0
    usage = outcome.json()["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached(outcome)
    assert chat.json()["choices"][0]["message"]["content"] == "ok"


async def replayed_after(sim: Running, seq: int) -> tuple[int, bytes]:
    async with dealer(sim.ports["replay"]) as sock:
        await sock.send_multipart(frames.replay_request(seq + 1))
        item = frames.parse_reply(await sock.recv_multipart())
        assert isinstance(item, frames.ReplayItem)
        return item.seq, item.payload


async def test_a_new_prompt_is_announced_and_held_from_then_on(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(json.loads(CASES[1].body)["prompt"]).ids
    async with running(model) as sim, subscriber(sim.ports["events"]) as sock:
        # A handshake is not yet a subscription: what was missed is in the replay, as for any picker.
        seq = sim.engine.cache.seq
        first, second = await sim.post(1), await sim.post(1)
        if await sock.poll(2000):
            _, live_seq, payload = frames.parse_live(await sock.recv_multipart())
        else:
            live_seq, payload = await replayed_after(sim, seq)
    assert (cached(first), cached(second)) == (0, (len(ids) - 1) // 16 * 16)
    assert live_seq == seq + 1
    (event,) = decode_batch(payload).events
    assert isinstance(event, BlockStored)
    assert event.token_ids == ids[: len(ids) // 16 * 16]
    digest = block_hash(root_digest(None), ids[:16])
    assert event.block_hashes[:2] == [hash_of(digest), hash_of(block_hash(digest, ids[16:32]))]
    assert event.parent_block_hash is None


async def test_a_fixed_cache_never_learns(model: Path) -> None:
    async with running(model, fixed=True) as sim:
        before = sim.engine.cache.seq
        assert [cached(await sim.post(1)) for _ in range(2)] == [0, 0]
        assert cached(await sim.post(0)) > 0
        assert sim.engine.cache.seq == before


async def test_hello_replay_and_snapshot_agree(model: Path) -> None:
    async with running(model) as sim, dealer(sim.ports["replay"]) as sock:
        await sock.send_multipart(frames.hello_request())
        hello = frames.parse_reply(await sock.recv_multipart())
        assert hello == frames.Hello(77, 0, 1)

        await sock.send_multipart(frames.replay_request(0))
        replayed: set[int] = set()
        while isinstance(item := frames.parse_reply(await sock.recv_multipart()), frames.ReplayItem):
            for event in decode_batch(item.payload).events:
                assert isinstance(event, BlockStored)
                replayed.update(event.block_hashes)
        assert isinstance(item, frames.ReplayEnd)

        await sock.send_multipart(frames.snapshot_request())
        header = frames.parse_reply(await sock.recv_multipart())
        assert isinstance(header, frames.SnapshotHeader)
        held: dict[int, int | None] = {}
        while isinstance(chunk := frames.parse_reply(await sock.recv_multipart()), frames.SnapshotChunk):
            for event in chunk.events:
                assert event.parent_block_hash is None or event.parent_block_hash in held
                held[event.block_hashes[0]] = event.parent_block_hash
        assert isinstance(chunk, frames.SnapshotEnd)
    assert (header.epoch, header.seq, header.blocks) == (77, 1, len(held))
    assert set(held) == replayed
    assert len(held) == sim.engine.cache.blocks


async def test_load_is_reported_in_both_forms(model: Path) -> None:
    async with running(model) as sim, subscriber(sim.ports["load"]) as sock:
        reports = []
        while len(reports) < 2:
            topic, _, payload = frames.parse_live(await sock.recv_multipart())
            reports.append(decode_load(topic, payload))
    kinds = {type(report) for report in reports}
    assert kinds == {LoadStat, TreelineLoad}
    ours = next(report for report in reports if isinstance(report, TreelineLoad))
    assert (ours.epoch, ours.pages_used, ours.running, ours.draining) == (
        77,
        sim.engine.cache.blocks,
        0,
        False,
    )


async def test_an_unknown_case_is_answered_without_a_hit(model: Path) -> None:
    async with running(model) as sim:
        outcome = await sim.send(CHAT, b"{}", {})
    assert outcome.status_code == 200


def test_the_last_token_of_a_prompt_is_never_cached() -> None:
    cache = SimCache(block_size=4, epoch=1)
    assert cache.seq == -1
    cache.store(list(range(8)))
    assert cache.matched_tokens(list(range(8))) == 4
    assert cache.matched_tokens(list(range(9))) == 8
    assert cache.matched_tokens([0, 1, 2, 3, 9, 9, 9, 9, 9]) == 4
    assert cache.store(list(range(7))) is None


def test_only_what_is_new_is_announced() -> None:
    cache = SimCache(block_size=4, epoch=1)
    cache.store(list(range(8)))
    batch = cache.store([*range(8), 50, 51, 52, 53])
    assert batch is not None
    seq, payload = batch
    (event,) = decode_batch(payload).events
    assert isinstance(event, BlockStored)
    assert (seq, event.token_ids, cache.blocks) == (1, [50, 51, 52, 53], 3)
    assert event.parent_block_hash is not None


def test_an_empty_cache_has_nothing_to_replay() -> None:
    cache = SimCache(block_size=4, epoch=9)
    assert list(cache.reply(frames.HelloRequest(), b"")) == [frames.Hello(9, None, None)]
    assert list(cache.reply(frames.ReplayRequest(0), b"")) == [frames.ReplayEnd()]
    header, end = cache.reply(frames.SnapshotRequest(), b"")
    assert (header, end) == (frames.SnapshotHeader(9, -1, 0), frames.SnapshotEnd())


@pytest.mark.parametrize("option", ["--help"])
async def test_the_command_teaches(option: str) -> None:
    import sys

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "treeline_sim", option, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert b"treeline_epp --endpoint" in out
