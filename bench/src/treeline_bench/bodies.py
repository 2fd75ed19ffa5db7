"""Benchmark `bodies`: what one hostile body costs everybody else, and the memory of a runtime.

Method. One runtime (`treeline serve`) of the tiny model, whose context is 8,192 tokens, is asked `/live` over one
connection, again and again with a pause of 2 ms, while a prompt of English words of 1, 4, 8 and 30 MB arrives over
another one, `REPEATS` times each. `live_ms` is the longest that `/live` took then, in the median of the repeats; memory
is what the runtime's HTTP process and its readers held at most, seen every 10 ms. All such prompts are longer than the
context, so the answer is a 400. The machine's other work is in the figures: with one core for the client, for the HTTP
process and for a reader, `/live` waits for the operating system, too.
"""

from __future__ import annotations

import http.client
import statistics
import sys
import threading
import time

import psutil

from treeline_bench.context import Benchmark, BenchmarkError, Context
from treeline_bench.metrics import row
from treeline_bench.processes import Child, child, free_ports
from treeline_bench.results import Row

SIZES_MB = (1, 4, 8, 30)
REPEATS = 5
PAUSE_S = 0.002
MB = 1 << 20
BEFORE = {1: (9664.2, 243.0), 4: (40005.4, 866.0), 8: (97255.0, 1586.0)}
"""Size → (ms, MB) of the runtime that tokenized such prompts in a thread of its HTTP process (commit 627c659), by this
method, once each, on the same machine while it was busy; 30 MB took more than five minutes."""
WORDS = b"All the king's horses and all the king's men couldn't put it together again. "


def run(context: Context) -> list[Row]:
    [port] = free_ports(1)
    argv = [sys.executable, "-m", "treeline_runtime", "--model", str(context.model), "--no-events"]
    rows: list[Row] = []
    with child("runtime", [*argv, "--port", str(port), "--threads", "1"], context.folder) as runtime:
        runtime.wait_ready(f"http://127.0.0.1:{port}/ready", 120)
        _ask(port, 100_000)  # its readers are there
        for size in SIZES_MB[: 2 if context.quick else None]:
            context.display.phase(f"bodies: a prompt of {size} MB", REPEATS)
            waits, peak = list[float](), 0.0
            for _ in range(1 if context.quick else REPEATS):
                wait_s, peak_mb = _measure(runtime, port, size * MB)
                waits.append(wait_s * 1000)
                peak = max(peak, peak_mb)
                context.display.done(1)
            before_ms, before_mb = BEFORE.get(size, (None, None))
            rows.append(row(f"bodies.live_ms.{size}mb", statistics.median(waits), before_ms))
            rows.append(row(f"bodies.rss_mb.{size}mb", peak, before_mb))
    return rows


def _measure(runtime: Child, port: int, size: int) -> tuple[float, float]:
    """The longest wait for `/live` in seconds, and the most memory in MB, while one body is answered."""
    over = threading.Event()
    waits, memory = [0.0], [0.0]
    watchers = [
        threading.Thread(target=_watch_live, args=(port, over, waits)),
        threading.Thread(target=_watch_memory, args=(runtime.process.pid, over, memory)),
    ]
    for watcher in watchers:
        watcher.start()
    time.sleep(0.1)
    try:
        _ask(port, size)
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()
    return max(waits), max(memory)


def _ask(port: int, size: int) -> None:
    prompt = (WORDS * (size // len(WORDS) + 1))[:size]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", b'{"max_tokens":1,"prompt":"%s"}' % prompt)
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    if answer.status != 400 or b"context_length_exceeded" not in said:
        raise BenchmarkError(f"a prompt of {size} bytes was answered {answer.status}: {said[:200]!r}")


def _watch_live(port: int, over: threading.Event, waits: list[float]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    while not over.is_set():
        started = time.perf_counter()
        connection.request("GET", "/live")
        connection.getresponse().read()
        waits.append(time.perf_counter() - started)
        time.sleep(PAUSE_S)
    connection.close()


def _watch_memory(pid: int, over: threading.Event, memory: list[float]) -> None:
    """Of the HTTP process and its readers: the scheduler's memory is the model's and the cache's."""
    while not over.is_set():
        held = 0
        server = psutil.Process(pid)
        for process in (server, *server.children()):
            try:
                if process == server or "reader_process" in " ".join(process.cmdline()):
                    held += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        memory.append(held / MB)
        time.sleep(0.01)


BENCHMARK = Benchmark("bodies", "Hostile bodies", "what a prompt of megabytes costs others, and memory (a minute)", run)
