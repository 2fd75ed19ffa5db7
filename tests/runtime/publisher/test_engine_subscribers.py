"""Our publisher's process is read by what reads vLLM and SGLang: their own typed decoders, and the ways in which their
example subscriber and routers ask for what they missed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from support.engine_wheels import load, needs_engine_wheels
from support.runtime_server import eventually, make_tokenizer
from treeline_runtime.args import ServerArgs
from treeline_runtime.ipc import Addresses, Heartbeat, Inbox, Outbox, Ready, decode_to_http
from treeline_runtime.messages import CacheUpdate, Cleared, Removed, Stored
from treeline_runtime.processes import ChildSpec

pytestmark = [needs_engine_wheels, pytest.mark.integration, pytest.mark.deep]

TOPIC = "kv@10.0.0.7:8000@model"
READERS = {
    "vllm-0.33.0": ("vllm", "0.33.0", "distributed/kv_events"),
    "sglang-0.5.23": ("sglang", "0.5.23", "srt/disaggregation/kv_events"),
}
END = b"\xff" * 8
SALT = "tenant"
STEPS = (
    [Stored([11, 12], None, [1, 7, 2, 7], None, 4)],
    [Stored([13], 12, [3, 7], None, 2), Stored([21], None, [1, 7], SALT, 2)],
    [Removed([13])],
    [Cleared(), Stored([31], None, [4, 7], None, 2)],
)


class Publisher:
    """The process, with a subscriber that hears everything from the first of `STEPS` on."""

    def __init__(self, folder: Path) -> None:
        make_tokenizer(folder)
        self._updates = self.first = 0
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.setsockopt(zmq.LINGER, 0)
        addresses = Addresses(str(folder))
        self._inbox = Inbox(self.context, addresses.of("http"), decode_to_http)
        self._outbox = Outbox(self.context, addresses.of("publisher"))
        args = ServerArgs(model=str(folder), events_port=0, replay_port=0, load_port=0, kv_events_topic=TOPIC)
        command = [sys.executable, "-m", "treeline_runtime.publisher.process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(ChildSpec(args, addresses, str(folder), 5)) + b"\n")
        self._process.stdin.flush()
        self._ports = self._started()
        self.live = self.socket(zmq.SUB, "events_port")
        self.live.subscribe(b"kv@")
        eventually(self._heard, 60, "the subscription works")
        while self.first < self._updates:  # each of them was an event
            self.first = int.from_bytes(receive(self.live)[1], "big") + 1

    def _started(self) -> dict[str, Any]:
        while True:
            assert self._inbox.wait(60_000), "the publisher says nothing"
            (message,) = self._inbox.take(1)
            if not isinstance(message, Heartbeat):
                assert isinstance(message, Ready), message
                return message.info

    def _heard(self) -> bool:
        self.update(Cleared())
        return bool(self.live.poll(20))

    def update(self, *events: Any) -> None:
        self._updates += 1
        self._outbox.send(CacheUpdate(list(events)))

    def socket(self, kind: int, port: str) -> zmq.Socket[bytes]:
        made = self.context.socket(kind)
        made.connect(f"tcp://127.0.0.1:{self._ports[port]}")
        return made

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self.context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as name:
        made = Publisher(Path(name))
        yield made
        made.close()


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(60_000), "nothing arrived"
    return socket.recv_multipart()


def told(decoder: Any, payload: bytes) -> list[tuple[Any, ...]]:
    """A batch, read by an engine's own types."""
    batch = decoder.decode(payload)
    assert batch.ts > 0
    said: list[tuple[Any, ...]] = []
    for event in batch.events:
        name = type(event).__name__
        if name == "BlockStored":
            assert (event.lora_id, event.lora_name, event.medium) == (None, None, "GPU")
            salt = getattr(event, "cache_salt", None)
            said.append((name, event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, salt))
        else:
            said.append((name, *([event.block_hashes] if name == "BlockRemoved" else [])))
    return said


@pytest.mark.parametrize("name", READERS)
def test_what_we_publish_is_read_by_their_types_live_and_replayed(name: str, publisher: Publisher) -> None:
    package, version, module = READERS[name]
    decoder = msgspec.msgpack.Decoder(load(package, version)[module].KVEventBatch)
    salt = SALT if package == "sglang" else None  # vLLM's types have no member for it
    expected = [
        [("BlockStored", [11, 12], None, [1, 7, 2, 7], 2, None)],
        [("BlockStored", [13], 12, [3, 7], 2, None), ("BlockStored", [21], None, [1, 7], 2, salt)],
        [("BlockRemoved", [13])],
        [("AllBlocksCleared",), ("BlockStored", [31], None, [4, 7], 2, None)],
    ]
    for events in STEPS:
        publisher.update(*events)
    live = [receive(publisher.live) for _ in STEPS]
    assert [topic for topic, _, _ in live] == [TOPIC.encode()] * len(STEPS)
    assert [told(decoder, payload) for _, _, payload in live] == expected

    # As SGLang's and vLLM's routers ask: a DEALER, which gets all of it.
    dealer = publisher.socket(zmq.DEALER, "replay_port")
    dealer.send_multipart([b"", publisher.first.to_bytes(8, "big")])
    replayed = [receive(dealer) for _ in STEPS]
    assert [reply[1:] for reply in replayed] == live
    assert receive(dealer) == [b"", b"", END, b""]

    # As vLLM's example subscriber asks: a REQ, which gets the first answer. One socket for each question, since answers
    # that are still on their way would be taken for those to the next.
    def asked(start: int) -> list[bytes]:
        with publisher.socket(zmq.REQ, "replay_port") as req:
            req.send(start.to_bytes(8, "big"))
            return receive(req)

    for step in (1, 2):
        _, seq, payload = asked(publisher.first + step)
        assert int.from_bytes(seq, "big") == publisher.first + step
        assert told(decoder, payload) == expected[step]
    _, seq, payload = asked(publisher.first + len(STEPS))
    assert (seq, payload) == (END, b"")
