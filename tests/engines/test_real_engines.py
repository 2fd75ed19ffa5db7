"""The helpers of the tests of real engines, tested without an engine: oracle, witness, traffic, hits, command lines."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from support.bench import model_folder
from support.real_engines.hits import Measured
from support.real_engines.oracle import Oracle
from support.real_engines.server import Server
from support.real_engines.sglang import Sglang
from support.real_engines.traffic import Exchange, Shape, Traffic
from support.real_engines.vllm import Vllm
from support.real_engines.witness import Witness
from support.stack import until
from treeline_bench.context import BenchmarkError
from treeline_bench.prompts import PromptMaker
from treeline_bench.serving.messages import Record

SMALL = Shape(groups=2, talks=2, turns=3, system=24, question=8, answer=4, concurrency=2)


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> PromptMaker:
    return PromptMaker.of_model(model_folder(tmp_path_factory.mktemp("model")))


# -- the oracle

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=8)


@given(known=prompts, asked=st.lists(st.integers(0, 1), min_size=1, max_size=14))
def test_the_oracle_finds_the_longest_beginning_in_whole_blocks(known: list[list[int]], asked: list[int]) -> None:
    oracle = Oracle(3)
    for tokens in known:
        oracle.remember(tokens)
    most = (len(asked) - 1) // 3 * 3  # the last token is always computed
    found = [end for end in range(0, most + 1, 3) if not end or any(one[:end] == asked[:end] for one in known)]
    assert oracle.cached_tokens(asked) == max(found)


# -- the witness


class Publisher:
    """A socket that publishes as vLLM does."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.seq = 0

    def wait(self) -> None:
        """Wait for a subscriber."""
        assert self._socket.poll(60_000)
        self._socket.recv()

    def say(self, *events: dict[str, Any]) -> None:
        payload = msgspec.msgpack.encode([1.0, events, 0])
        self._socket.send_multipart([b"", struct.pack(">Q", self.seq), payload])
        self.seq += 1

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


def stored(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": [], "block_size": 32}


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


def test_the_witness_counts_copies_and_starts_again_with_another_process(publisher: Publisher) -> None:
    with Witness(publisher.port) as witness:
        publisher.wait()
        publisher.say(stored(1, 2), stored(2), stored(-1))
        publisher.say(removed(1), removed(2))
        until(lambda: witness.next_seq == 2, "it has heard both")
        assert witness.blocks == {2, (1 << 64) - 1}, "of two copies one is left, and hashes are unsigned"
        assert (witness.evicted, witness.missed) == (2, 0)
        publisher.say({"type": "AllBlocksCleared"}, stored(7))
        until(lambda: witness.blocks == {7}, "it has forgotten")
        publisher.seq = 0
        publisher.say(stored(8))
        until(lambda: witness.blocks == {8}, "another process holds nothing of the old one")
        publisher.seq = 5
        publisher.say(stored(9))
        until(lambda: witness.missed == 4, "four batches are missing")
        publisher.say({"type": "AllBlocksCleared"})
        until(lambda: not witness.missed and not witness.blocks, "what was in them is gone, whatever it was")
        publisher.say({"type": "BlockMoved"})
        until(lambda: witness.next_seq == 8, "it has heard of what it does not know")
        with pytest.raises(RuntimeError, match="BlockMoved"):
            _ = witness.blocks


# -- the traffic


def test_conversations_of_a_group_share_a_system_prompt_and_grow_by_the_answers(maker: PromptMaker) -> None:
    seen: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            seen.append(json.loads(await reader.readexactly(length)))
            said = {"choices": [{"delta": {"content": f"answer {len(seen)}"}, "finish_reason": "stop"}]}
            usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
            data = b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in (said, usage))
            data += b"data: [DONE]\n\n"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)

    async def send() -> list[Exchange]:
        server = await asyncio.start_server(serve, "127.0.0.1")
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await Traffic(SMALL, maker, "tiny").run("127.0.0.1", port)

    exchanges = asyncio.run(send())
    assert len(exchanges) == len(seen) == SMALL.requests
    assert not any(exchange.record.error for exchange in exchanges)
    systems = {exchange.conversation: exchange.messages[0]["content"] for exchange in exchanges}
    assert systems[0] == systems[1] != systems[2] == systems[3]
    for talk in range(4):
        first, second, third = (one for one in exchanges if one.conversation == talk)
        for before, after in ((first, second), (second, third)):
            assert after.messages[: len(before.messages)] == before.messages
            assert after.messages[len(before.messages)] == {"role": "assistant", "content": before.answer}


# -- what is made of it


class Tokens(Vllm):
    """A server whose tokens are the letters of the messages."""

    block_tokens: ClassVar[int] = 4

    def tokens(self, messages: Any, *, answer_next: bool = True) -> list[int]:
        return [*"".join(message["content"] for message in messages).encode(), *([0] if answer_next else [])]


def exchange(text: str, answer: str, cached: int, sent: int) -> Exchange:
    record = Record(0, 1, 0, 8, 0, sent_ns=sent, done_ns=sent + 10, tokens_ns=[sent + 5], cached_tokens=cached)
    record.prompt_tokens = len(text) + 1
    return Exchange(0, [{"role": "user", "content": text}], record, answer)


def test_hits_are_compared_with_earlier_prompts(tmp_path: Path) -> None:
    server = Tokens("v", 1, 2, 3, 9, tmp_path)
    found = Measured()
    found.take([exchange("abcdefgh", "ijkl", 0, 0), exchange("abcdefghijklmnop", "", 8, 100)], server)
    assert (found.cached, found.possible, found.prompt) == (8, 12, 26), "the answer counts, too"
    wrong = exchange("abcd", "", 0, 0)
    wrong.record.prompt_tokens = 7
    with pytest.raises(BenchmarkError, match="has 5 by /tokenize"):
        found.take([wrong], server)
    wrong.record.error = "HTTP 503"
    with pytest.raises(BenchmarkError, match="HTTP 503"):
        found.take([wrong], server)


@pytest.mark.parametrize("kind", [Vllm, Sglang])
def test_a_missing_server_is_reported_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Server]
) -> None:
    monkeypatch.setenv(kind.installation.variable, str(tmp_path))
    with pytest.raises(BenchmarkError, match=f"make {kind.engine}-cpu"):
        kind.installation.interpreter()


@pytest.mark.parametrize("kind", [Vllm, Sglang])
def test_a_command_line_names_the_sockets_and_the_size_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Server]
) -> None:
    (tmp_path / ".stamp").touch()
    monkeypatch.setenv(kind.installation.variable, str(tmp_path))
    words = kind("one", 1, 2, 3, 40, tmp_path, load_port=4).command(512)
    assert words[0] == str(tmp_path / "bin" / "python")
    events = json.loads(words[words.index("--kv-events-config") + 1])
    assert (events["endpoint"], events["replay_endpoint"]) == ("tcp://*:2", "tcp://*:3")
    if kind is Sglang:  # in tokens, with a socket for its load
        assert words[words.index("--max-total-tokens") + 1] == str(40 * 16)
        assert words[words.index("--load-publish-endpoint") + 1] == "tcp://*:4"
    else:
        assert words[words.index("--num-gpu-blocks-override") + 1] == "40"
