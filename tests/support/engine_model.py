"""A fleet of engines that only prefill, in virtual time, around a picker: it shows the effect of choices in seconds.

An engine computes one prompt after another at its rate, which may change with time. It keeps every prefix that it has
computed and publishes it as KV events, reports its load ten times a second, and answers with the first token when a
prompt is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.decision import Lease, Outcome
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.request import Request
from treeline_wire.load import TreelineLoad

from support.epp_core import KEYS, WIDTH, Prompt
from support.peers import Clock

REPORT_S = 0.1
_MEASURES = 8
"""Prompts over which an engine's own rate is measured."""


@dataclass(frozen=True)
class Asked:
    """A request: `prompt` begins with `shared` tokens that other requests have, too."""

    at: float
    prompt: Prompt
    shared: int = 0


@dataclass
class Answered:
    """A request with its endpoint, its TTFT and its computed tokens."""

    asked: Asked
    endpoint: str
    ttft_s: float
    computed: int


@dataclass
class Engine:
    """An engine. `rate(now)` is in tokens per second. `tells_rate`: its load reports include it, as our runtime's."""

    name: str
    rate: Callable[[float], float]
    tells_rate: bool = True
    held: set[int] = field(default_factory=set)
    queue: deque[tuple[Asked, Lease]] = field(default_factory=deque)
    measured: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MEASURES))
    busy: bool = False

    def uncached(self, prompt: Prompt) -> int:
        known = 0
        for block in prompt.hashes:
            if block not in self.held:
                break
            known += WIDTH
        return max(1, len(prompt.tokens) - known)

    def report(self) -> TreelineLoad:
        waiting = sum(self.uncached(asked.prompt) for asked, _ in self.queue)
        tokens, seconds = sum(t for t, _ in self.measured), sum(s for _, s in self.measured)
        rate = tokens / seconds if self.tells_rate and seconds else 0.0
        return TreelineLoad(waiting=len(self.queue), waiting_uncached_tokens=waiting, prefill_tokens_per_s=rate)


class Fleet:
    """Engines and their picker. `run` sends requests, and returns their answers in order of arrival."""

    def __init__(self, engines: Iterable[Engine], policy: str = "predicted_ttft") -> None:
        self.picker = Picker(PickerConfig(policy, seed=5))
        self.engines = {engine.name: engine for engine in engines}
        self.clock = Clock(0.0)
        self.answered: list[Answered] = []
        for number, name in enumerate(self.engines):
            self.picker.add_endpoint(EndpointSpec(name, f"10.0.0.{number}:8000", models=("m",)))
            self.clock.every(REPORT_S, lambda name=name: self._report(name))  # type: ignore[misc]

    def run(self, asked: Iterable[Asked], until: float) -> list[Answered]:
        for one in asked:
            self.clock.at(one.at, lambda one=one: self._arrive(one))  # type: ignore[misc]
        self.clock.run(until)
        return sorted(self.answered, key=lambda one: one.asked.at)

    def _report(self, name: str) -> None:
        self.picker.on_load(name, self.engines[name].report(), self.clock.now)
        self.picker.on_tick(self.clock.now)

    def take(self, prompt: Prompt, now: float) -> Lease:
        """Pick an endpoint for a prompt and reserve it. Nothing computes the prompt yet."""
        request = Request(
            "id",
            model="m",
            key=prompt.key,
            prompt_tokens_estimate=len(prompt.tokens),
            max_output_tokens=1,
        )
        return self.picker.reserve(self.picker.pick(request, now), now)

    def _arrive(self, asked: Asked) -> None:
        lease = self.take(asked.prompt, self.clock.now)
        engine = self.engines[lease.endpoint.spec.name]
        engine.queue.append((asked, lease))
        if not engine.busy:
            self._begin(engine)

    def _begin(self, engine: Engine) -> None:
        asked, lease = engine.queue.popleft()
        engine.busy = True
        tokens = engine.uncached(asked.prompt)
        took = tokens / engine.rate(self.clock.now)
        self.clock.after(took, lambda: self._end(engine, asked, lease, tokens, took))

    def _end(self, engine: Engine, asked: Asked, lease: Lease, computed: int, took: float) -> None:
        engine.busy = False
        engine.measured.append((computed, took))
        engine.held.update(asked.prompt.hashes)
        self.picker.index.apply(lease.endpoint.pod, asked.prompt.stored(), KEYS)
        ttft, prompt = self.clock.now - asked.at, len(asked.prompt.tokens)
        self.picker.close(
            lease, self.clock.now, Outcome.HEADERS, ttft_s=ttft, cached_tokens=prompt - computed, prompt_tokens=prompt
        )
        self.answered.append(Answered(asked, engine.name, ttft, computed))
        if engine.queue:
            self._begin(engine)
