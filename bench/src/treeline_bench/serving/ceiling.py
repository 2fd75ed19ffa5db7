"""How much the client itself can take: its load on a server that computes nothing.

The server (`python -m treeline_bench.serving.ceiling`) answers each request with one chunk for every token, of about
the size that servers send, for all streams together every `STEP_S` at most, as an engine does. It shares the machine:
what comes out is a lower bound of what the client takes where servers are elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import re
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO, cast

import uvloop
from rich.console import Console

from treeline_bench.client.process import ClientFailed
from treeline_bench.processes import before_exec
from treeline_bench.results import number
from treeline_bench.serving.messages import Conversation, Order, Turn
from treeline_bench.serving.processes import Load
from treeline_bench.serving.summary import Summary, summarise

TOKENS = 200
REQUESTS_PER_STREAM = 4
STEP_S = 0.002
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = {
    "id": "cmpl-0123456789abcdef0123456789abcdef",
    "object": "text_completion",
    "created": 1790000000,
    "model": "some-org/some-model-8b",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
}


def _frame(chunk: object) -> bytes:
    data = chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


class Null:
    """The server. One task steps all streams, as an engine's loop does."""

    def __init__(self) -> None:
        self._left: dict[asyncio.StreamWriter, tuple[int, int]] = {}
        self._token = _frame(CHUNK)
        self._more = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                body = json.loads(await reader.readexactly(int(length[1]) if length else 0))
                writer.write(HEAD)
                tokens = body["max_tokens"]
                self._left[writer] = (tokens, tokens)
                self._more.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            self._left.pop(writer, None)
            writer.close()

    async def step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._left:
                self._more.clear()
                await self._more.wait()
            began = loop.time()
            for writer, (left, tokens) in list(self._left.items()):
                if left:
                    writer.write(self._token)
                    self._left[writer] = (left - 1, tokens)
                else:
                    del self._left[writer]
                    usage = {"prompt_tokens": 1, "completion_tokens": tokens}
                    writer.write(_frame({**CHUNK, "choices": [], "usage": usage}) + _frame(b"[DONE]") + b"0\r\n\r\n")
            await asyncio.sleep(max(STEP_S - (loop.time() - began), 0))


async def _serve() -> None:
    null = Null()
    server = await asyncio.start_server(null.serve, "127.0.0.1", 0, limit=1 << 24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await null.step_forever()


def say_ceiling(processes: int, streams: int, console: Console) -> int:
    """Measure, and say it. → exit status. Raises ClientFailed."""
    with tempfile.TemporaryDirectory(prefix="treeline-bench-") as name:
        summary = measure(processes, streams, Path(name))
    client = summary.client
    cpu_us = 1e6 * client.busy_share * client.processes / summary.output_tokens_s
    console.print(
        f"{number(summary.output_tokens_s)} tokens/s in {streams} streams, load processes: {client.processes}, "
        f"each busy {client.busy_share:.0%} of the time: {cpu_us:.1f} µs of CPU a token, so a process takes "
        f"{number(1e6 / cpu_us)} tokens/s at most. Timers were {client.lag_ms_p99:.1f} ms late (p99).",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def measure(processes: int, streams: int, folder: Path, requests: int = REQUESTS_PER_STREAM) -> Summary:
    """The server in a process of its own, and the load. Raises ClientFailed."""
    server = subprocess.Popen(
        [sys.executable, "-m", "treeline_bench.serving.ceiling"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=before_exec(None),
    )
    try:
        out = cast(BinaryIO, server.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            port = out.readline() if selector.select(60) else b""
        if not port.strip().isdigit():
            raise ClientFailed("the server of the ceiling did not start")
        turn = Turn([1], 1, TOKENS)
        order = Order(
            host="127.0.0.1",
            port=int(port),
            path="/v1/completions",
            conversations=[Conversation([turn])] * (streams * requests),
            concurrency=streams,
        )
        with Load(order, processes, folder) as load:
            return summarise(load.run(lambda progress: None), {})
    finally:
        server.kill()
        server.communicate()


if __name__ == "__main__":
    uvloop.run(_serve())
