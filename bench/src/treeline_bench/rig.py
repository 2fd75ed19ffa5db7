"""What the benchmarks `picker` and `gie` share: a picker behind Envoy, chats of exact sizes, a paced and a full load.

The latency that asking adds is that of a paced load (open loop), which goes in turns of a few seconds through a
listener that does not ask and one that does. Requests per core are those of a saturating closed loop ÷ the CPU-seconds
that the picker's process used meanwhile, all its threads counted.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from treeline_sim.engine import CHAT, SimCase
from treeline_sim.http import CASE_HEADER
from treeline_wire import headers

from treeline_bench.client.messages import Call, ClosedLoop, Paced, Plan, Report
from treeline_bench.client.process import run_client
from treeline_bench.context import Display
from treeline_bench.machine import usable_cores
from treeline_bench.processes import Child
from treeline_bench.prompts import PromptMaker
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
class Load:
    """Requests of each size, and for each engine the cases it is given (the same requests; it holds its share)."""

    calls: dict[str, list[Call]]
    cases: list[tuple[SimCase, ...]]


def build_load(settings: Settings, maker: PromptMaker, engines: int = 1) -> Load:
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
    return Load(calls, [tuple(known) for known in cases])


def cores() -> tuple[list[int], list[int]]:
    """The picker's core, and those of all else: where there are two or more, the picker has the last to itself."""
    usable = usable_cores()
    return usable[-1:], usable[:-1] or usable


@dataclass(frozen=True)
class Rig:
    """A picker behind Envoy, and where to send."""

    picker: Child
    bare_port: int
    asking_port: int
    folder: Path

    def send(
        self,
        calls: list[Call],
        arrivals: ClosedLoop | Paced,
        *,
        count: int | None = None,
        seconds: float | None = None,
        port: int = 0,
    ) -> Report:
        """`count` requests, or those of so many seconds, to the asking listener or another one. Raises ClientFailed."""
        port = port or self.asking_port
        plan = Plan("127.0.0.1", port, calls, arrivals, count, seconds, keep_header=headers.CACHED_TOKENS)
        return run_client(plan, self.folder, cores()[1])

    def paced(self, calls: list[Call], settings: Settings, display: Display) -> tuple[Report, Report]:
        """(bare, asking), in turns, so that a machine that slows down slows both."""
        bare, asking = Report([]), Report([])
        display.phase(f"latency at {settings.rate_per_s:g} requests/s", 2 * settings.turns)
        for turn in range(settings.turns):
            for step, (report, port) in enumerate(((bare, self.bare_port), (asking, self.asking_port))):
                arrivals = Paced(settings.rate_per_s)
                report.outcomes.extend(self.send(calls, arrivals, seconds=settings.turn_s, port=port).outcomes)
                display.done(2 * turn + step + 1)
        return bare, asking

    def saturate(self, calls: list[Call], clients: int, seconds: float) -> tuple[Report, float]:
        """What a closed loop was answered, and the CPU-seconds that the picker used for it."""
        before = self.picker.cpu_seconds()
        report = self.send(calls, ClosedLoop(clients), seconds=seconds)
        return report, self.picker.cpu_seconds() - before


def added_ms(bare: Report, asking: Report, q: float) -> float:
    """What asking adds to the `q`-th percentile of latencies. Raises ValueError where nothing was answered."""
    first, second = ([outcome.latency_ms for outcome in report.answered()] for report in (bare, asking))
    return percentile(second, q) - percentile(first, q)
