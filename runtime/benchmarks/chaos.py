"""What free requests feel of a storm of grammars, on a real server.

    python runtime/benchmarks/chaos.py
    python runtime/benchmarks/chaos.py --streams 8 --rounds 3 --storm 200

`--streams` clients stream free answers of 48 tokens, one after another, in these phases, each `--rounds` times in turn:

- `quiet`: nobody else is there;
- `control`: beside `--storm` free requests of 24 tokens at once: what so many cost without any grammar;
- `schemas`: beside as many with a schema each that nobody has had;
- `hostile`: beside one of each hostile grammar (exponential patterns, deep nesting, schemas of 1 MB), at once, and as
  many free ones as make it the storm's number.

A phase lasts until its storm is answered, and `--seconds` at least. Prints rows of JSON: `chaos.gap_ms.PHASE` and
`chaos.total_ms.PHASE`, the 99th percentiles of the gaps between tokens and of whole answers, and the ratios of phases,
`chaos.gap.ONE_by_OTHER` and `chaos.total.ONE_by_OTHER`. What a grammar costs besides its request is schemas by control.
On standard error, of each phase: the time that the scheduler's thread, its other threads, the server's loop and all
processes that compile were on a CPU per second, and what scheduler and loop waited for one
(/proc/PID/task/TID/schedstat).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
TOKENS, STORM_TOKENS = 48, 24
HOSTILE: list[dict[str, Any]] = [
    {"regex": "((((a+)+)+)+)+b{}"},
    {"regex": "{}(a|b)*a" + "(a|b)" * 40},
    {"regex": "(([a-z]{0,30}){0,30}){0,30}"},
    {"json_schema": '{"type":"array","items":' * 10_000 + "{}" + "}" * 10_000},
    {"json_schema": json.dumps({"description": "x" * (1 << 20) + "{}"})},
    {"json_schema": json.dumps({"enum": [f"{'word ' * 60}{i}" for i in range(2000)]})},
    {"json_schema": json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(2000)}})},
    {"ebnf": "root ::= e\ne ::= e e | e e e | [a-z]*"},
]

_COMPARED = (
    ("control", "quiet"),
    ("schemas", "quiet"),
    ("hostile", "quiet"),
    ("schemas", "control"),
    ("hostile", "control"),
)


class Streams:
    """Free clients, and what they waited for: seconds."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.gaps: list[float] = []
        self.totals: list[float] = []

    async def run(self, until: asyncio.Event) -> None:
        while not until.is_set():
            began = last = time.perf_counter()
            async with self._http.stream("POST", "/generate", json=_body(TOKENS, stream=True)) as answer:
                assert answer.status_code == 200, answer.status_code
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        self.gaps.append(now - last)
                        last = now
            self.totals.append(last - began)


def _body(tokens: int, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    parameters = {"temperature": 0, "max_new_tokens": tokens, **sampling}
    if not sampling:
        parameters["ignore_eos"] = True
    return {"text": "The", "stream": stream, "sampling_params": parameters}


def _storm(phase: str, size: int, number: int) -> list[dict[str, Any]]:
    if phase == "quiet":
        return []
    if phase == "schemas":
        schema = {"type": "object", "required": ["a"], "additionalProperties": False}
        pattern = "^[a-z]{{1,9}}{}$"
        each = ({"a": {"type": "string", "pattern": pattern.format(f"{number}x{i}")}} for i in range(size))
        return [_body(STORM_TOKENS, json_schema=json.dumps(schema | {"properties": one})) for one in each]
    hostile = HOSTILE if phase == "hostile" else []
    bodies = [
        _body(STORM_TOKENS, **{key: text.replace("{}", f"{number}", 1) for key, text in one.items()}) for one in hostile
    ]
    return bodies + [_body(STORM_TOKENS) for _ in range(size - len(bodies))]


class Processes:
    """Of the server: seconds on a CPU, and waiting for one."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._scheduler = next(pid for pid, command in _children(server) if "scheduler" in command)

    def seconds(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for task in Path(f"/proc/{self._scheduler}/task").iterdir():
            name = "scheduler" if int(task.name) == self._scheduler else "scheduler's threads"
            _add(found, name, task)
        _add(found, "loop", Path(f"/proc/{self._server}/task/{self._server}"))
        for pid, command in _children(self._scheduler):
            if "grammar.worker" in command:
                for task in Path(f"/proc/{pid}/task").iterdir():
                    _add(found, f"compiling {pid}", task)
        return found


def _add(found: dict[str, float], name: str, task: Path) -> None:
    try:
        cpu, delay, _ = (int(text) / 1e9 for text in (task / "schedstat").read_text().split())
    except OSError:  # it has ended
        return
    found[name] += cpu
    found[f"{name} waits"] += delay


def _children(parent: int) -> Iterable[tuple[int, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == parent:
                    yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue


async def _phase(http: httpx.AsyncClient, args: argparse.Namespace, phase: str, number: int, seen: Streams) -> None:
    until = asyncio.Event()
    clients = [asyncio.create_task(seen.run(until)) for _ in range(args.streams)]
    began = time.perf_counter()
    storm = [http.post("/generate", json=body) for body in _storm(phase, args.storm, number)]
    answers = await asyncio.gather(*storm)
    await asyncio.sleep(max(args.seconds - (time.perf_counter() - began), 0))
    until.set()
    await asyncio.gather(*clients)
    wrong = [answer.text[:200] for answer in answers if answer.status_code not in (200, 400)]
    assert not wrong, wrong[0]


async def measure(url: str, pid: int, args: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=None)
    rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        await _phase(http, args, "schemas", 0, Streams(http))  # vocabulary and processes are there
        processes = Processes(pid)
        for number in range(1, args.rounds + 1):
            for phase in ("quiet", "control", "schemas", "hostile"):
                seen, began, before = Streams(http), time.perf_counter(), processes.seconds()
                await _phase(http, args, phase, number, seen)
                took = time.perf_counter() - began
                row = rows[phase]
                row["seconds"].append(took)
                row["gap_ms.p99"].append(1000 * statistics.quantiles(seen.gaps, n=100)[98])
                row["total_ms.p99"].append(1000 * statistics.quantiles(seen.totals, n=100)[98])
                shares: dict[str, float] = defaultdict(float)
                for name, seconds in processes.seconds().items():
                    kind = re.sub(r" \d+", "", name)
                    shares[kind] += max(seconds - before.get(name, 0), 0) / took
                for kind, share in shares.items():
                    row[kind].append(share)
    median = {phase: {name: statistics.median(values) for name, values in row.items()} for phase, row in rows.items()}
    for phase, row_of in median.items():
        sys.stderr.write(
            json.dumps({"phase": phase, **{name: round(value, 3) for name, value in row_of.items()}}) + "\n"
        )
    for name in ("gap", "total"):
        of = {phase: row_of[f"{name}_ms.p99"] for phase, row_of in median.items()}
        for phase, value in of.items():
            _print(f"chaos.{name}_ms.{phase}", value)
        for one, other in _COMPARED:
            _print(f"chaos.{name}.{one}_by_{other}", of[one] / of[other])


def _print(metric: str, value: float) -> None:
    sys.stdout.write(json.dumps({"metric": metric, "value": round(value, 3)}) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models" / "tiny"))
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--storm", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    args, more = parser.parse_known_args()
    command = [sys.executable, "-m", "treeline_runtime", "--model", args.model, "--port=0", "--metrics-port=0"]
    command += ["--admin-port=0", "--no-events", *more]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as server:
        assert server.stderr is not None
        try:
            log = ""
            while not ((url := re.search(r"listening on (http://\S+)", log)) and "ready after" in log):
                line = server.stderr.readline()
                assert line, f"the server did not start:\n{log}"
                log += line
            asyncio.run(_beside(measure(url[1], server.pid, args), server))
        finally:
            server.terminate()


async def _beside(measuring: Any, server: subprocess.Popen[str]) -> None:
    """Read the server's log meanwhile: nobody shall wait for room in the pipe."""
    assert server.stderr is not None
    reading = asyncio.get_running_loop().run_in_executor(None, lambda: [None for _ in server.stderr or ()])
    try:
        await measuring
    finally:
        server.terminate()
        await reading


if __name__ == "__main__":
    main()
