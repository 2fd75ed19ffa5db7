"""The parts that the benchmarks `picker` and `gie` share: a picker behind Envoy, chats of exact sizes, a paced and a
saturating load.

Added latency: a paced load (open loop) alternates every few seconds between a bare listener and one that asks the
picker. Requests per core: the requests of a saturating closed loop ÷ the picker process's CPU seconds, all threads
included.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treeline_sim.connection import CASE_HEADER
from treeline_sim.openai import CHAT, SimCase
from treeline_wire import headers

from treeline_bench.context import Display
from treeline_bench.machine import usable_cores
from treeline_bench.processes import Child
from treeline_bench.prompts import PromptMaker
from treeline_bench.serving.messages import Call, Order, Record
from treeline_bench.serving.processes import Load
from treeline_bench.stats import percentile

MODEL_NAME = "tiny"
PACED_SIZE = "1kb"
START_S = 60.0


@dataclass(frozen=True)
class Settings:
    """Sizes in bytes, times in seconds. `prompts`: how many of each size."""

    prompts: dict[str, int]
    sizes: dict[str, int]
    concurrency: dict[str, int]
    rate_per_s: float = 200.0
    turns: int = 3
    turn_s: float = 10.0
    saturate_s: float = 10.0
    seed: int = 1


def chat_body(size: int, maker: PromptMaker, rng: random.Random) -> bytes:
    """A chat request of exactly `size` bytes; two thirds of its text are the system prompt."""

    def body(system: str, user: str) -> bytes:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return json.dumps({"model": MODEL_NAME, "max_tokens": 1, "messages": messages}).encode()

    room = size - len(body("", ""))
    words = "".join(rng.choices(maker.words, k=room // 3 + 1))
    text = words[:room].ljust(room, ".")
    return body(text[: room * 2 // 3], text[room * 2 // 3 :])


@dataclass(frozen=True)
class Requests:
    """Requests of each size, and each engine's cases (the same requests; it holds its share)."""

    calls: dict[str, list[Call]]
    cases: list[tuple[SimCase, ...]]


def build_load(settings: Settings, maker: PromptMaker, engines: int = 1) -> Requests:
    """The same for the same seed."""
    rng = random.Random(settings.seed)
    calls: dict[str, list[Call]] = {}
    cases: list[list[SimCase]] = [[] for _ in range(engines)]
    for name, count in settings.prompts.items():
        calls[name] = []
        for index in range(count):
            body = chat_body(settings.sizes[name], maker, rng)
            calls[name].append(Call(CHAT, body, {CASE_HEADER: str(len(cases[0]))}))
            for engine, known in enumerate(cases):
                known.append(SimCase(CHAT, body, held=index % engines == engine))
    return Requests(calls, [tuple(known) for known in cases])


def cores() -> tuple[list[int], list[int]]:
    """The picker's core, and all others: with two or more, the picker has the last to itself."""
    usable = usable_cores()
    return usable[-1:], usable[:-1] or usable


@dataclass(frozen=True)
class Rig:
    """A picker behind Envoy, and its addresses."""

    picker: Child
    bare_port: int
    asking_port: int
    folder: Path

    def send(
        self,
        calls: list[Call],
        *,
        clients: int = 1,
        rate_per_s: float = 0.0,
        count: int | None = None,
        seconds: float | None = None,
        port: int = 0,
    ) -> list[Record]:
        """Sends `count` requests, or for so many seconds, in a closed loop or at a rate, to the asking or another
        listener. Raises ClientFailed."""
        moments = [at / rate_per_s for at in range(int(rate_per_s * (seconds or 0)))] if rate_per_s else None
        order = Order(
            host="127.0.0.1",
            port=port or self.asking_port,
            calls=calls,
            count=count,
            keep_header=headers.CACHED_TOKENS,
            arrivals=moments,
            concurrency=clients,
            seconds=seconds,
            timeout_s=30.0,
        )
        with Load(order, 1, self.folder, cores()[1]) as load:
            (report,) = load.run()
        return report.records

    def paced(self, calls: list[Call], settings: Settings, display: Display) -> tuple[list[Record], list[Record]]:
        """(bare, asking), alternating, so that a slow phase affects both."""
        bare: list[Record] = []
        asking: list[Record] = []
        rate = settings.rate_per_s
        display.phase(f"latency at {rate:g} requests/s", 2 * settings.turns)
        for turn in range(settings.turns):
            for step, (records, port) in enumerate(((bare, self.bare_port), (asking, self.asking_port))):
                records += self.send(calls, rate_per_s=rate, seconds=settings.turn_s, port=port)
                display.done(2 * turn + step + 1)
        return bare, asking

    def saturate(self, calls: list[Call], clients: int, seconds: float) -> tuple[list[Record], float]:
        """The result of a closed loop, and the picker's CPU seconds."""
        before = self.picker.cpu_seconds()
        records = self.send(calls, clients=clients, seconds=seconds)
        return records, self.picker.cpu_seconds() - before


def answered(records: Sequence[Record]) -> list[Record]:
    """The records with a 200."""
    return [record for record in records if not record.error]


def failed(records: Sequence[Record]) -> int:
    """The number of records without a 200."""
    return len(records) - len(answered(records))


def added_ms(bare: Sequence[Record], asking: Sequence[Record], q: float) -> float:
    """The `q`-th percentile of added latency. Raises ValueError if nothing was answered."""
    first, second = ([record.latency_ms for record in answered(records)] for records in (bare, asking))
    return percentile(second, q) - percentile(first, q)
