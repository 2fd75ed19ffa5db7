"""Measures prompts computed apart from answers: the same requests at two servers that do both, and at a pair.

    python runtime/benchmarks/pairs.py --shape llama8b

Two servers with the same random weights, each with a GPU (on a machine with one or none they share it). At each, or at
one of the pair, streams of short prompts are answered all the time, and long prompts of short answers come at fixed
times. *Together* requests take turns at the servers. *Apart* the first server computes each long prompt, and the second
one, which answers everything, is told of it and pulls the pages, as the picker has it done; short prompts stay whole.
Both have the same arrivals. Prints a row of JSON for each figure:

- `pd.itl_p99_ratio`: 99th percentile of the time between tokens, apart ÷ together. `pd.itl_p99_ms.apart`, `.together`.
- `pd.ttft_p50_ratio`: median time to the first token of long prompts, likewise. `pd.ttft_p50_ms.apart`, `.together`.
- `pd.throughput_ratio`: all output tokens by the time until the last one, likewise.
- `pd.cached_share`: tokens of long prompts that the second server did not compute.
- `pd.transfer_gb_s`: pages of a prompt that the first server has on its host, by the time to the first token at the
  second one, alone. With two GPUs also `pd.transfer_share_of_link`: of the speed of a copy from one to the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from dummy_model import write_model
from engine import SHAPES, report, seconds_of
from pull import pages_at
from server import Server, serving

WITHIN_S = 10.0
"""How long the second server waits for a part of a prompt."""

HOST_PROMPTS = 12
"""Long prompts for which there is room on the host."""


@dataclass(frozen=True)
class Load:
    """streams: short prompts at a time; longs: long prompts, one every `every_s`."""

    streams: int
    short: int
    answer: int
    longs: int
    long: int
    every_s: float


LOADS = {"tiny": Load(4, 32, 48, 6, 2048, 2.0), "llama8b": Load(64, 256, 256, 40, 8192, 0.4)}


@dataclass
class Seen:
    """What clients saw."""

    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    """Of long prompts."""
    tokens: int = 0
    cached: int = 0


@dataclass(frozen=True)
class Answer:
    first_s: float
    gaps: list[float]
    tokens: int
    cached: int


async def ask(port: int, prompt: list[int], length: int, header: str = "") -> Answer:
    """One stream of /generate, which sends an event for each token."""
    params = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": params, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST /generate HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n{header}\r\n"
    began = time.perf_counter()
    writer.write(head.encode() + body)
    times, last = list[float](), b""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            last = line
    writer.close()
    found: dict[str, Any] = json.loads(last[6:])
    assert found["meta_info"]["completion_tokens"] == length, found
    gaps = [after - before for before, after in pairwise(times)]
    return Answer(times[0] - began, gaps, length, found["meta_info"]["cached_tokens"])


async def drive(load: Load, ports: list[int], pages_from: str | None, seed: int) -> tuple[Seen, float]:
    """The load; pages_from: the address of the first server's pages, of a pair. Returns what was seen, and seconds."""
    rng, seen, turn = random.Random(seed), Seen(), 0
    longs = [rng.choices(range(10, 4000), k=load.long) for _ in range(load.longs)]
    ends = asyncio.Event()

    def port() -> int:
        nonlocal turn
        turn += 1
        return ports[1] if pages_from else ports[turn % 2]

    def note(answer: Answer) -> None:
        seen.gaps += answer.gaps
        seen.tokens += answer.tokens

    async def stream() -> None:
        while not ends.is_set():
            note(await ask(port(), rng.choices(range(10, 4000), k=load.short), load.answer))

    async def long(prompt: list[int]) -> None:
        calls = list[Awaitable[Answer]]()
        header = ""
        if pages_from:
            header = f"x-treeline-pages-from: {pages_from};within={WITHIN_S:g}\r\n"
            calls.append(ask(ports[0], prompt, 1))
        answer, *_ = await asyncio.gather(ask(port(), prompt, 16, header), *calls)
        note(answer)
        seen.firsts.append(answer.first_s)
        seen.cached += answer.cached

    began = time.perf_counter()
    streams = [asyncio.create_task(stream()) for _ in range(load.streams)]
    await asyncio.sleep(2 * load.every_s)
    pending = []
    for prompt in longs:
        pending.append(asyncio.create_task(long(prompt)))
        await asyncio.sleep(load.every_s)
    await asyncio.gather(*pending)
    ends.set()
    await asyncio.gather(*streams)
    return seen, time.perf_counter() - began


async def alone(load: Load, ports: list[int], pages_from: str, turns: int) -> float:
    """Median seconds to the first token of a prompt that the first server has computed."""
    seconds, rng = [], random.Random(-1)
    for _ in range(turns + 1):
        prompt = rng.choices(range(10, 4000), k=load.long + 1)
        await ask(ports[0], prompt, 1)
        pulled = await ask(ports[1], prompt, 1, f"x-treeline-pages-from: {pages_from}\r\n")
        assert pulled.cached >= load.long - 256, "the pages did not come"
        seconds.append(pulled.first_s)
    return statistics.median(seconds[1:])


def link_bytes_s() -> float:
    """Bytes a second of a copy from one GPU to the other."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:1")
    return (1 << 30) / seconds_of(lambda: target.copy_(source))


def measure(load: Load, servers: list[Server], token_bytes: int, turns: int) -> None:
    ports = [server.port for server in servers]
    address = pages_at(ports[0])
    forms = {"together": None, "apart": address}
    rate = load.long * token_bytes / asyncio.run(alone(load, ports, address, turns))
    report("pd.transfer_gb_s", rate / 1e9)
    if torch.cuda.device_count() > 1:
        report("pd.transfer_share_of_link", rate / link_bytes_s())
    found = dict[str, tuple[float, float, float]]()
    for seed, form in enumerate(["together", "apart", *forms]):  # the first of each warms up
        seen, seconds = asyncio.run(drive(load, ports, forms[form], seed))
        p99 = statistics.quantiles(seen.gaps, n=100)[-1]
        found[form] = 1e3 * p99, 1e3 * statistics.median(seen.firsts), seen.tokens / seconds
        sys.stderr.write(f"{form}: {found[form]} in {seconds:.1f} s\n")
        if form == "apart":
            cached = seen.cached / (load.longs * load.long)
    for form, (itl, ttft, _) in found.items():
        report(f"pd.itl_p99_ms.{form}", itl)
        report(f"pd.ttft_p50_ms.{form}", ttft)
    for i, name in enumerate(("itl_p99", "ttft_p50", "throughput")):
        report(f"pd.{name}_ratio", found["apart"][i] / found["together"][i])
    report("pd.cached_share", cached)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=LOADS, required=True)
    args = parser.parse_args()
    load, shape = LOADS[args.shape], SHAPES[args.shape]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    element = 2 if device == "cuda" else 4
    token_bytes = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * element
    settings: dict[str, Any] = {"host_cache": HOST_PROMPTS * load.long * token_bytes, "kv_transfer_port": 0}
    if torch.cuda.device_count() == 1:
        settings["max_total_tokens"] = 200_000
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for model in (first, second):
            write_model(Path(model), args.shape)
        gpus = [{"CUDA_VISIBLE_DEVICES": str(i % max(1, torch.cuda.device_count()))} for i in range(2)]
        with (
            serving(Path(first), settings, "treeline_runtime", gpus[0]) as source,
            serving(Path(second), settings, "treeline_runtime", gpus[1]) as server,
        ):
            measure(load, [source, server], token_bytes, 4)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
