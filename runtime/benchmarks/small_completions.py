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
import re
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from fake_server import ROOT, cpu_s, serving

BODY = b'{"model":"m","prompt":"The capital of France is","max_tokens":1,"temperature":0}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
REQUEST = HEAD % len(BODY) + BODY


class Server(NamedTuple):
    """One server on a free port, measured from outside."""

    pid: int
    port: int


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
    computed_s, began = cpu_s(one.pid), time.perf_counter()
    asyncio.run(clients(one.port, count, total))
    took_s = time.perf_counter() - began
    return total / took_s, 1e6 * (cpu_s(one.pid) - computed_s) / total


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
        servers = [Server(*stack.enter_context(serving(args.model, module=module))) for module in modules]
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
