"""Let one picker follow thousands of endpoints. Prints JSON rows {metric, value, unit}.

    python epp/benchmarks/follow.py [--endpoints 2000]

One process plays all engines: an HTTP server on every address of 127.0.0.0/8, which answers as each engine would, and
three sockets that all publishers share; each publishes under a topic of its own, with its own numbers. So the picker
has the sockets, connections and states of that many engines, and only its own process is measured. Steps: all
publishers are live; then each announces a block of its own, and all have arrived; then a time in which the picker only
follows. The run fails if an endpoint is not followed, or a block does not arrive.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from treeline_wire import frames
from treeline_wire.events import BlockStored, block_hash, encode_batch, hash_of, root_digest
from treeline_wire.load import TREELINE_LOAD_TOPIC, TreelineLoad, encode
from treeline_wire.tokenizer import TokenizerBundle

ROOT = Path(__file__).resolve().parents[2]
EPOCH = 7
WIDTH = 16
PATIENCE_S = 500.0


class NotFollowed(Exception):
    """An endpoint was not followed, or not in time."""


def address(number: int, port: int) -> str:
    return f"127.1.{number >> 8}.{number & 255}:{port}"


class Engines:
    """All engines, in one process."""

    def __init__(self, count: int, model: Path) -> None:
        self.count = count
        bundle = TokenizerBundle.from_dir(model)
        self._fingerprint, self._tokenizer = bundle.fingerprint, bundle.to_json()
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, 64)
        self._events, self._replay, self._load = map(self._bind, (zmq.PUB, zmq.ROUTER, zmq.PUB))

    def _bind(self, kind: int) -> zmq.asyncio.Socket:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.BACKLOG, 4096)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.bind("tcp://0.0.0.0:*")
        return sock

    async def serve(self, pipe: Connection) -> None:
        """Serve until the pipe says stop. A number on it makes each engine announce a block."""
        server = await asyncio.start_server(self._http, "0.0.0.0", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        tasks = [asyncio.create_task(job) for job in (self._answer(), self._report())]
        while await asyncio.to_thread(pipe.recv) is not None:
            for number in range(self.count):
                ids = [1 + number % 100, number // 100 + 1, *range(2, WIDTH)]
                block = hash_of(block_hash(root_digest(None), ids))
                payload = encode_batch(time.time(), [BlockStored([block], None, ids, WIDTH)])
                await self._events.send_multipart(frames.live(b"e%06d" % number, 0, payload))
        for task in tasks:
            task.cancel()
        server.close()
        self._context.destroy(linger=0)

    async def _answer(self) -> None:
        while True:
            identity, *rest = await self._replay.recv_multipart()
            request = frames.parse_request(rest)
            replies: list[frames.Reply] = []
            if isinstance(request, frames.HelloRequest):
                replies = [frames.Hello(EPOCH)]
            elif isinstance(request, frames.SnapshotRequest):
                replies = [frames.SnapshotHeader(EPOCH, -1, 0), frames.SnapshotEnd()]
            for reply in replies:
                await self._replay.send_multipart([identity, *frames.encode_reply(reply)])

    async def _report(self) -> None:
        """Send a load report for all engines once a second."""
        report = encode(TreelineLoad(epoch=EPOCH, pages_total=100, page_size=WIDTH))
        while True:
            await self._load.send_multipart([TREELINE_LOAD_TOPIC, report])
            await asyncio.sleep(1.0)

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = writer.get_extra_info("sockname")[0].split(".")
        number = int(host[2]) << 8 | int(host[3])
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = self._page(head.split(b" ")[1], number)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    def _page(self, path: bytes, number: int) -> bytes:
        if path == b"/v1/models":
            return b'{"data": [{"id": "tiny"}]}'
        if path == b"/treeline/tokenizer":
            return self._tokenizer
        if path != b"/server_info":
            return b"{}"
        ports = [int(sock.last_endpoint.rpartition(b":")[2]) for sock in (self._events, self._replay, self._load)]
        events = {
            "publisher": "zmq",
            "endpoint_port_base": ports[0],
            "replay_endpoint_port_base": ports[1],
            "load_endpoint_port_base": ports[2],
            "topic": f"e{number:06d}",
        }
        info = {"epoch": EPOCH, "tokenizer_fingerprint": self._fingerprint, "kv_events": events}
        return json.dumps(info).encode()


def play(count: int, model: Path, pipe: Connection) -> None:
    """Run the engines' process."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def run() -> None:
        await Engines(count, model).serve(pipe)

    asyncio.run(run())


class Picker:
    """The picker's process."""

    def __init__(self, endpoints: Path) -> None:
        ports = free_ports(4)
        self.grpc_port = ports[0]
        self._metrics, self._admin = (f"http://127.0.0.1:{port}" for port in ports[2:])
        flags = ("--grpc-port", "--grpc-health-port", "--metrics-port", "--admin-port")
        argv = [
            sys.executable,
            "-m",
            "treeline_epp",
            "--endpoints-file",
            str(endpoints),
            "--log-level",
            "error",
        ]
        for flag, port in zip(flags, ports, strict=True):
            argv += [flag, str(port)]
        self.process = subprocess.Popen(argv)

    def get(self, path: str) -> Any:
        base = self._metrics if path == "/metrics" else self._admin
        with urllib.request.urlopen(base + path, timeout=30) as answer:
            data = answer.read()
        return json.loads(data) if path != "/metrics" else data.decode()

    def live(self) -> float:
        """Return the subscriptions that have applied all published batches; they go to and fro between the two states,
        so both are read from one page.
        """
        names = tuple(f'treeline_epp_kv_subscriptions{{state="{state}"}} ' for state in ("live", "checking"))
        lines = self.get("/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def wait(self, what: str, wanted: int, count: Any) -> float:
        """Return the seconds until `count()` is `wanted`."""
        began, found = time.monotonic(), -1
        while time.monotonic() - began < PATIENCE_S:
            if self.process.poll() is not None:
                raise NotFollowed(f"the picker ended with status {self.process.returncode}")
            try:
                found = count()
            except OSError:
                found = -1  # not listening yet
            if found == wanted:
                return time.monotonic() - began
            time.sleep(0.5)
        raise NotFollowed(f"{what}: {found} of {wanted} after {PATIENCE_S:g} s")

    def holding(self) -> int:
        endpoints = self.get("/endpoints")["pools"]["default"]["endpoints"]
        return sum(endpoint["cached_tokens"] == WIDTH for endpoint in endpoints)


def free_ports(count: int) -> list[int]:
    """Return ports below those of outgoing connections, of which the engines make thousands."""
    found: list[int] = []
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("no free ports below 32000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoints", type=int, default=2000)
    parser.add_argument("--quiet-s", type=float, default=10.0)
    arguments = parser.parse_args()
    count, quiet_s = arguments.endpoints, arguments.quiet_s
    ours, theirs = multiprocessing.Pipe()
    engines = multiprocessing.get_context("spawn").Process(
        target=play, args=(count, ROOT / "models" / "tiny", theirs), daemon=True
    )
    engines.start()
    port = ours.recv()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "endpoints.json"
        listed = [{"name": f"e{n:06d}", "address": address(n, port)} for n in range(count)]
        file.write_text(json.dumps({"endpoints": listed}))
        picker = Picker(file)
        try:
            live_s = picker.wait("live subscriptions", count, lambda: int(picker.live()))
            ours.send(1)
            events_s = picker.wait("endpoints whose block arrived", count, picker.holding)
            before = picker.cpu_s()
            time.sleep(quiet_s)
            rows = {
                f"picker.followed.{count}": (picker.live(), "endpoints"),
                f"picker.live_s.{count}": (live_s, "s"),
                f"picker.events_s.{count}": (events_s, "s"),
                f"picker.idle_cores.{count}": ((picker.cpu_s() - before) / quiet_s, "cores"),
                f"picker.files.{count}": (picker.files(), "files"),
                f"picker.rss_mb.{count}": (picker.rss_mb(), "MB"),
            }
            for metric, (value, unit) in rows.items():
                sys.stdout.write(json.dumps({"metric": metric, "value": round(value, 3), "unit": unit}) + "\n")
                sys.stdout.flush()
        finally:
            stopping = time.monotonic()
            picker.process.terminate()
            picker.process.wait(300)
            sys.stderr.write(f"stopped in {time.monotonic() - stopping:.1f} s\n")
            ours.send(None)
            engines.join(10)


if __name__ == "__main__":
    main()
