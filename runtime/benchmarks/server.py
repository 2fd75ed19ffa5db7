"""Measures the server's cost over the engine: the same requests offline and through HTTP, and the GPU's idle time.

    python runtime/benchmarks/server.py --shape llama8b

Random weights and a made-up tokenizer (`dummy_model.py`); the same settings everywhere (`--set`). In this order, each
in its own processes, with a row of JSON each:

- `server.offline_tokens_s.SHAPE`: output tokens a second of 256 requests with 100 to 1,024 tokens in and out,
  temperature 0.6, by `Engine` without HTTP; the median of the rounds, whose prompts differ.
- `start.warm_s.SHAPE`: from starting `treeline serve` to the first token through HTTP; kernels are compiled by then.
- `server.tokens_s.SHAPE`: the same 256 requests at that server, all at once, each a stream.
- `server_over_offline.SHAPE`: server ÷ offline.
- `overlap.idle_share.SHAPE`, with CUDA: while 64 streams decode through another server, the share of time in which
  the GPU had nothing to do for more than 5 µs, by the profiler's record of its kernels and copies
  (`profiled_scheduler.py`). `overlap.gap_share.SHAPE` counts all gaps, also between the kernels of one step.
  The profiler costs the CPU some time, so both are upper bounds; `overlap.step_ms.SHAPE` is the time of a step then.

This process is the HTTP client: it reads bytes and nothing else.
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
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dummy_model import write_config, write_model
from engine import SHAPES, report
from treeline_runtime import Engine, SamplingParams
from work import Work

HERE = Path(__file__).resolve().parent
REQUESTS, LONGEST = 256, 1024
STREAMS, STREAM_PROMPT, STREAM_OUTPUT = 64, 1024, 512
START_S, ANSWER_S = 600.0, 600.0


# ---- offline ------------------------------------------------------------------------------------------------


def offline(shape: str, settings: Mapping[str, Any], works: list[Work]) -> None:
    """Prints tokens a second of each work, a line each. In a process of its own, which frees the device at its end."""
    with tempfile.TemporaryDirectory() as name:
        write_config(Path(name), shape)
        with Engine(name, load_format="dummy", **settings) as engine:
            for work in [Work.of(8, 64, seed=-1), *works]:
                params = [
                    SamplingParams(temperature=0.6, ignore_eos=True, max_new_tokens=length) for length in work.lengths
                ]
                started = time.perf_counter()
                engine.generate(work.prompts, params)
                sys.stdout.write(f"{sum(work.lengths) / (time.perf_counter() - started)}\n")


def offline_rates(arguments: list[str]) -> list[float]:
    """Tokens a second of each round, from a child; its first line is a warm-up."""
    command = [sys.executable, __file__, "--offline", *arguments]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=START_S).stdout
    return [float(line) for line in said.split()[1:]]


# ---- through HTTP -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    port: int
    started: float
    """The start, by `time.perf_counter`."""


@contextlib.contextmanager
def serving(model: Path, settings: Mapping[str, Any], module: str, environment: Mapping[str, str]) -> Iterator[Server]:
    """A server of `module` that is ready. Raises SystemExit with its log where it does not start."""
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    ports = ["--port=0", "--metrics-port=off", "--admin-port=off"]
    command = [sys.executable, "-m", module, "--model", str(model), "--load-format=dummy", "--no-events"]
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = model / "server.log"
    started = time.perf_counter()
    with log.open("w") as written:
        process = subprocess.Popen(
            [*command, *ports, *flags], stderr=written, env={**os.environ, **environment, "PYTHONPATH": path}
        )
    try:
        yield Server(_port(process, log), started)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        said = log.read_text(errors="replace")
        found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", said)
        if found and "ready after" in said:
            return int(found[1])
        time.sleep(0.02)
    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")


async def ask(port: int, prompt: list[int], length: int) -> int:
    """One stream. → output tokens, as the server counts them. Raises SystemExit where it answers something else."""
    fields = {"temperature": 0.6, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"prompt": prompt, "max_tokens": length, **fields}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    tail = b""
    async with asyncio.timeout(ANSWER_S):
        while data := await reader.read(1 << 16):
            tail = (tail + data)[-4096:]
    writer.close()
    if not (found := re.search(rb'"completion_tokens":\s*(\d+)', tail)) or b"[DONE]" not in tail:
        raise SystemExit(f"no whole answer: {tail[-600:]!r}")
    return int(found[1])


async def ask_all(port: int, work: Work) -> float:
    """All at once. → output tokens a second."""
    started = time.perf_counter()
    counts = await asyncio.gather(*(ask(port, *each) for each in zip(work.prompts, work.lengths, strict=True)))
    assert list(counts) == work.lengths, "answers are shorter than asked for"
    return sum(counts) / (time.perf_counter() - started)


def through_http(shape: str, model: Path, settings: Mapping[str, Any], works: list[Work]) -> list[float]:
    """Tokens a second of each work."""
    with serving(model, settings, "treeline_runtime", {}) as server:
        asyncio.run(ask(server.port, [10] * 8, 1))
        report(f"start.warm_s.{shape}", time.perf_counter() - server.started)
        asyncio.run(ask_all(server.port, Work.of(8, 64, seed=-1)))
        return [asyncio.run(ask_all(server.port, work)) for work in works]


def idle(shape: str, model: Path, settings: Mapping[str, Any]) -> None:
    found = model / "idle.json"
    environment = {"PROFILE_BATCH": str(STREAMS), "PROFILE_OUT": str(found)}
    with serving(model, settings, "profiled_scheduler", environment) as server:
        asyncio.run(ask_all(server.port, Work.of(8, 64, seed=-1)))
        asyncio.run(ask_all(server.port, Work.streams(STREAMS, STREAM_PROMPT, STREAM_OUTPUT)))
    if not found.exists():
        raise SystemExit(f"the scheduler was not profiled:\n{(model / 'server.log').read_text()[-4000:]}")
    for name, value in json.loads(found.read_text()).items():
        report(f"overlap.{name}.{shape}", value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few short requests: proves that it works")
    parser.add_argument("--set", default="{}", metavar="JSON", help='fields of the configuration, {"page_size": 64}')
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    settings = {"context_length": 8192} | json.loads(args.set)
    count, longest = (8, 64) if args.quick else (REQUESTS, LONGEST)
    works = [Work.of(count, longest, seed) for seed in range(1 if args.quick else args.rounds)]
    if args.offline:
        offline(args.shape, settings, works)
        return 0
    alone = statistics.median(offline_rates(sys.argv[1:]))
    report(f"server.offline_tokens_s.{args.shape}", alone)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name)
        write_model(model, args.shape)
        served = statistics.median(through_http(args.shape, model, settings, works))
        report(f"server.tokens_s.{args.shape}", served)
        report(f"server_over_offline.{args.shape}", served / alone)
        if torch.cuda.is_available():
            idle(args.shape, model, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
