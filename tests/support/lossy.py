"""An unreliable network between one runtime and the picker: some of the KV-event batches never arrive.

The picker learns where to listen from the runtime's `/server_info`; the HTTP proxy here passes everything on as it is,
but names another event port there: that of a forwarder which loses batches. Replay, snapshots and load reports arrive.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
import uvicorn
import zmq
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from support.ports import free_port

HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


class Forwarder:
    """Passes live event batches on and drops one of every `one_in`, chosen by the seed."""

    def __init__(self, upstream_port: int, one_in: int, seed: int) -> None:
        self.port = free_port()
        self.passed = self.dropped = 0
        self._upstream_port, self._one_in = upstream_port, one_in
        self._random = random.Random(seed)
        self._window: list[bool] = []

    def _loses(self) -> bool:
        if not self._window:
            self._window = [False] * self._one_in
            self._window[self._random.randrange(self._one_in)] = True
        return self._window.pop()

    def run(self, stop: threading.Event) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.PUB) as pub:
            sub.subscribe(b"")
            sub.connect(f"tcp://127.0.0.1:{self._upstream_port}")
            pub.bind(f"tcp://127.0.0.1:{self.port}")
            while not stop.is_set():
                if sub.poll(50):
                    frames = sub.recv_multipart()
                    if self._loses():
                        self.dropped += 1
                    else:
                        self.passed += 1
                        pub.send_multipart(frames)


def _proxy(upstream: str, events_port: int) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with httpx.AsyncClient(base_url=f"http://{upstream}", timeout=60, trust_env=False) as client:
            app.state.client = client
            yield

    async def forward(request: Request) -> Response:
        client: httpx.AsyncClient = request.app.state.client
        kept = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP | {"host"}}
        path, body = request.url.path, await request.body()
        asked = client.build_request(request.method, path, headers=kept, params=request.query_params, content=body)
        answer = await client.send(asked, stream=True)
        passed = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}
        if path == "/server_info":
            about = json.loads(await answer.aread())
            about["kv_events"]["endpoint_port_base"] = events_port
            return Response(json.dumps(about), answer.status_code, passed)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, passed)

    methods = ["GET", "POST"]
    return Starlette(routes=[Route("/{path:path}", forward, methods=methods)], lifespan=lifespan)


@contextmanager
def lossy(upstream: str, events_port: int, *, one_in: int, seed: int) -> Iterator[tuple[str, Forwarder]]:
    """Stand before the runtime at `upstream`; yields the address for the picker, and the forwarder's counts."""
    forwarder = Forwarder(events_port, one_in, seed)
    stop = threading.Event()
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(_proxy(upstream, forwarder.port), "127.0.0.1", port, log_level="warning", lifespan="on")
    )
    threads = [
        threading.Thread(target=forwarder.run, args=(stop,)),
        threading.Thread(target=lambda: asyncio.run(server.serve())),
    ]
    for thread in threads:
        thread.start()
    try:
        yield f"127.0.0.1:{port}", forwarder
    finally:
        stop.set()
        server.should_exit = True
        for thread in threads:
            thread.join(60)
