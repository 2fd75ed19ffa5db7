"""Attacks a running stack for a while, beside a well-behaved client, and reports each broken promise.

What must hold: no 5xx of our own making, to anybody; the other client is always served, at most twice as slowly at the
99th percentile; and no process is larger, or keeps more files open, when it is over.

The attackers are a process of their own at the lowest priority, so that they cost the system what they send and not the
cores they compute on; they come from another address of loopback than the other client.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import httpx
import psutil
from support.stack import Stack

from . import answers, bodies
from .attacks import Attack, attack

ATTACKER = "127.0.0.2"
_AT_ONCE = 48
_IDLE_S, _LONGEST_S, HOLD_S = 1.5, 15.0, 10.0
_MOST_BYTES = 1 << 20
GROWTH, GROWTH_BYTES, GROWTH_FILES = 0.25, 64 << 20, 24


@dataclass
class Attacked:
    """The attackers' results. `defects` name an attack by its number, which makes it again: see `of_number`."""

    attacks: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)


@dataclass
class Footprint:
    """Resident bytes and open files of a process with its children."""

    rss_bytes: int
    files: int


@dataclass
class Report:
    """The results of a run."""

    attacked: Attacked
    quiet_s: list[float]
    beside_s: list[float]
    failures: list[str]
    """Refused requests of the other client."""
    before: dict[str, Footprint]
    after: dict[str, Footprint]

    @property
    def p99_ratio(self) -> float:
        """99th percentile of the other client's latency, under attack ÷ quiet."""
        return p99(self.beside_s) / p99(self.quiet_s)

    @property
    def grown(self) -> list[str]:
        """Return the processes that have grown."""
        found = []
        for name, was in self.before.items():
            now = self.after[name]
            if now.rss_bytes > was.rss_bytes * (1 + GROWTH) + GROWTH_BYTES:
                found.append(f"{name}: {was.rss_bytes >> 20} MiB resident became {now.rss_bytes >> 20} MiB")
            if now.files > was.files + GROWTH_FILES:
                found.append(f"{name}: {was.files} open files became {now.files}")
        return found


def p99(values: list[float]) -> float:
    """Return the 99th percentile, in seconds."""
    return quantiles(values, n=100)[98]


def of_number(seed: int, number: int) -> Attack:
    """Return the attack of this number; it is the same each time."""
    return attack(random.Random(f"{seed}:{number}"))


async def perform(made: Attack, host: str, port: int, hold_s: float = HOLD_S) -> list[answers.Answer]:
    """Make one attack over one connection and return its answers. hold_s: the longest wait of an attack that waits."""
    reader, writer = await asyncio.open_connection(host, port, local_addr=(ATTACKER, 0))
    got = b""
    try:
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_LONGEST_S):
                reading = asyncio.create_task(_collect(reader, hold_s if made.end == "hold" else 5.0))
                try:
                    for part in made.sends:
                        writer.write(part)
                        await writer.drain()
                    if made.end in ("answer", "hold"):
                        got = await reading
                finally:
                    reading.cancel()
                    if not got and reading.done() and not reading.cancelled() and reading.exception() is None:
                        got = reading.result()
    finally:
        if made.end == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort() if made.end == "reset" else writer.close()
    return answers.read(got, made.http2)


async def _collect(reader: asyncio.StreamReader, wait_s: float) -> bytes:
    got = b""
    while len(got) < _MOST_BYTES:
        try:
            part = await asyncio.wait_for(reader.read(65536), wait_s)
        except (TimeoutError, ConnectionError):
            break
        if not part:
            break
        got += part
        wait_s = min(wait_s, _IDLE_S)
    return got


async def _assault(host: str, port: int, seed: int, first: int, seconds: float, rate: float, hold_s: float) -> Attacked:
    seen = Attacked()
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> None:
        made = of_number(seed, number)
        seen.kinds[made.name] += 1
        try:
            found = await perform(made, host, port, hold_s)
        except OSError as error:  # the edge may refuse connections; that the other client is served is asked elsewhere
            seen.kinds[f"refused: {error.strerror or type(error).__name__}"] += 1
            return
        finally:
            room.release()
        for answer in found:
            seen.statuses[answer.status] += 1
            if answer.is_defect:
                seen.defects.append(f"attack {number} ({made.name}): {answer.text[:700]!r}")

    seen.attacks = round(seconds * rate)  # all of them, however long they take on a busy machine
    async with asyncio.TaskGroup() as group:
        for number in range(first, first + seen.attacks):
            await room.acquire()
            group.create_task(one(number))
            await asyncio.sleep(1 / rate)
    return seen


def _attackers(pipe: Any, *arguments: Any) -> None:
    os.nice(19)
    pipe.send(asyncio.run(_assault(*arguments)))


class Assault:
    """The attackers' process while it runs; a context."""

    def __init__(self, url: str, seed: int, first: int, seconds: float, rate: float, hold_s: float) -> None:
        split = httpx.URL(url)
        context = multiprocessing.get_context("spawn")
        self._seconds = seconds
        self._pipe, self._theirs = context.Pipe()
        arguments = (self._theirs, split.host, split.port, seed, first, seconds, rate, hold_s)
        self._process = context.Process(target=_attackers, args=arguments, daemon=True)

    def __enter__(self) -> Assault:
        self._process.start()
        self._theirs.close()
        return self

    def result(self) -> Attacked:
        """Return the attackers' results when they have ended."""
        if not self._pipe.poll(self._seconds + 90):
            raise TimeoutError("the attackers do not end")
        try:
            found: Attacked = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the attackers' process has failed; what it printed says why") from None
        return found

    def __exit__(self, *_: object) -> None:
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()


def _footprints(stack: Stack) -> dict[str, Footprint]:
    found = {}
    for name, process in stack.processes.items():
        assert process.popen is not None
        root = psutil.Process(process.popen.pid)
        members = [root, *root.children(recursive=True)]
        found[name] = Footprint(sum(m.memory_info().rss for m in members), sum(m.num_fds() for m in members))
    return found


def _ask(client: httpx.Client, url: str, seconds: float, rate: float, failures: list[str]) -> list[float]:
    """Send short chats at a fixed pace, as a well-behaved client. Return their latencies."""
    rng = random.Random(0)
    times: list[float] = []
    began = time.monotonic()
    for number in range(int(seconds * rate)):
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        asked = time.monotonic()
        try:
            answer = client.post(f"{url}/v1/chat/completions", json=bodies.chat(f"What is {rng.randrange(99)} + 2?"))
            if answer.status_code != 200:
                failures.append(f"{answer.status_code}: {answer.text[:300]}")
        except httpx.HTTPError as error:
            failures.append(repr(error))
        times.append(time.monotonic() - asked)
    return times


def run(
    stack: Stack,
    *,
    seed: int = 0,
    seconds: float = 60.0,
    rate: float = 20.0,
    asked_rate: float = 8.0,
    settle_s: float = 12.0,
    hold_s: float = HOLD_S,
) -> Report:
    """Warm up under attack, look, send quietly, send under attack, let it settle, look again. Rates are per second;
    hold_s: how long the attackers keep silent connections open."""
    failures: list[str] = []
    warm = min(15.0, seconds / 2)
    with httpx.Client(timeout=60, trust_env=False) as client:
        with Assault(stack.url, seed, 1_000_000, warm, rate, hold_s) as assault:
            _ask(client, stack.url, warm, asked_rate, failures)
            seen = assault.result()
        time.sleep(settle_s)
        before = _footprints(stack)
        quiet_s = _ask(client, stack.url, seconds, asked_rate, failures)
        with Assault(stack.url, seed, 0, seconds, rate, hold_s) as assault:
            beside_s = _ask(client, stack.url, seconds, asked_rate, failures)
            later = assault.result()
    seen.attacks += later.attacks
    seen.kinds += later.kinds
    seen.statuses += later.statuses
    seen.defects += later.defects
    time.sleep(settle_s)
    return Report(seen, quiet_s, beside_s, failures, before, _footprints(stack))
