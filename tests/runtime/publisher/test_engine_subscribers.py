"""vLLM's and SGLang's own code reads our publisher: their typed decoders, and the replay requests of their example
subscriber and routers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from support.engine_wheels import load, needs_engine_wheels
from support.publisher import PublisherProcess, receive
from support.runtime_server import make_tokenizer
from treeline_runtime.published import Cleared, Removed, Stored

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


@pytest.fixture
def publisher() -> Iterator[PublisherProcess]:
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as name:
        make_tokenizer(Path(name))
        made = PublisherProcess(Path(name), Path(name), kv_events_topic=TOPIC).started()
        yield made
        made.close()


def told(decoder: Any, payload: bytes) -> list[tuple[Any, ...]]:
    """Decode a batch by an engine's own types."""
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
def test_the_engines_types_read_our_live_and_replayed_events(name: str, publisher: PublisherProcess) -> None:
    package, version, module = READERS[name]
    decoder = msgspec.msgpack.Decoder(load(package, version)[module].KVEventBatch)
    salt = SALT if package == "sglang" else None  # vLLM's types have no member for it
    expected = [
        [("BlockStored", [11, 12], None, [1, 7, 2, 7], 2, None)],
        [("BlockStored", [13], 12, [3, 7], 2, None), ("BlockStored", [21], None, [1, 7], 2, salt)],
        [("BlockRemoved", [13])],
        [("AllBlocksCleared",), ("BlockStored", [31], None, [4, 7], 2, None)],
    ]
    subscription = publisher.subscribed()
    first = publisher.settled()["seq"] + 1
    for events in STEPS:
        publisher.update(*events)
    live = [receive(subscription) for _ in STEPS]
    assert [topic for topic, _, _ in live] == [TOPIC.encode()] * len(STEPS)
    assert [told(decoder, payload) for _, _, payload in live] == expected

    # As SGLang's and vLLM's routers ask: a DEALER, which gets all of it.
    dealer = publisher.socket(zmq.DEALER, "replay_port")
    dealer.send_multipart([b"", first.to_bytes(8, "big")])
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
        _, seq, payload = asked(first + step)
        assert int.from_bytes(seq, "big") == first + step
        assert told(decoder, payload) == expected[step]
    _, seq, payload = asked(first + len(STEPS))
    assert (seq, payload) == (END, b"")
