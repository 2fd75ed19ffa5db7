"""Several pickers of one pool in simulated time: an unreliable network between them, engines, and a trace."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.peers.gossip import Address, Gossip, Outgoing
from treeline_epp.peers.seal import Seal, peer_key
from treeline_epp.picking.decision import Lease, Outcome
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.policies import create_policy
from treeline_epp.picking.request import Request
from treeline_wire.load import TreelineLoad

from support.epp_core import KEYS, WIDTH, Prompt

KEY = peer_key(b"a secret of these tests")
TICK_S = 0.05


class Clock:
    """Simulated time: calls happen in order of their times."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(time, self.now), next(self._count), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def every(self, seconds: float, call: Callable[[], None], phase: float = 0.0) -> None:
        def again() -> None:
            call()
            self.after(seconds, again)

        self.after(phase, again)

    def run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, call = heapq.heappop(self._due)
            call()
        self.now = until


@dataclass
class Network:
    """A network of pickers. `fate` returns the delay of each copy of a datagram; none if it is lost."""

    clock: Clock
    fate: Callable[[], Sequence[float]] = lambda: (0.0005,)
    nodes: dict[Address, Node] = field(default_factory=dict)
    sent_bytes: int = 0

    def send(self, source: Address, outgoing: Sequence[Outgoing]) -> None:
        for datagram, to in outgoing:
            if to is None:
                self.sent_bytes += len(datagram)
            for address in [to] if to is not None else [one for one in self.nodes if one != source]:
                for delay in self.fate():
                    self.clock.after(delay, lambda d=datagram, a=address: self._deliver(d, source, a))  # type: ignore[misc]

    def _deliver(self, datagram: bytes, source: Address, to: Address) -> None:
        node = self.nodes.get(to)
        if node is not None:
            self.send(to, node.gossip.on_datagram(datagram, source, self.clock.now))


class Node:
    """A picker with its gossip, at an address of a network."""

    def __init__(self, network: Network, address: Address, picker: Picker, sender: bytes) -> None:
        self.network, self.address, self.picker = network, address, picker
        self.gossip = Gossip(picker, KEY, Seal(KEY, sender))
        picker.elsewhere = self.gossip.own
        self.gossip.own.wake = self._wake
        network.nodes[address] = self

    @property
    def alive(self) -> bool:
        return self.network.nodes.get(self.address) is self

    def _wake(self, urgent: bool) -> None:
        self.network.clock.after(self.gossip.due_in(self.network.clock.now, urgent=urgent), self.flush)

    def flush(self) -> None:
        if self.alive:
            self.network.send(self.address, self.gossip.flush(self.network.clock.now))

    def tick(self) -> None:
        if self.alive:
            self.picker.on_tick(self.network.clock.now)
            self.network.send(self.address, self.gossip.tick(self.network.clock.now))

    def leave(self) -> None:
        self.network.send(self.address, self.gossip.leave())
        del self.network.nodes[self.address]


def picker_of(endpoints: int, rng: random.Random | None = None) -> Picker:
    """Return a picker of this many endpoints that publish events. `rng` draws among equals."""
    picker = Picker(PickerConfig(seed=1))
    if rng is not None:
        picker.policies._policies[None] = create_policy("predicted_ttft", rng)
    for number in range(endpoints):
        endpoint = picker.add_endpoint(EndpointSpec(f"pod-{number}", f"10.0.0.{number}:8000", models=("m",)))
        endpoint.pod.precise = True
    return picker


# --- a pool under load ------------------------------------------------------------------------------------------------

RATE = 8000.0
"""Tokens that an engine prefills in a second."""
_EVENT_S, _REPORT_S, _RETURN_S = 0.004, 0.25, 0.001


@dataclass(frozen=True)
class Asked:
    at: float
    prompt: Prompt


@dataclass
class Engine:
    """An engine that prefills one prompt after another from its cache, and reports cache and queue to all pickers."""

    pool: Pool
    name: str
    held: set[int] = field(default_factory=set)
    waiting: deque[tuple[Prompt, Callable[[int], None]]] = field(default_factory=deque)
    computed: int = 0

    def take(self, prompt: Prompt, answered: Callable[[int], None]) -> None:
        self.waiting.append((prompt, answered))
        if len(self.waiting) == 1:
            self._prefill()

    def _prefill(self) -> None:
        prompt, answered = self.waiting[0]
        cached = self._cached(prompt)
        self.computed += len(prompt.tokens) - cached

        def done() -> None:
            self.waiting.popleft()
            self.held.update(prompt.hashes)
            self.pool.clock.after(_EVENT_S, lambda: self.pool.stored(self.name, prompt))
            answered(cached)
            if self.waiting:
                self._prefill()

        self.pool.clock.after((len(prompt.tokens) - cached) / RATE, done)

    def _cached(self, prompt: Prompt) -> int:
        cached = sum(1 for _ in itertools.takewhile(self.held.__contains__, prompt.hashes)) * WIDTH
        return min(cached, len(prompt.tokens) - 1)

    def report(self) -> TreelineLoad:
        waiting = len(self.waiting)
        tokens = sum(len(prompt.tokens) - self._cached(prompt) for prompt, _ in self.waiting)
        return TreelineLoad(
            epoch=1,
            waiting=waiting,
            in_flight=waiting,
            waiting_uncached_tokens=tokens,
            prefill_tokens_per_s=RATE,
        )


class Pool:
    """Engines, `count` pickers that share the requests of a trace, and one more that sees every request (`shadow`).
    `same` counts the requests whose picker chose as the shadow would. `ttfts` are seconds."""

    def __init__(self, count: int, endpoints: int, *, gossip: bool = True, delay: float = 0.0005, seed: int = 1):
        self.clock = Clock()
        self.network = Network(self.clock, lambda: (delay,) if gossip else ())
        self._draws = random.Random()
        self._rng = random.Random(seed)
        self.nodes = [
            Node(self.network, (f"10.1.0.{number}", 9005), picker_of(endpoints, self._draws), bytes((number,)) * 6)
            for number in range(count)
        ]
        self.shadow = picker_of(endpoints, self._draws)
        self.pickers = [*(node.picker for node in self.nodes), self.shadow]
        self.engines = {name: Engine(self, name) for name in self.shadow.endpoints}
        self.asked = self.same = 0
        self.ttfts: list[float] = []
        for number, node in enumerate(self.nodes):
            self.clock.every(TICK_S, node.tick, phase=0.01 * number)
        self.clock.every(TICK_S, lambda: self.shadow.on_tick(self.clock.now))
        for number, name in enumerate(self.engines):
            self.clock.every(_REPORT_S, lambda name=name: self._report(name), phase=0.003 * number)  # type: ignore[misc]

    def run(self, trace: Sequence[Asked]) -> None:
        began = self.clock.now + 1.0  # pickers have found each other by then
        for asked in trace:
            self.clock.at(began + asked.at, lambda asked=asked: self._ask(asked))  # type: ignore[misc]
        self.clock.run(began + trace[-1].at + 10.0)

    def stored(self, name: str, prompt: Prompt) -> None:
        for picker in self.pickers:
            picker.index.apply(picker.endpoints[name].pod, prompt.stored(), KEYS)

    def _report(self, name: str) -> None:
        for picker in self.pickers:
            picker.on_load(name, self.engines[name].report(), self.clock.now)

    def _ask(self, asked: Asked) -> None:
        now, prompt, node = self.clock.now, asked.prompt, self._rng.choice(self.nodes)
        self.asked += 1
        request = Request(
            f"r{self.asked}", "m", prompt.namespace, prompt.key, prompt_tokens_estimate=len(prompt.tokens)
        )
        self._draws.seed(self.asked)
        decision = node.picker.pick(request, now)
        self._draws.seed(self.asked)
        would = self.shadow.pick(request, now)
        self.same += would.endpoint.name == decision.endpoint.name
        lease = node.picker.reserve(decision, now)
        forced = self.shadow.pick(replace(request, subset=frozenset({decision.endpoint.address})), now)
        seen = self.shadow.reserve(forced, now)
        tokens = len(prompt.tokens)

        def answered(cached: int) -> None:
            self.ttfts.append(self.clock.now - now)

            def close(picker: Picker, lease: Lease) -> None:
                picker.close(
                    lease,
                    self.clock.now,
                    Outcome.HEADERS,
                    ttft_s=self.clock.now - now,
                    cached_tokens=cached,
                    prompt_tokens=tokens,
                )

            self.clock.after(_RETURN_S, lambda: close(node.picker, lease))
            self.clock.after(_RETURN_S, lambda: close(self.shadow, seen))

        self.engines[decision.endpoint.name].take(prompt, answered)


def trace_of(requests: int, per_s: float, seed: int = 1) -> list[Asked]:
    """Return a trace: Poisson arrivals, shared system prompts (some new), continued conversations, and bursts of 16
    siblings on a new prompt."""
    rng = random.Random(seed)
    systems = [Prompt.random(1000 + number, 250) for number in range(24)]
    talks: list[Prompt] = []
    out: list[Asked] = []
    now = 0.0
    for number in itertools.count():
        if len(out) >= requests:
            return out[:requests]
        now += rng.expovariate(per_s)
        kind = rng.random()
        if kind < 0.03:
            long = Prompt.random(5000 + number, 400)
            out += [Asked(now + 0.002 * k, long.extended(9000 + 20 * number + k, 20)) for k in range(16)]
            now += 16 / per_s
        elif kind < 0.35 and talks:
            at = rng.randrange(len(talks))
            talks[at] = talks[at].extended(number, 60)
            out.append(Asked(now, talks[at]))
            if len(talks[at].tokens) > 8000:
                talks.pop(at)
        else:
            system = rng.choice(systems) if rng.random() < 0.9 else Prompt.random(3000 + number, 250)
            prompt = system.extended(number, rng.randrange(5, 80))
            out.append(Asked(now, prompt))
            if rng.random() < 0.3:
                talks.append(prompt)
    raise AssertionError


def spread(pool: Pool) -> float:
    """Return the busiest engine's work ÷ the mean."""
    work = [engine.computed for engine in pool.engines.values()]
    return max(work) * len(work) / sum(work)
