"""The three ZMQ sockets of an engine: KV events, replay and snapshot, load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import zmq
import zmq.asyncio
from treeline_wire import frames
from treeline_wire.frames import ReplayRequest, Reply, Request
from treeline_wire.load import LOAD_TOPIC, TREELINE_LOAD_TOPIC, LoadStat, TreelineLoad, encode

TOPIC = b""
HEARTBEAT_S = 1.0


class Publisher:
    """Binds its sockets to `host` when made; `run` serves them until it is cancelled. Port 0 binds any free port.
    `reply` makes the answers of the ROUTER socket, `load` a report with the next number. `ours`: as our runtime; else
    as vLLM, which answers only replays and pushes no load.
    """

    def __init__(
        self,
        reply: Callable[[Request, bytes], Iterator[Reply]],
        load: Callable[[], TreelineLoad],
        host: str,
        events_port: int,
        replay_port: int,
        load_port: int,
        *,
        ours: bool = True,
    ) -> None:
        self._reply, self._report_of = reply, load
        self._ours = ours
        # A PUB socket never blocks, so it needs no event loop.
        self._pub_context, self._context = zmq.Context(), zmq.asyncio.Context()
        self._events = self._pub_context.socket(zmq.PUB)
        self._load = self._pub_context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.events_port = _bind(self._events, host, events_port)
        self.replay_port = _bind(self._router, host, replay_port)
        self.load_port = _bind(self._load, host, load_port)

    def publish(self, seq: int, payload: bytes) -> None:
        """Send a batch to the subscribers."""
        self._events.send_multipart(frames.live(TOPIC, seq, payload), zmq.NOBLOCK)

    async def run(self) -> None:
        try:
            await asyncio.gather(self._serve_requests(), *([self._heartbeat()] if self._ours else []))
        finally:
            self.close()

    def close(self) -> None:
        """Close every socket."""
        self._context.destroy(linger=0)
        self._pub_context.destroy(linger=0)

    async def _serve_requests(self) -> None:
        while True:
            identity, *message = await self._router.recv_multipart()
            with contextlib.suppress(zmq.ZMQError):  # the client has gone
                request = frames.parse_request(message)
                if request is not None and (self._ours or isinstance(request, ReplayRequest)):
                    for reply in self._reply(request, TOPIC):
                        await self._router.send_multipart([identity, *frames.encode_reply(reply)])

    def report(self) -> None:
        """Send a load report in both forms."""
        load = self._report_of()
        for topic, form in ((LOAD_TOPIC, load_stat(load)), (TREELINE_LOAD_TOPIC, load)):
            self._load.send_multipart(frames.live(topic, load.seq, encode(form)), zmq.NOBLOCK)

    async def _heartbeat(self) -> None:
        while True:
            self.report()
            await asyncio.sleep(HEARTBEAT_S)


def load_stat(load: TreelineLoad) -> LoadStat:
    """Convert a report to SGLang's form."""
    used = (load.pages_used + load.pages_cached) * load.page_size
    return LoadStat(
        num_running=load.running,
        num_waiting=load.waiting,
        num_tokens=load.pages_used * load.page_size,
        max_total_num_tokens=load.pages_total * load.page_size,
        num_waiting_uncached_tokens=load.waiting_uncached_tokens,
        num_total_tokens=used + load.waiting_uncached_tokens,
        max_running_requests=load.max_running,
    )


def _bind(sock: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> int:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, 0)  # a simulated engine must not lose messages
    sock.bind(f"tcp://{host}:{port or '*'}")
    return int(sock.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
