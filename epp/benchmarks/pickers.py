"""Let several pickers share a pool. Prints a table; or JSON rows with --json.

    python epp/benchmarks/pickers.py [--requests 1000] [--json]

One process plays the proxy and all engines: it asks real pickers over ext_proc, in turns, and answers as engines would
that prefill one prompt after the other, 30,000 bytes a second, and cache all of it. Engines publish nothing and report
no load: pickers know each other's requests only from each other. The trace has system prompts that many requests
share, and bursts of 16 requests with a new common prompt. Compared are

- one picker that sees every request,
- four that share them and exchange their requests (`--peers`), and four that do not,

by the bytes that engines computed, the busiest engine's share of them ÷ the mean, the mean time to the first token,
the bytes a picker sent to each of the others per request, and the pickers' CPU time and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import psutil
from treeline_wire import envoy_pb2 as pb
from treeline_wire.security import CurveKeys

ROOT = Path(__file__).resolve().parents[2]
ENGINES, RATE, BLOCK = 8, 30_000.0, 64
PER_S = 100.0
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
PATIENCE_S = 60.0


@dataclass
class Engine:
    """Prefills one prompt after the other; a prompt's blocks are named by all bytes up to their end."""

    held: set[int] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    computed: int = 0

    async def prefill(self, text: bytes) -> None:
        async with self.lock:
            ends = [hash(text[:end]) for end in range(BLOCK, len(text) + 1, BLOCK)]
            known = next((at for at, name in enumerate(ends) if name not in self.held), len(ends)) * BLOCK
            self.computed += len(text) - known
            await asyncio.sleep((len(text) - known) / RATE)
            self.held.update(ends)


async def probed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a picker's probes as an engine of an unknown type."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            models = head.startswith(b"GET /v1/models ")
            body = b'{"object": "list", "data": [{"id": "m", "object": "model"}]}' if models else b"{}"
            status = b"200 OK" if models or head.startswith(b"GET /health ") else b"404 Not Found"
            kind = b"content-type: application/json\r\ncontent-length: "
            writer.write(b"HTTP/1.1 %s\r\n%s%d\r\n\r\n%s" % (status, kind, len(body), body))
    writer.close()


def trace_of(requests: int) -> list[tuple[float, bytes]]:
    """Return the time and the prompt of each request."""
    rng = random.Random(1)

    def text(size: int) -> bytes:
        return b" ".join(b"%04x" % rng.randrange(1 << 16) for _ in range(size // 5))

    systems = [text(4000) for _ in range(24)]
    out: list[tuple[float, bytes]] = []
    now = 0.0
    while len(out) < requests:
        now += rng.expovariate(PER_S)
        if rng.random() < 0.03:
            long = text(6000)
            out += [(now + 0.003 * sibling, long + text(300)) for sibling in range(16)]
            now += 16 / PER_S
        else:
            out.append((now, rng.choice(systems) + text(rng.randrange(100, 800))))
    return out[:requests]


@dataclass
class Result:
    name: str
    computed: int = 0
    spread: float = 0.0
    ttft_s: float = 0.0
    told_bytes: float = 0.0
    cpu_ms: float = 0.0
    rss_mb: float = 0.0
    errors: int = 0


class Play:
    """One run of the trace."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.engines = {address: Engine() for address in addresses}
        self.ttfts: list[float] = []
        self.errors = 0

    async def run(self, trace: Sequence[tuple[float, bytes]], channels: Sequence[grpc.aio.Channel]) -> None:
        began = time.monotonic() + 0.2
        async with asyncio.TaskGroup() as tasks:
            for number, (at, text) in enumerate(trace):
                await asyncio.sleep(began + at - time.monotonic())
                tasks.create_task(self._ask(channels[number % len(channels)], number, text))

    async def _ask(self, channel: grpc.aio.Channel, number: int, text: bytes) -> None:
        began = time.monotonic()
        body = json.dumps({"model": "m", "prompt": text.decode(), "max_tokens": 1}).encode()
        call = channel.stream_stream(METHOD)()
        destination = b""
        for message in _messages(number, body):
            await call.write(message)
            answer = await call.read()
            if answer is grpc.aio.EOF:
                break
            for option in pb.ProcessingResponse.FromString(answer).request_body.response.header_mutation.set_headers:
                if option.header.key == "x-gateway-destination-endpoint":
                    destination = option.header.raw_value
        engine = self.engines.get(destination.decode().partition(",")[0])
        if engine is None:
            self.errors += 1
            return
        await engine.prefill(text)
        self.ttfts.append(time.monotonic() - began)
        headers = pb.ProcessingRequest()
        headers.response_headers.headers.headers.add(key=":status", raw_value=b"200")
        headers.response_headers.headers.headers.add(key="content-type", raw_value=b"text/event-stream")
        await call.write(headers.SerializeToString())
        await call.read()
        await call.done_writing()


def _messages(number: int, body: bytes) -> Iterator[bytes]:
    head = pb.ProcessingRequest()
    head.protocol_config.request_body_mode = 2
    fields = {":method": "POST", ":path": "/v1/completions", ":scheme": "http", ":authority": "a"}
    for key, value in {**fields, "content-type": "application/json", "x-request-id": f"r{number}"}.items():
        head.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    yield head.SerializeToString()
    yield pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True)).SerializeToString()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in found:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in found]


@contextlib.asynccontextmanager
async def pickers(count: int, addresses: Sequence[str], folder: Path, *, told: bool):  # type: ignore[no-untyped-def]
    """Start pickers; yields `(their processes, their ports)`: ext_proc, metrics."""
    ports = [free_ports(5) for _ in range(count)]
    peers = ",".join(f"127.0.0.1:{one[4]}" for one in ports)
    flags = ("--grpc-port", "--grpc-health-port", "--metrics-port", "--admin-port", "--peer-port")
    common = [word for number, address in enumerate(addresses) for word in ("--endpoint", f"e{number}={address}")]
    common += ["--curve-dir", str(folder / "keys"), "--log-level", "error"]
    if told:
        common += ["--peers", peers]
    processes = []
    try:
        for one in ports:
            own = [word for flag, port in zip(flags, one, strict=True) for word in (flag, str(port))]
            processes.append(subprocess.Popen([sys.executable, "-m", "treeline_epp", *common, *own]))  # noqa: ASYNC220
        async with aiohttp.ClientSession() as http:
            for one in ports:
                await _ready(http, f"http://127.0.0.1:{one[3]}/endpoints", len(addresses))
        yield [psutil.Process(process.pid) for process in processes], ports
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)


async def _ready(http: aiohttp.ClientSession, url: str, endpoints: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(url) as page:
                pools = (await page.json()).get("pools", {})
            if sum(one["ready"] for pool in pools.values() for one in pool["endpoints"]) == endpoints:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url}: the picker did not become ready")
        await asyncio.sleep(0.1)


def _all(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [one for process in processes for one in (process, *process.children())]


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in _all(processes))


async def _told(ports: Sequence[Sequence[int]]) -> float:
    total = 0.0
    async with aiohttp.ClientSession() as http:
        for one in ports:
            async with http.get(f"http://127.0.0.1:{one[2]}/metrics") as page:
                lines = (await page.text()).splitlines()
            found = [line for line in lines if line.startswith("treeline_epp_peer_bytes_total ")]
            total += sum(float(line.split()[1]) for line in found)
    return total


async def measured(name: str, count: int, requests: int, folder: Path, port: int, **options: Any) -> Result:
    addresses = [f"127.2.0.{number + 1}:{port}" for number in range(ENGINES)]
    connections = 8
    async with pickers(count, addresses, folder, **options) as (processes, ports):
        play = Play(addresses)
        channels = [
            grpc.aio.insecure_channel(f"127.0.0.1:{one[0]}", [("grpc.use_local_subchannel_pool", 1)])
            for one in ports * (connections // count)
        ]
        before, told = _cpu_s(processes), await _told(ports)
        await play.run(trace_of(requests), channels)
        used, told = _cpu_s(processes) - before, await _told(ports) - told
        rss = sum(one.memory_info().rss for one in _all(processes)) / 1e6
        for channel in channels:
            await channel.close()
    work = [engine.computed for engine in play.engines.values()]
    spread, mean = max(work) * len(work) / sum(work), sum(play.ttfts) / max(1, len(play.ttfts))
    return Result(name, sum(work), spread, mean, told / requests, 1000 * used / requests, rss, play.errors)


@contextlib.asynccontextmanager
async def engines() -> AsyncIterator[int]:
    (port,) = free_ports(1)
    server = await asyncio.start_server(probed, "0.0.0.0", port)
    try:
        yield port
    finally:
        server.close()


async def run(requests: int) -> list[Result]:
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        CurveKeys.generate(folder / "keys")
        async with engines() as port:
            for title, count, options in (
                ("one picker", 1, {"told": False}),
                ("four that tell each other", 4, {"told": True}),
                ("four that do not", 4, {"told": False}),
            ):
                results.append(await measured(title, count, requests, folder, port, **options))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    results = asyncio.run(run(given.requests))
    sys.stdout.write(json.dumps([vars(one) for one in results]) + "\n" if given.json else _table(results))


def _table(results: Sequence[Result]) -> str:
    lines = [
        "| pickers | computed | busiest ÷ mean | TTFT | told, a request | CPU, a request | memory | errors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.name} | {one.computed / 1e6:.2f} MB | {one.spread:.3f} | {1000 * one.ttft_s:.0f} ms | "
        f"{one.told_bytes:.0f} B | {one.cpu_ms:.2f} ms | {one.rss_mb:.0f} MB | {one.errors} |"
        for one in results
    ]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
