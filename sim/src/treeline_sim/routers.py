"""Who is asked where a request should go: the interface, those that need no news, and the oracles."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from treeline_wire.events import EventBatch
from treeline_wire.frames import Reply
from treeline_wire.frames import Request as Question
from treeline_wire.load import TreelineLoad

from treeline_sim.model.engine import Engine
from treeline_sim.model.text import Text


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace: it comes `at` seconds after the start, whatever became of those before it. `whole` is the
    prompt with the output after it."""

    at: float
    prompt: Text
    whole: Text
    output_tokens: int


@dataclass(slots=True)
class Answer:
    """What is reported of a request once its first token is there: seconds since it came, and tokens."""

    ttft_s: float
    cached_tokens: int
    prompt_tokens: int


class NoRoute(Exception):
    """The router sends the request nowhere: the client is answered 429 or 503."""


Asks = Sequence[Question]
"""What a router asks of an endpoint's publisher."""


class Others(Protocol):
    """The way from one router to the others, and a clock: what sockets and an event loop are to a real one. Routers
    are numbered; one that has restarted has the number of the one before it, which is not called any more."""

    def now(self) -> float:
        """Simulated time."""
        ...

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call so much later."""
        ...

    def tell(self, datagram: bytes, to: int | None) -> None:
        """Send it to one router, or to all others."""
        ...


class Router:
    """One process that routes. `now` is simulated time; endpoints are numbers.

    This one hears nothing of engines (`deaf`), learns nothing and asks nothing; `route` is a subclass's.
    """

    deaf = True

    def route(self, request: TraceRequest, now: float) -> tuple[int, object]:
        """The endpoint, and a ticket that is given back once. Raises NoRoute."""
        raise NotImplementedError

    def on_answer(self, ticket: object, answer: Answer, now: float) -> None:
        """The first token has come."""

    def on_failure(self, ticket: object, overloaded: bool, now: float) -> None:
        """The endpoint refused it, or died."""

    def on_connected(self, endpoint: int, connected: bool, now: float) -> Asks:
        """The way to an endpoint's publisher is there (again), or is lost."""
        return ()

    def on_batch(self, endpoint: int, seq: int, batch: EventBatch, now: float) -> Asks:
        """KV events."""
        return ()

    def on_replies(self, endpoint: int, replies: Sequence[Reply], now: float) -> Asks:
        """The publisher's answer to a question."""
        return ()

    def on_load(self, endpoint: int, load: TreelineLoad, now: float) -> Asks:
        """A load report."""
        return ()

    def on_tick(self, now: float) -> Mapping[int, Asks]:
        """A tenth of a second has passed."""
        return {}

    def join(self, others: Others) -> None:
        """It is one of several; called before anything else."""

    def on_told(self, datagram: bytes, source: int) -> None:
        """Another router has sent this."""


class Oracle(Router):
    """Knows every cache and queue as they are, and sends a request to where its first token comes soonest; of equals to
    the one with most of it cached. Greedy: it does not think of those who come later."""

    def __init__(self, engines: Sequence[Engine | None], rng: random.Random) -> None:
        self._engines, self._rng = engines, rng

    def route(self, request: TraceRequest, now: float) -> tuple[int, object]:
        """O(endpoints × blocks)."""
        best = [(e.ttft_s(request.prompt, now), self._rng.random(), i) for i, e in _up(self._engines)]
        return min(best)[2], None


class HitOracle(Router):
    """Knows every cache and queue, too, and sends a request to where most of its prompt is cached or about to be; of
    equals to the shortest queue. It minds no queue, so its hit rate is a goal and its latency is none."""

    def __init__(self, engines: Sequence[Engine | None], rng: random.Random) -> None:
        self._engines, self._rng = engines, rng

    def route(self, request: TraceRequest, now: float) -> tuple[int, object]:
        """O(endpoints × blocks)."""
        best = []
        for i, engine in _up(self._engines):
            work = engine.waiting + engine.running
            best.append((engine.missing_tokens(request.prompt), work, self._rng.random(), i))
        return min(best)[3], None


def _up(engines: Sequence[Engine | None]) -> list[tuple[int, Engine]]:
    found = [(i, engine) for i, engine in enumerate(engines) if engine is not None]
    if not found:
        raise NoRoute("no endpoint is up")
    return found


ORACLES: dict[str, Callable[[Sequence[Engine | None], random.Random], Router]] = {
    "oracle": Oracle,
    "hit_oracle": HitOracle,
}
