"""What a trace is: requests in order of time, made from a seed."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from treeline_sim.model.text import Text
from treeline_sim.routers import TraceRequest


@dataclass(frozen=True)
class Draw:
    """What a generator makes requests with: everything random comes from one seed. `rate` is requests a second."""

    seed: int
    block_size: int
    rate: float

    @cached_property
    def rng(self) -> random.Random:
        """For lengths, choices and texts."""
        return random.Random(f"trace {self.seed}")

    def text(self, tokens: int) -> Text:
        """A new text."""
        return Text(self.block_size).extended(tokens, self.rng)

    def request(self, at: float, prompt: Text, output_tokens: int) -> TraceRequest:
        """A request with a new output."""
        return TraceRequest(at, prompt, prompt.extended(output_tokens, self.rng), output_tokens)

    def arrivals(self, rate: float | None = None) -> Iterator[float]:
        """Times of a Poisson process, without end."""
        now = 0.0
        while True:
            now += self.rng.expovariate(rate or self.rate)
            yield now

    def between(self, low: int, high: int) -> int:
        """A length, evenly."""
        return self.rng.randint(low, high)

    def log_between(self, low: int, high: int) -> int:
        """A length, evenly by its logarithm: as many from 1k to 2k as from 10k to 20k."""
        return round(low * math.exp(self.rng.random() * math.log(high / low)))


@dataclass(frozen=True)
class Trace:
    """A kind of load. `rate` are requests a second that eight endpoints of the default speed bear, `requests` how many
    make a run. `working_set_tokens` and `pressure`: what comes back, and the share of all memory that it takes up
    where the source says so; without, endpoints have the memory of their preset. `slower`: each endpoint, in turn,
    takes so many times as long, and has so much less memory."""

    name: str
    summary: str
    rate: float
    requests: int
    generate: Callable[[Draw], Iterator[TraceRequest]]
    working_set_tokens: int = 0
    pressure: float = 0.0
    slower: tuple[float, ...] = (1.0,)


def merged(sessions: Iterable[tuple[float, Iterator[TraceRequest]]]) -> Iterator[TraceRequest]:
    """The requests of sessions in order of time. `sessions` are (when it begins, its requests), in order of time; a
    session's requests are in order, too, and none is before it begins."""
    waiting: list[tuple[float, int, TraceRequest, Iterator[TraceRequest]]] = []
    order = itertools.count()

    def put(session: Iterator[TraceRequest]) -> None:
        request = next(session, None)
        if request is not None:
            heapq.heappush(waiting, (request.at, next(order), request, session))

    for begin, session in sessions:
        while waiting and waiting[0][0] <= begin:
            _, _, request, later = heapq.heappop(waiting)
            yield request
            put(later)
        put(session)
    while waiting:
        _, _, request, later = heapq.heappop(waiting)
        yield request
        put(later)
