"""The three ZMQ sockets of an engine: KV events, replay and snapshot, load."""

from __future__ import annotations

import asyncio
import contextlib

import zmq
import zmq.asyncio
from treeline_wire import frames
from treeline_wire.load import LOAD_TOPIC, TREELINE_LOAD_TOPIC, LoadStat, TreelineLoad, encode

from treeline_bench.sim.cache import SimCache

TOPIC = b""
HEARTBEAT_S = 1.0
PAGES = 1 << 20
PREFILL_TOKENS_PER_S = 10_000.0
DECODE_STEP_MS = 10.0


class Publisher:
    """Binds its sockets to `host` when made; `run` serves them until it is cancelled. Port 0 binds any free port."""

    def __init__(self, cache: SimCache, host: str, events_port: int, replay_port: int, load_port: int) -> None:
        self._cache = cache
        self._reports = 0
        # A PUB socket never waits for anybody, so it needs no event loop.
        self._pub_context, self._context = zmq.Context(), zmq.asyncio.Context()
        self._events = self._pub_context.socket(zmq.PUB)
        self._load = self._pub_context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.events_port = _bind(self._events, host, events_port)
        self.replay_port = _bind(self._router, host, replay_port)
        self.load_port = _bind(self._load, host, load_port)

    def publish(self, seq: int, payload: bytes) -> None:
        """Send a batch to whoever listens."""
        self._events.send_multipart(frames.live(TOPIC, seq, payload), zmq.NOBLOCK)

    async def run(self) -> None:
        try:
            await asyncio.gather(self._serve_requests(), self._heartbeat())
        finally:
            self._context.destroy(linger=0)
            self._pub_context.destroy(linger=0)

    async def _serve_requests(self) -> None:
        while True:
            identity, *message = await self._router.recv_multipart()
            with contextlib.suppress(zmq.ZMQError):  # the asker has gone
                if (request := frames.parse_request(message)) is not None:
                    for reply in self._cache.reply(request, TOPIC):
                        await self._router.send_multipart([identity, *frames.encode_reply(reply)])

    async def _heartbeat(self) -> None:
        while True:
            for topic, report in ((LOAD_TOPIC, self._stat()), (TREELINE_LOAD_TOPIC, self._report())):
                self._load.send_multipart(frames.live(topic, self._reports, encode(report)), zmq.NOBLOCK)
            self._reports += 1
            await asyncio.sleep(HEARTBEAT_S)

    def _stat(self) -> LoadStat:
        size = self._cache.block_size
        held = self._cache.blocks * size
        return LoadStat(num_tokens=held, num_total_tokens=held, max_total_num_tokens=PAGES * size)

    def _report(self) -> TreelineLoad:
        """An idle engine: requests are answered at once, so none is ever running when a report is made."""
        return TreelineLoad(
            epoch=self._cache.epoch,
            seq=self._reports,
            pages_used=self._cache.blocks,
            pages_total=PAGES,
            page_size=self._cache.block_size,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            decode_step_ms=DECODE_STEP_MS,
            max_running=1024,
        )


def _bind(sock: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> int:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, 0)  # a simulated engine must not lose what it is asked to say
    sock.bind(f"tcp://{host}:{port or '*'}")
    return int(sock.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
