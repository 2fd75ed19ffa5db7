"""A fleet in simulated time: requests of a trace arrive, routers choose, engines compute and report. Pure.

It consists of one queue of events, in order of time, and never waits for a clock. A request takes `hop_s` from client
to engine and its first token as long back. KV events and load reports reach each router `news_s` after they were made,
in order, unless one is lost (`event_loss`; then the router's own recovery asks for it). Requests go to the routers in
turn; their datagrams to each other take `hop_s`, and get lost as often. A prompt computed apart goes to one engine and
back, then its request to the other one, which gets the pages as `Sharing` says. `Faults` has the failures: an engine
that restarts loses its cache and its requests; a router that restarts loses its state.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from treeline_wire.events import EventBatch

from treeline_sim.model.engine import FOREVER, Engine, EngineConfig
from treeline_sim.model.work import Happened, Work
from treeline_sim.routers import Answer, Asks, NoRoute, Route, Router, TraceRequest

TICK_S = 0.1
REPORT_EVERY_S, HEARTBEAT_S = 0.05, 1.0
"""The intervals of our runtime: on change at most 20 times a second, else once a second."""
NOTICED_S = 0.05
"""Delay after which a lost connection, or a new one, is noticed."""
_TURN_S = 1e-6
"""A question that comes so much after the end of a step waits for the end of the next."""


@dataclass(frozen=True, slots=True)
class Faults:
    """The failures of a run. `event_loss`: the share of KV batches, and of datagrams between routers, that get lost.
    `engines` and `routers`: (number, time) of restarts; an engine is away for `down_s`.
    """

    event_loss: float = 0.0
    engines: tuple[tuple[int, float], ...] = ()
    routers: tuple[tuple[int, float], ...] = ()
    down_s: float = 5.0


NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True)
class Sharing:
    """How endpoints share their caches. The first `prefill` of them compute prompts for the others, which answer; 0:
    all do both. `always`: the others compute no prompts. An endpoint sends one prompt's pages after another's,
    `transfer_s` for a token's, and `ask_s` passes before. Of a prompt computed apart, those of the last `tail_tokens`
    travel after it is computed, others before.
    """

    prefill: int = 0
    always: bool = False
    transfer_s: float = 20e-6
    ask_s: float = 0.01
    tail_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The engines, and their delays to the routers. Times in seconds. `slower`: see `Trace`."""

    engine: EngineConfig
    endpoints: int = 8
    routers: int = 1
    seed: int = 0
    hop_s: float = 0.0005
    news_s: float = 0.002
    faults: Faults = NO_FAULTS
    slower: tuple[float, ...] = (1.0,)
    sharing: Sharing = Sharing()

    def __post_init__(self) -> None:
        faults = self.faults
        if self.endpoints < 1 or self.routers < 1:
            raise ValueError("a fleet has at least one endpoint and one router")
        if not 0 <= faults.event_loss < 1 or min(self.hop_s, self.news_s, faults.down_s) < 0:
            raise ValueError("event loss is a share below 1, and delays are not negative")
        for who, most, what in ((faults.engines, self.endpoints, "engine"), (faults.routers, self.routers, "picker")):
            for number, _ in who:
                if not 0 <= number < most:
                    raise ValueError(f"there is no {what} {number}: they are 0 to {most - 1}")


@dataclass(slots=True)
class Served:
    """The record of one request. `ttft_s` is the client's, None without a first token; `cached_tokens` is the hit in
    the engine.
    """

    at: float
    prompt_tokens: int
    endpoint: int = -1
    form: str = "whole"
    cached_tokens: int = 0
    ttft_s: float | None = None
    ended_at: float = FOREVER
    error: str = ""


@dataclass(eq=False, slots=True)
class _Flight:
    """A request in flight. `router` may have been replaced by another object than the holder of the ticket. `at` is the
    endpoint where it is: the one that answers, or before that the one that computes its prompt.
    """

    request: TraceRequest
    served: Served
    router: Router
    route: Route
    at: int
    answered: bool = False

    @property
    def apart(self) -> bool:
        """Whether it is at the endpoint that only computes its prompt."""
        return self.at != self.route.endpoint


@dataclass(slots=True)
class Outcome:
    """The outcome of a run. `queued` are samples of each endpoint's requests, every second; `gaps` as in `Engine`."""

    served: list[Served] = field(default_factory=list)
    queued: list[list[int]] = field(default_factory=list)
    retractions: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    gaps: Counter[int] = field(default_factory=Counter)
    ended_at: float = 0.0


class Simulation:
    """One run. `make_router` gets the engines (None while one is down) and a number; it is called again when a router
    restarts.
    """

    def __init__(self, config: FleetConfig, make_router: Callable[[Sequence[Engine | None], int], Router]) -> None:
        self.config = config
        self.now = 0.0
        self._make = make_router
        self._rng = random.Random(f"fleet {config.seed}")
        self._epoch = 0
        self.engines: list[Engine | None] = [self._new_engine(endpoint) for endpoint in range(config.endpoints)]
        self.outcome = Outcome()
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = count()
        self._reported_at = [float("-inf")] * config.endpoints
        self._report_due = [False] * config.endpoints
        self._flights: list[dict[_Flight, None]] = [{} for _ in range(config.endpoints)]
        self._sends_from = [0.0] * config.endpoints  # the time until which each sends pages
        self._open = 0
        self._coming = True
        self.routers: list[Router] = []
        for number in range(config.routers):
            self.routers.append(make_router(self.engines, number))
            self._introduce(number)

    def run(self, trace: Iterable[TraceRequest], progress: Callable[[int], None] = lambda done: None) -> Outcome:
        """Run until every request of the trace has ended. `progress` gets the number of requests so far, now and
        then.
        """
        faults = self.config.faults
        for endpoint in range(self.config.endpoints):
            for number in range(self.config.routers):
                self._connect(number, endpoint)
            self._heartbeat(endpoint)
        self._tick()
        self._sample()
        for endpoint, at in faults.engines:
            self.at(at, self._kill, endpoint)
        for number, at in faults.routers:
            self.at(at, self._restart_router, number)
        requests = iter(trace)
        self._next(requests, progress)
        queue = self._queue
        while queue and (self._coming or self._open):
            self.now, _, call, args = heapq.heappop(queue)
            call(*args)
        outcome = self.outcome
        for engine in self.engines:
            if engine is not None:
                self._count_up(engine)
        outcome.ended_at = self.now
        return outcome

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        """Call a function at this time."""
        heapq.heappush(self._queue, (time, next(self._count), call, args))

    # Requests

    def _next(self, requests: Any, progress: Callable[[int], None]) -> None:
        request = next(requests, None)
        if request is None:
            self._coming = False
            progress(len(self.outcome.served))
            return
        self.at(max(self.now, request.at), self._arrive, request, requests, progress)

    def _arrive(self, request: TraceRequest, requests: Any, progress: Callable[[int], None]) -> None:
        number = len(self.outcome.served)
        served = Served(self.now, request.prompt.tokens)
        self.outcome.served.append(served)
        router = self.routers[number % len(self.routers)]
        try:
            route = router.route(request, self.now)
        except NoRoute as error:
            served.error = str(error)
        else:
            served.endpoint, served.form = route.endpoint, route.form
            flight = _Flight(request, served, router, route, route.source if route.form == "apart" else route.endpoint)
            self._open += 1
            self._flights[flight.at][flight] = None
            self.at(self.now + self.config.hop_s, self._pull if route.form == "pull" else self._deliver, flight)
        if number % 256 == 0:
            progress(number)
        self._next(requests, progress)

    def _deliver(self, flight: _Flight, pages: int = 0) -> None:
        """Give a request to the engine where it is, with the first `pages` of its prompt."""
        endpoint, request = flight.at, flight.request
        if flight.served.error:
            return  # its endpoint died meanwhile
        engine = self.engines[endpoint]
        work = Work(request.prompt, request.whole, 1 if flight.apart else request.output_tokens, flight)
        if engine is None:
            self._fail(flight, "the endpoint is down", overloaded=False)
            return
        engine.hold(request.prompt, pages)
        ends_at = engine.ends_at
        if not engine.submit(work, self.now):
            self._fail(flight, "the endpoint's queue is full", overloaded=True)
        elif engine.ends_at != ends_at:
            self.at(engine.ends_at, self._step, endpoint, engine)
        self._changed(endpoint)

    def _step(self, endpoint: int, engine: Engine) -> None:
        if engine is not self.engines[endpoint] or engine.ends_at != self.now:
            return  # another process, or the step ended earlier
        self._take(endpoint, engine, engine.advance(self.now))
        if engine.ends_at < FOREVER:
            self.at(engine.ends_at, self._step, endpoint, engine)

    def _take(self, endpoint: int, engine: Engine, happened: Happened) -> None:
        if happened.batch is not None:
            self._publish(endpoint, engine, *happened.batch)
        for work in happened.first:
            flight = _flight(work)
            if flight.apart:
                continue  # the client gets the other endpoint's
            served = flight.served
            served.cached_tokens = work.cached_tokens or 0
            served.ttft_s = self.now + self.config.hop_s - served.at
            self.at(self.now + self.config.hop_s, self._answer, flight)
        for work in happened.done:
            flight = _flight(work)
            if flight.apart:
                self._prefilled(flight, done=True)
            else:
                self._end(flight)
        for work in happened.refused:
            self._fail(_flight(work), "the prompt is longer than the endpoint's memory", overloaded=False)
        if happened.first or happened.done or happened.refused or happened.batch is not None:
            self._changed(endpoint)

    def _answer(self, flight: _Flight) -> None:
        served = flight.served
        if served.ttft_s is not None and not flight.answered:
            flight.answered = True
            flight.router.on_answer(
                flight.route.ticket, Answer(served.ttft_s, served.cached_tokens, served.prompt_tokens), self.now
            )

    def _end(self, flight: _Flight) -> None:
        flight.served.ended_at = self.now + self.config.hop_s
        self._flights[flight.at].pop(flight, None)
        self._open -= 1

    def _fail(self, flight: _Flight, why: str, *, overloaded: bool) -> None:
        if flight.apart:
            self._prefilled(flight, done=False)
            return
        flight.served.error = why
        if not flight.answered:
            flight.answered = True
            flight.router.on_failure(flight.route.ticket, overloaded, self.now)
        self._end(flight)

    # Pages of other endpoints

    def _prefilled(self, flight: _Flight, *, done: bool) -> None:
        """Let the endpoint that answers have a request whose prompt was computed apart, or whole if that failed."""
        told_at = self.now + self.config.hop_s
        took_s = told_at - flight.served.at if done else None
        self.at(told_at, flight.router.on_prefilled, flight.route.ticket, took_s, told_at)
        del self._flights[flight.at][flight]
        flight.at = flight.route.endpoint
        self._flights[flight.at][flight] = None
        self.at(told_at + self.config.hop_s, self._give if done else self._deliver, flight)

    def _pull(self, flight: _Flight, turns: int = 2) -> None:
        """Ask an endpoint what it has of a prompt, and for that: it answers each between two of its steps."""
        engine = self.engines[flight.route.source]
        if engine is None or not turns:
            self._give(flight)
        else:
            self.at(self.now + engine.step_left_s(self.now) + _TURN_S, self._pull, flight, turns - 1)

    def _give(self, flight: _Flight) -> None:
        """Send the pages of a prompt that its endpoint lacks; it gets the request with them."""
        source, blocks, sharing = flight.route.source, flight.request.prompt.blocks, self.config.sharing
        engine, other = self.engines[flight.at], self.engines[source]
        held = 0 if engine is None or other is None else other.cache.matched(blocks)
        tokens = 0 if engine is None else max(0, held - engine.cache.matched(blocks)) * engine.config.block_size
        early_s = sharing.transfer_s * max(0, tokens - sharing.tail_tokens) if flight.served.form == "apart" else 0.0
        begin = max(self._sends_from[source], flight.served.at, self.now + sharing.ask_s - early_s)
        self._sends_from[source] = begin + sharing.transfer_s * tokens
        self.at(self._sends_from[source], self._deliver, flight, held)

    # Events and reports

    def _publish(self, endpoint: int, engine: Engine, seq: int, batch: EventBatch) -> None:
        for number, router in enumerate(self.routers):
            if not router.deaf and self._rng.random() >= self.config.faults.event_loss:
                self.at(self.now + self.config.news_s, self._hear, number, router, endpoint, engine, seq, batch)

    def _hear(self, number: int, router: Router, endpoint: int, engine: Engine, seq: int, batch: EventBatch) -> None:
        if router is self.routers[number] and engine is self.engines[endpoint]:
            self._ask(number, endpoint, router.on_batch(endpoint, seq, batch, self.now))

    def _ask(self, number: int, endpoint: int, asks: Asks) -> None:
        """Send a router's questions; the answers are made when they arrive."""
        for ask in asks:
            self.at(self.now + self.config.news_s, self._reply, number, self.routers[number], endpoint, ask)

    def _reply(self, number: int, router: Router, endpoint: int, ask: Any) -> None:
        engine = self.engines[endpoint]
        if engine is not None:
            replies = list(engine.journal.reply(ask))
            self.at(self.now + self.config.news_s, self._replied, number, router, endpoint, engine, replies)

    def _replied(self, number: int, router: Router, endpoint: int, engine: Engine, replies: list[Any]) -> None:
        if router is self.routers[number] and engine is self.engines[endpoint]:
            self._ask(number, endpoint, router.on_replies(endpoint, replies, self.now))

    def _changed(self, endpoint: int) -> None:
        if not self._report_due[endpoint] and not all(router.deaf for router in self.routers):
            self._report_due[endpoint] = True
            due = self._reported_at[endpoint] + REPORT_EVERY_S
            self.at(max(self.now, due), self._report, endpoint)

    def _report(self, endpoint: int) -> None:
        engine = self.engines[endpoint]
        self._report_due[endpoint] = False
        if engine is None:
            return
        self._reported_at[endpoint] = self.now
        load = engine.load()
        for number, router in enumerate(self.routers):
            if not router.deaf:
                self.at(self.now + self.config.news_s, self._on_load, number, router, endpoint, engine, load)

    def _on_load(self, number: int, router: Router, endpoint: int, engine: Engine, load: Any) -> None:
        if router is self.routers[number] and engine is self.engines[endpoint]:
            self._ask(number, endpoint, router.on_load(endpoint, load, self.now))

    def _heartbeat(self, endpoint: int) -> None:
        if self.now - self._reported_at[endpoint] >= HEARTBEAT_S:
            self._changed(endpoint)
        self.at(max(self.now, self._reported_at[endpoint]) + HEARTBEAT_S, self._heartbeat, endpoint)

    def _tick(self) -> None:
        for number, router in enumerate(self.routers):
            if not router.deaf:
                for endpoint, asks in router.on_tick(self.now).items():
                    self._ask(number, endpoint, asks)
        self.at(self.now + TICK_S, self._tick)

    def _sample(self) -> None:
        self.outcome.queued.append([len(flights) for flights in self._flights])
        self.at(self.now + 1.0, self._sample)

    # Between routers

    def _introduce(self, number: int) -> None:
        if self.config.routers > 1:
            router = self.routers[number]
            router.join(_Others(self, number, router))

    def tell(self, number: int, datagram: bytes, to: int | None) -> None:
        """Send a datagram of router `number`."""
        for other in (to,) if to is not None else range(self.config.routers):
            if other != number and self._rng.random() >= self.config.faults.event_loss:
                self.at(self.now + self.config.hop_s, self._told, other, datagram, number)

    def _told(self, number: int, datagram: bytes, source: int) -> None:
        self.routers[number].on_told(datagram, source)

    # Failures

    def _new_engine(self, endpoint: int) -> Engine:
        self._epoch += 1
        like, slower = self.config.engine, self.config.slower[endpoint % len(self.config.slower)]
        own = replace(like, speed=like.speed.slower(slower), kv_tokens=int(like.kv_tokens / slower))
        return Engine(own, self._epoch)

    def _count_up(self, engine: Engine) -> None:
        outcome = self.outcome
        outcome.retractions += engine.retractions
        outcome.computed_tokens += engine.computed_tokens
        outcome.output_tokens += engine.output_tokens
        outcome.gaps.update(engine.gaps)

    def _kill(self, endpoint: int) -> None:
        engine = self.engines[endpoint]
        if engine is None:
            return
        self._count_up(engine)
        self.engines[endpoint] = None
        for flight in list(self._flights[endpoint]):
            self._fail(flight, "the endpoint died", overloaded=False)
        for number in range(self.config.routers):
            self.at(self.now + NOTICED_S, self._lost, number, endpoint)
        self.at(self.now + self.config.faults.down_s, self._start, endpoint)

    def _lost(self, number: int, endpoint: int) -> None:
        self.routers[number].on_connected(endpoint, False, self.now)

    def _start(self, endpoint: int) -> None:
        self.engines[endpoint] = self._new_engine(endpoint)
        self._reported_at[endpoint] = float("-inf")
        for number in range(self.config.routers):
            self.at(self.now + NOTICED_S, self._connect, number, endpoint)
        self._changed(endpoint)

    def _connect(self, number: int, endpoint: int) -> None:
        if self.engines[endpoint] is not None:
            self._ask(number, endpoint, self.routers[number].on_connected(endpoint, True, self.now))

    def _restart_router(self, number: int) -> None:
        self.routers[number] = self._make(self.engines, number)
        self._introduce(number)
        for endpoint in range(self.config.endpoints):
            self._connect(number, endpoint)


@dataclass(frozen=True, slots=True)
class _Others:
    """The connection of a router to the others, until it restarts."""

    simulation: Simulation
    number: int
    router: Router

    def now(self) -> float:
        return self.simulation.now

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.simulation.at(self.simulation.now + seconds, self._call, call)

    def tell(self, datagram: bytes, to: int | None) -> None:
        if self._alive():
            self.simulation.tell(self.number, datagram, to)

    def _call(self, call: Callable[[], None]) -> None:
        if self._alive():
            call()

    def _alive(self) -> bool:
        return self.simulation.routers[self.number] is self.router


def _flight(work: Work) -> _Flight:
    assert isinstance(work.tag, _Flight)
    return work.tag
