"""Measure what HTTP costs a runtime: small completions against a scheduler without a model. Prints JSON rows.

    python runtime/benchmarks/small_completions.py [--requests 4000] [--clients 32] [--rounds 5] [--against MODULE]

The server is `treeline serve` with `tests/support/fake_scheduler.py` in place of the engine, asked for one token over
connections that stay open. `http.requests_s` is answers a second, `http.cpu_us` what the HTTP process computes for one,
which a busy machine disturbs less. Each is the median of the rounds, after one that is not counted.

`--against` names another module that serves so (`support.fake_serve` does), to compare two servers in a paired run: a
round of the one, a round of the other, and so on; its rows end in `.against`, and `http.ratio` and `http.cpu_ratio` are
the medians of the rounds' own ratios, the other server's to ours.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BODY = b'{"model":"m","prompt":"The capital of France is","max_tokens":1,"temperature":0}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
REQUEST = HEAD % len(BODY) + BODY
START_S = 120.0


class Server:
    """One server on a free port, measured from outside."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.port = port
        self._pid = process.pid

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server(module: str, model: Path) -> Iterator[Server]:
    """A server that is ready."""
    flags = ["--model", str(model), "--served-model-name", "m", "--no-events"]
    ports = ["--port=0", "--metrics-port=off", "--admin-port=off"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", module, *flags, *ports]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        port = 0
        for line in process.stderr:
            if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line):
                port = int(found[1])
            if "ready after" in line:
                break
        else:
            raise SystemExit(f"{module} did not start")
        yield Server(process, port)
    finally:
        process.terminate()
        process.communicate(timeout=START_S)


async def client(port: int, count: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(count):
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        size = re.search(rb"content-length: (\d+)", head)
        assert size is not None
        await reader.readexactly(int(size[1]))
    writer.close()


async def clients(port: int, count: int, total: int) -> None:
    await asyncio.gather(*(client(port, total // count) for _ in range(count)))


def measure(one: Server, count: int, total: int) -> tuple[float, float]:
    """Answers a second, and microseconds of the HTTP process for one."""
    computed_s, began = one.cpu_s(), time.perf_counter()
    asyncio.run(clients(one.port, count, total))
    took_s = time.perf_counter() - began
    return total / took_s, 1e6 * (one.cpu_s() - computed_s) / total


def row(metric: str, value: float) -> None:
    sys.stdout.write(json.dumps({"metric": metric, "value": value}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", metavar="MODULE")
    args = parser.parse_args()
    modules = ["support.fake_serve"] + ([args.against] if args.against else [])
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(server(module, args.model)) for module in modules]
        for one in servers:
            measure(one, args.clients, args.requests // 4)
        rounds = [[measure(one, args.clients, args.requests) for one in servers] for _ in range(args.rounds)]
    for index, suffix in enumerate(["", ".against"][: len(servers)]):
        for at, metric in enumerate(("http.requests_s", "http.cpu_us")):
            row(metric + suffix, statistics.median(measured[index][at] for measured in rounds))
    if args.against:
        for at, metric in enumerate(("http.ratio", "http.cpu_ratio")):
            row(metric, statistics.median(measured[1][at] / measured[0][at] for measured in rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
