"""vLLM and SGLang as the picker sees them: an HTTP server with their pages, and a publisher for each rank.

Publishers keep to the rules of `vllm/distributed/kv_events.py` and `sglang/srt/disaggregation/kv_events.py`: numbers
from 0 in every process and no epoch, a replay socket that drops requests of any other shape (and logs them as invalid:
here they are kept in `invalid`), answers with the topic since vLLM 0.26 and without it before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from treeline_wire.events import BlockStored

from support.epp_io import FakeEngine, small_bundle
from support.ports import free_base

END = b"\xff" * 8


class RankPublisher:
    """One rank's publisher. `old`: vLLM before 0.26, with the former shapes of events and replays."""

    def __init__(
        self, events_port: int, replay_port: int | None, *, rank: int = 0, topic: str = "", old: bool = False
    ) -> None:
        self.ports = events_port, replay_port
        self.rank = rank
        self.topic = topic.encode()
        self.old = old
        self.invalid: list[list[bytes]] = []
        self.asked: list[int] = []
        self._buffer: list[bytes] = []
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB that reports subscribers
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._pub.bind(f"tcp://127.0.0.1:{events_port}")
        self._serving: asyncio.Task[None] | None = None
        if replay_port is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.bind(f"tcp://127.0.0.1:{replay_port}")
            self._serving = asyncio.create_task(self._serve())

    async def subscribed(self) -> bytes:
        """Wait for a subscriber and return its topic."""
        return (await asyncio.wait_for(self._pub.recv(), 60))[1:]

    async def store(self, *stored: BlockStored, medium: str = "GPU") -> None:
        await self.publish([self._stored(event, medium) for event in stored])

    async def remove(self, hashes: Iterable[int]) -> None:
        """Publish one event for each block, as vLLM's pool does."""
        if self.old:
            await self.publish([["BlockRemoved", [block], "GPU"] for block in hashes])
        else:
            await self.publish([{"type": "BlockRemoved", "block_hashes": [b], "medium": "GPU"} for b in hashes])

    async def clear(self) -> None:
        await self.publish([["AllBlocksCleared"] if self.old else {"type": "AllBlocksCleared"}])

    async def publish(self, events: list[Any], topic: bytes | None = None) -> None:
        """Publish the next batch."""
        payload = msgspec.msgpack.encode([time.time(), events, self.rank])
        seq = len(self._buffer)
        self._buffer.append(payload)
        await self._pub.send_multipart([self.topic if topic is None else topic, seq.to_bytes(8, "big"), payload])

    def stop(self) -> None:
        """End the process; its ports are free."""
        if self._serving is not None:
            self._serving.cancel()
        self._context.destroy(linger=0)

    def _stored(self, event: BlockStored, medium: str) -> Any:
        fields = [event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, None, medium, None]
        if self.old:
            return ["BlockStored", *fields]
        names = "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"
        extra = {"extra_keys": [None] * len(event.block_hashes), "group_idx": 0}
        return {"type": "BlockStored", **dict(zip(names, fields, strict=True)), **extra}

    async def _serve(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3:
                self.invalid.append(frames[1:])
                continue
            client, _, start = frames
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            topic = [] if self.old else [self.topic]
            for seq, payload in enumerate(self._buffer):
                if seq >= first:
                    await self._router.send_multipart([client, b"", *topic, seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", *([] if self.old else [b""]), END, b""])


class ForeignEngine:
    """One engine: an HTTP server, and publishers of its ranks at ports in a row."""

    def __init__(self, owner: str, ranks: int = 2, *, topic: str = "", old: bool = False, replays: bool = True) -> None:
        self.events_base, self.replay_base = free_base(ranks), free_base(ranks) if replays else None
        self.topic, self.old = topic, old
        self.http = FakeEngine(owner, missing={"/ready", "/kv_event_sources", "/server_info"})
        self.http.documents["/v1/models"] = {"data": [{"id": "tiny", "object": "model", "owned_by": owner}]}
        self.ranks = [self._publisher(rank) for rank in range(ranks)]

    @property
    def flags(self) -> tuple[str, str]:
        return "--endpoint", f"{self.http.name}={self.http.address}"

    @property
    def invalid(self) -> list[list[bytes]]:
        return [request for rank in self.ranks for request in rank.invalid]

    def says_as_vllm(self) -> None:
        """Serve vLLM 0.32's `/kv_event_sources`."""
        self.http.missing.discard("/kv_event_sources")
        self.http.documents["/kv_event_sources"] = {
            str(rank.rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{rank.ports[0]}",
                "replay_endpoint": f"tcp://*:{rank.ports[1]}" if rank.ports[1] is not None else None,
                "buffer_steps": 10_000,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": self.topic,
            }
            for rank in self.ranks
        }

    def says_as_sglang(self, load_base: int | None = None) -> None:
        """Serve SGLang's `/server_info`."""
        self.http.missing.discard("/server_info")
        described: dict[str, Any] = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": self.events_base,
            "topic": self.topic,
            "block_size": 16,
            "dp_size": len(self.ranks),
        }
        if self.replay_base is not None:
            described["replay_endpoint_port_base"] = self.replay_base
        if load_base is not None:
            described |= {"load_endpoint_port_base": load_base, "load_topic": "load"}
        self.http.documents["/server_info"] = {"version": "0.5.23", "kv_events": described}

    def restart(self) -> None:
        """Start new processes at the same ports, with empty caches. The server answers all the time."""
        for rank in self.ranks:
            rank.stop()
        self.ranks = [self._publisher(rank.rank) for rank in self.ranks]

    async def stop(self) -> None:
        await self.http.stop()
        for rank in self.ranks:
            rank.stop()

    def _publisher(self, rank: int) -> RankPublisher:
        replay = self.replay_base + rank if self.replay_base is not None else None
        return RankPublisher(self.events_base + rank, replay, rank=rank, topic=self.topic, old=self.old)


@contextlib.asynccontextmanager
async def foreign_engine(owner: str, ranks: int = 2, **settings: Any) -> AsyncIterator[ForeignEngine]:
    made = ForeignEngine(owner, ranks, **settings)
    await made.http.start()
    try:
        yield made
    finally:
        await made.stop()


def tokenizer_flags(folder: Path) -> tuple[str, str]:
    """Return flags that give the tokenizer of their events: the engines serve none."""
    (folder / "tokenizer.json").write_text(small_bundle().tokenizer_json)
    return "--tokenizer", str(folder)
