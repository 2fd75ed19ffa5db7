"""The interface of routers, and the oracles."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from treeline_wire.events import EventBatch
from treeline_wire.frames import Reply
from treeline_wire.frames import Request as Question
from treeline_wire.load import TreelineLoad

from treeline_sim.model.engine import Engine
from treeline_sim.model.text import Text


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace: it comes `at` seconds after the start, whether or not earlier ones have ended. `whole` is
    the prompt with the output after it.
    """

    at: float
    prompt: Text
    whole: Text
    output_tokens: int


@dataclass(slots=True)
class Answer:
    """The report on a request at its first token: seconds since it came, and tokens."""

    ttft_s: float
    cached_tokens: int
    prompt_tokens: int


class Route(NamedTuple):
    """A router's decision: the endpoint that answers, and a ticket that is given back once. In the form "apart"
    `source` computes the prompt first, in the form "pull" it gives what it has of it.
    """

    endpoint: int
    ticket: object = None
    form: str = "whole"
    source: int = -1


class NoRoute(Exception):
    """The router refuses the request: the client gets 429 or 503."""


Asks = Sequence[Question]
"""A router's questions to an endpoint's publisher."""


class Others(Protocol):
    """A router's connection to the others, and a clock: simulated sockets and event loop. Routers are numbered; a
    restarted one has its predecessor's number, and the predecessor gets no more calls.
    """

    def now(self) -> float:
        """Return the simulated time."""
        ...

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function `seconds` later."""
        ...

    def tell(self, datagram: bytes, to: int | None) -> None:
        """Send a datagram to one router, or to all others."""
        ...


class Router:
    """One process that routes. `now` is simulated time; endpoints are numbers.

    This base class gets no news of engines (`deaf`), learns nothing and asks nothing; subclasses define `route`.
    """

    deaf = True

    def route(self, request: TraceRequest, now: float) -> Route:
        """Decide about a request. Raises NoRoute."""
        raise NotImplementedError

    def on_prefilled(self, ticket: object, took_s: float | None, now: float) -> None:
        """Handle the end of a prompt computed apart, this many seconds after the request came; None: it failed."""

    def on_answer(self, ticket: object, answer: Answer, now: float) -> None:
        """Handle the first token of a request."""

    def on_failure(self, ticket: object, overloaded: bool, now: float) -> None:
        """Handle a refusal by the endpoint, or its death."""

    def on_connected(self, endpoint: int, connected: bool, now: float) -> Asks:
        """Handle a connection to an endpoint's publisher, or its loss."""
        return ()

    def on_batch(self, endpoint: int, seq: int, batch: EventBatch, now: float) -> Asks:
        """Handle KV events."""
        return ()

    def on_replies(self, endpoint: int, replies: Sequence[Reply], now: float) -> Asks:
        """Handle the publisher's answer to a question."""
        return ()

    def on_load(self, endpoint: int, load: TreelineLoad, now: float) -> Asks:
        """Handle a load report."""
        return ()

    def on_tick(self, now: float) -> Mapping[int, Asks]:
        """Handle the passing of a tenth of a second."""
        return {}

    def join(self, others: Others) -> None:
        """Join several routers; called before anything else."""

    def on_told(self, datagram: bytes, source: int) -> None:
        """Handle a datagram of another router."""


class Oracle(Router):
    """Sees the real caches and queues, and sends each request to the earliest first token; among equals to the one with
    most of it cached. Greedy: it ignores later requests.
    """

    def __init__(self, engines: Sequence[Engine | None], rng: random.Random) -> None:
        self._engines, self._rng = engines, rng

    def route(self, request: TraceRequest, now: float) -> Route:
        """Return the endpoint of the earliest first token. O(endpoints × blocks)."""
        best = [(e.ttft_s(request.prompt, now), self._rng.random(), i) for i, e in _up(self._engines)]
        return Route(min(best)[2])


class HitOracle(Router):
    """Sees the real caches and queues, too, and sends each request to where most of its prompt is cached or about to
    be; among equals to the shortest queue. It ignores the cost of queues, so its hit rate is a goal and its latency is
    not.
    """

    def __init__(self, engines: Sequence[Engine | None], rng: random.Random) -> None:
        self._engines, self._rng = engines, rng

    def route(self, request: TraceRequest, now: float) -> Route:
        """Return the endpoint of the longest hit. O(endpoints × blocks)."""
        best = []
        for i, engine in _up(self._engines):
            work = engine.waiting + engine.running
            best.append((engine.missing_tokens(request.prompt), work, self._rng.random(), i))
        return Route(min(best)[3])


def _up(engines: Sequence[Engine | None]) -> list[tuple[int, Engine]]:
    found = [(i, engine) for i, engine in enumerate(engines) if engine is not None]
    if not found:
        raise NoRoute("no endpoint is up")
    return found


ORACLES: dict[str, Callable[[Sequence[Engine | None], random.Random], Router]] = {
    "oracle": Oracle,
    "hit_oracle": HitOracle,
}
