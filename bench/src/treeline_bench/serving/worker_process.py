"""A load process: `python -m treeline_bench.serving.worker_process ORDER TOLD`.

Says `ready`, waits for a line with the moment to begin (monotonic clock, ns), then prints progress as lines of JSON and
leaves what it has to tell in the file TOLD. Another line, or the end of its input, ends the load early.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import sys
from pathlib import Path

import msgspec
import uvloop

from treeline_bench.serving.messages import Order, Progress, Told
from treeline_bench.serving.worker import Worker


def main(order_path: str, told_path: str) -> None:
    _allow_many_files()
    order = msgspec.msgpack.decode(Path(order_path).read_bytes(), type=Order)
    # A collection of the whole heap in the middle of a run would be measured as the server's latency.
    gc.collect()
    gc.freeze()
    gc.disable()
    told = uvloop.run(_run(order))
    if told is not None:
        Path(told_path).write_bytes(msgspec.msgpack.encode(told))


async def _run(order: Order) -> Told | None:
    worker = Worker(order, _say)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print("ready", flush=True)
    begin = await lines.readline()
    if not begin:
        return None
    stopping = asyncio.create_task(_stop_on_line(lines, worker))
    told = await worker.run(int(begin))
    stopping.cancel()
    return told


async def _stop_on_line(lines: asyncio.StreamReader, worker: Worker) -> None:
    await lines.readline()
    worker.stop()


def _allow_many_files() -> None:
    """A connection is a file, and the usual soft limit is 1,024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # some systems name a hard limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say(progress: Progress) -> None:
    print(msgspec.json.encode(progress).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
