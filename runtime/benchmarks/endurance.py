"""Serves streams for some minutes, some of which end early, with less memory than they want; then looks what is left.

    python runtime/benchmarks/endurance.py --shape llama70b --ranks 2 --minutes 10

Random weights. Each of `--streams` clients asks one request after the other, of 64 to 2,048 tokens in and 64 to 1,024
out. One in eight hangs up before the last token. The cache holds a third of what the longest of such requests would
need, so that requests are retracted and go on later. When the time is over, clients finish what they have begun, and
the server must be as after its start. Prints a row of JSON for each figure:

- `endurance.answers`: complete ones: of the length that was asked for, or ended by the model. Any other ends the run.
- `endurance.hung_up`, `endurance.retractions`.
- `endurance.tokens_s`: output tokens a second that clients received.
- `endurance.left`: requests that run or wait after the last, and pages that are neither free nor cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dummy_model import write_model
from engine import SHAPES, report
from server import serving

PROMPTS, ANSWERS = (64, 2048), (64, 1024)
HANG_UP = 8
"""One in so many clients leaves early."""
SETTLE_S = 30.0
"""A server notices in time that clients have left."""


class Clients:
    """The clients' requests and what became of them."""

    def __init__(self, port: int, seconds: float, scale: int) -> None:
        """scale: lengths are divided by it."""
        self._port, self._scale = port, scale
        self._ends = time.monotonic() + seconds
        self.answers = self.hung_up = self.tokens = 0

    async def run(self, streams: int) -> None:
        await asyncio.gather(*(self._client(random.Random(seed)) for seed in range(streams)))

    async def _client(self, rng: random.Random) -> None:
        while time.monotonic() < self._ends:
            prompt = rng.choices(range(10, 4000), k=rng.randint(*PROMPTS) // self._scale)
            length = rng.randint(*ANSWERS) // self._scale
            leaves_at = rng.randrange(length) if rng.randrange(HANG_UP) == 0 else None
            await self._ask(prompt, length, leaves_at)

    async def _ask(self, prompt: list[int], length: int, leaves_at: int | None) -> None:
        # the model may end it before, so the server does not keep memory for all of it
        params = {"max_new_tokens": length, "temperature": 0.6}
        body = json.dumps({"input_ids": prompt, "sampling_params": params, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        writer.write(
            b"POST /generate HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        done, last = 0, b""
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                done, last = json.loads(line[6:])["meta_info"]["completion_tokens"], line
            if leaves_at is not None and done >= leaves_at:
                break
        writer.close()
        self.tokens += done
        if leaves_at is not None:
            self.hung_up += 1
            return
        reason = json.loads(last[6:])["meta_info"]["finish_reason"]["type"] if last else None
        if reason != "stop" and (reason, done) != ("length", length):
            raise SystemExit(f"an answer has {done} tokens, not {length}: {last[:400]!r}")
        self.answers += 1


async def get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    assert " 200 " in head.splitlines()[0], answer
    return body


async def left(port: int) -> int:
    """What remains of the requests, once nothing changes any more."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        states: list[dict[str, Any]] = json.loads(await get(port, "/server_info"))["internal_states"]
        remains = sum(each["running"] + each["waiting"] + each["pages_used"] for each in states)
        if remains == 0 or time.monotonic() > deadline:
            return int(remains)
        await asyncio.sleep(0.2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="GPUs that share the model (default: 1)")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=64)
    args = parser.parse_args()
    scale = 8 if args.shape == "tiny" else 1
    tokens = args.streams * (PROMPTS[1] + ANSWERS[1]) // scale // 3
    metrics = free_port()
    settings = {
        "tp_size": args.ranks, "max_total_tokens": tokens, "max_running_requests": args.streams,
        "context_length": 4096, "metrics_port": metrics,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.shape)
        with serving(Path(folder), settings, "treeline_runtime", {}) as server:
            report("endurance.start_s", time.perf_counter() - server.started)
            clients, began = Clients(server.port, 60 * args.minutes, scale), time.perf_counter()
            asyncio.run(clients.run(args.streams))
            seconds = time.perf_counter() - began
            remains = asyncio.run(left(server.port))
            said = asyncio.run(get(metrics, "/metrics"))
    report("endurance.minutes", seconds / 60)
    report("endurance.answers", clients.answers)
    report("endurance.hung_up", clients.hung_up)
    found = re.search(r"^treeline:num_retracted_requests_total\{.*\} (\S+)$", said, re.MULTILINE)
    assert found is not None
    report("endurance.retractions", float(found[1]))
    report("endurance.tokens_s", clients.tokens / seconds)
    report("endurance.left", remains)
    return 0 if remains == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
