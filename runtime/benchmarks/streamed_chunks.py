"""Measure what streams cost beside the engine: many of them against a scheduler without a model. Prints JSON rows.

    python runtime/benchmarks/streamed_chunks.py [--streams 256] [--tokens 200] [--step-ms 50]

The server is `treeline serve` with `tests/support/fake_scheduler.py` in place of the engine, which gives each stream a
token every `--step-ms`. What counts is computing time, which a busy machine disturbs less than rates: microseconds of
the HTTP process for a chunk (`http.chunk_us`), of the detokenizer (`detokenizer.chunk_us`), and how many chunks a
second there can be before the HTTP process is busy all the time (`http.limit_chunks_s`), as far as the machine
has a core for each. Steps have to be long enough that no two chunks become one: `chunks_a_token` must be near 1. Runs
too short for the system's clock of computing time, which counts hundredths of a second, have no limit to tell.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fake_server import ROOT, cpu_s, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
PREFIX = b"data: "


@dataclass(frozen=True)
class Server:
    port: int
    http: int
    """Id of the process, as is:"""
    detokenizer: int


def processes(parent: int) -> dict[int, str]:
    """Children of a process: id → command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found[int(folder.name)] = (folder / "cmdline").read_text()
    return found


@contextlib.contextmanager
def server(model: Path, step_ms: float) -> Iterator[Server]:
    """A server that is ready."""
    environment = {"FAKE_TOKEN_S": str(step_ms / 1000)}
    with serving(model, environment=environment) as (pid, port):
        children = processes(pid)
        [detokenizer] = [child for child, command in children.items() if "detokenizer" in command]
        yield Server(port, pid, detokenizer)


async def stream(port: int, tokens: int) -> int:
    """The chunks of one stream."""
    body = json.dumps({"model": "m", "prompt": "The capital of France", "max_tokens": tokens, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % len(body) + body)
    chunks, rest = 0, b""
    while b"[DONE]" not in rest:
        data = await reader.read(1 << 16)
        assert data, "the stream broke off"
        rest += data
        chunks += rest.count(PREFIX)
        rest = rest[rest.rfind(PREFIX) + len(PREFIX) :] if PREFIX in rest else rest
    writer.close()
    return chunks - 1


async def streams(port: int, count: int, tokens: int) -> int:
    return sum(await asyncio.gather(*(stream(port, tokens) for _ in range(count))))


def measure(one: Server, count: int, tokens: int) -> dict[str, float]:
    before, detokenizer = cpu_s(one.http), cpu_s(one.detokenizer)
    chunks = asyncio.run(streams(one.port, count, tokens))
    computed = cpu_s(one.http) - before
    figures = {
        "chunks_a_token": chunks / (count * tokens),
        "http.chunk_us": 1e6 * computed / chunks,
        "detokenizer.chunk_us": 1e6 * (cpu_s(one.detokenizer) - detokenizer) / chunks,
    }
    return figures | ({"http.limit_chunks_s": chunks / computed} if computed else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=50.0)
    args = parser.parse_args()
    with server(args.model, args.step_ms) as one:
        asyncio.run(streams(one.port, args.streams, max(1, args.tokens // 4)))  # not counted
        for metric, value in measure(one, args.streams, args.tokens).items():
            row = {"metric": metric, "value": float(f"{value:.4g}")}
            sys.stdout.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
