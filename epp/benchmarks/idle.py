"""Measure a picker that only watches its engines, and the time of picks. Prints JSON rows {metric, value, unit}.

    python epp/benchmarks/idle.py [--engines plain vllm treeline] [--endpoints 64 100 1000] [--seconds 20]

One process plays all engines, on as many addresses of 127.0.0.0/8: `plain` has health and a list of models, `vllm` a
metrics page of 100 KB besides, which changes at each scrape, `treeline` publishes events and pushes its load. The
picker is a process of its own, whose CPU time the kernel counts. `picker.idle.cores` is its CPU time without requests,
`picker.idle.pick_p99_ms` the time that one client waits for decisions, one after another, in a second period of the
same length: on a machine with other work it means little. The run fails if an engine is not ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
from follow import ROOT, Engines, NotFollowed, Picker, address
from scrape import page
from treeline_wire import envoy_pb2 as pb

KINDS = ("plain", "vllm", "treeline")
SETTLE_S = 3.0
_PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_BODY = b'{"model": "tiny", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'


class OtherEngines:
    """All engines of a kind that pushes nothing, in one process."""

    def __init__(self, kind: str) -> None:
        self._owner = kind.encode()
        self._metrics = page() if kind == "vllm" else b""
        self._looks = 0

    async def serve(self, pipe: Connection) -> None:
        """Serve until the pipe says stop."""
        server = await asyncio.start_server(self._http, "0.0.0.0", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(pipe.recv)
        server.close()

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                status, body = self._page((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1])
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    def _page(self, path: bytes) -> tuple[int, bytes]:
        if path == b"/health":
            return 200, b""
        if path == b"/v1/models":
            return 200, b'{"data": [{"id": "tiny", "owned_by": "%s"}]}' % self._owner
        if path == b"/metrics" and self._metrics:
            self._looks += 1
            return 200, b"process_cpu_seconds_total %d.0\n" % self._looks + self._metrics
        return 404, b""


def play(kind: str, count: int, pipe: Connection) -> None:
    """Run the engines' process."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def run() -> None:
        engines = Engines(count, ROOT / "models" / "tiny") if kind == "treeline" else OtherEngines(kind)
        await engines.serve(pipe)

    asyncio.run(run())


def _asks() -> Iterator[pb.ProcessingRequest]:
    modes = pb.ProtocolConfiguration(request_body_mode=pb.ProcessingMode.BUFFERED)
    fields = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
    headers = [pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in fields.items()]
    head = pb.HttpHeaders(headers=pb.HeaderMap(headers=headers))
    yield pb.ProcessingRequest(request_headers=head, protocol_config=modes)
    yield pb.ProcessingRequest(request_body=pb.HttpBody(body=_BODY, end_of_stream=True))


def pick_ms(port: int, seconds: float) -> list[float]:
    """Return the sorted times of one client's decisions. Raises `NotFollowed` if one was refused."""
    took: list[float] = []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.stream_stream(_PROCESS, pb.ProcessingRequest.SerializeToString, pb.ProcessingResponse.FromString)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.perf_counter()
            replies = list(ask(_asks()))
            took.append(1e3 * (time.perf_counter() - began))
            if any(reply.HasField("immediate_response") for reply in replies):
                raise NotFollowed(f"a request was refused: {replies}")
            time.sleep(0.01)
    return sorted(took)


def measure(kind: str, count: int, seconds: float) -> dict[str, tuple[float, str]]:
    """Return the rows by metric. Raises `NotFollowed`."""
    ours, theirs = multiprocessing.Pipe()
    engines = multiprocessing.get_context("spawn").Process(target=play, args=(kind, count, theirs), daemon=True)
    engines.start()
    port = ours.recv()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "endpoints.json"
        listed = [{"name": f"e{n:06d}", "address": address(n + 1, port)} for n in range(count)]
        file.write_text(json.dumps({"endpoints": listed}))
        picker = Picker(file)
        try:
            picker.wait("ready engines", count, lambda: ready(picker))
            time.sleep(SETTLE_S)
            before, began = picker.cpu_s(), time.monotonic()
            time.sleep(seconds)
            cores = (picker.cpu_s() - before) / (time.monotonic() - began)
            took = pick_ms(picker.grpc_port, seconds)
            if ready(picker) != count:
                raise NotFollowed("some engines are not ready any more")
        finally:
            picker.process.terminate()
            picker.process.wait(300)
            ours.send(None)
            engines.join(10)
    return {
        f"picker.idle.cores.{kind}.{count}": (cores, "cores"),
        f"picker.idle.pick_p50_ms.{kind}.{count}": (took[len(took) // 2], "ms"),
        f"picker.idle.pick_p99_ms.{kind}.{count}": (took[int(0.99 * len(took))], "ms"),
    }


def ready(picker: Picker) -> int:
    """Return how many engines are ready for the picker."""
    pools = picker.get("/endpoints")["pools"]
    return sum(endpoint["ready"] for pool in pools.values() for endpoint in pool["endpoints"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--endpoints", nargs="+", type=int, default=[64, 100, 1000])
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    for kind in arguments.engines:
        for count in arguments.endpoints:
            for metric, (value, unit) in measure(kind, count, arguments.seconds).items():
                sys.stdout.write(json.dumps({"metric": metric, "value": round(value, 4), "unit": unit}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
