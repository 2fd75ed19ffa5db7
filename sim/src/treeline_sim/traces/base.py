"""The base of all traces: requests in order of time, made from a seed."""

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
    """The source of a generator's requests: all randomness comes from one seed. `rate` is requests a second."""

    seed: int
    block_size: int
    rate: float

    @cached_property
    def rng(self) -> random.Random:
        """The random numbers for lengths, choices and texts."""
        return random.Random(f"trace {self.seed}")

    def text(self, tokens: int) -> Text:
        """Return a new text."""
        return Text(self.block_size).extended(tokens, self.rng)

    def request(self, at: float, prompt: Text, output_tokens: int) -> TraceRequest:
        """Return a request with a new output."""
        return TraceRequest(at, prompt, prompt.extended(output_tokens, self.rng), output_tokens)

    def arrivals(self, rate: float | None = None) -> Iterator[float]:
        """Yield the times of a Poisson process, without end."""
        now = 0.0
        while True:
            now += self.rng.expovariate(rate or self.rate)
            yield now

    def between(self, low: int, high: int) -> int:
        """Draw a length evenly."""
        return self.rng.randint(low, high)

    def log_between(self, low: int, high: int) -> int:
        """Draw a length evenly by its logarithm: as many from 1k to 2k as from 10k to 20k."""
        return round(low * math.exp(self.rng.random() * math.log(high / low)))


@dataclass(frozen=True)
class Trace:
    """A kind of load. `rate` is the requests a second that eight endpoints of the default speed bear, `requests` the
    number in a run. `working_set_tokens` and `pressure`: the tokens that are requested again, and their share of all
    memory if the source names it; otherwise endpoints have the memory of their preset. `slower`: each endpoint, in
    turn, takes this many times as long, and has as many times less memory.
    """

    name: str
    summary: str
    rate: float
    requests: int
    generate: Callable[[Draw], Iterator[TraceRequest]]
    working_set_tokens: int = 0
    pressure: float = 0.0
    slower: tuple[float, ...] = (1.0,)


def merged(sessions: Iterable[tuple[float, Iterator[TraceRequest]]]) -> Iterator[TraceRequest]:
    """Merge the requests of sessions in order of time. `sessions` are (start, requests), in order of time; a session's
    requests are in order, too, and none is before its start.
    """
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
