"""Every interleaving of two engines of which one pulls the pages that the other one is computing, within bounds: a
prompt of two pages, and one disturbance.

The real classes of both sides run (`Lending`, `PageStore`, `Tiers`, `Loads`, `PrefillManager`, `RemotePages`), above
threads and a network that move when the explorer says so. To replay each order of events would take days, so states are
explored: one that was reached before, in whatever order, is continued once. Orders are counted as paths through states.
In each state every page has one owner, and what a copy reads or writes is not free. From each state, if the other side
computes nothing more, the request is answered with the right pages, and nothing is left.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from treeline_runtime.config import SchedulerConfig
from treeline_runtime.core import Req
from treeline_runtime.kvcache import KVPool, key_of, page, remote, store
from treeline_runtime.kvcache.host import HostTier, Slab
from treeline_runtime.kvcache.page import PageFormat
from treeline_runtime.kvcache.remote import RemotePages
from treeline_runtime.kvcache.store import PageStore
from treeline_runtime.kvcache.workers import Work, Workers
from treeline_runtime.messages import FinishReason, GenerateReq, SamplingParams
from treeline_runtime.scheduler.cache import CacheManager
from treeline_runtime.scheduler.lending import LATE_S
from treeline_runtime.scheduler.prefill import PrefillManager
from treeline_runtime.scheduler.rates import LoadRates
from treeline_runtime.scheduler.table import TableManager
from treeline_runtime.scheduler.tiers import STALLED_S, Tiers
from treeline_wire.events import block_hash, root_digest
from treeline_wire.pages import Later, encode_answer, parse_request

pytestmark = pytest.mark.deep

SIZE, PAGES, SLOTS, NBYTES = 32, 4, 2, 8
"""Tokens of a page; pages of a device, slots of a host, bytes of a page."""
CONFIG = SchedulerConfig(model="none", page_size=SIZE)
TOKENS = [*range(2 * SIZE), 7]
FORM = PageFormat(b"f" * 16, NBYTES)
MOST_TROUBLE = 1
LONGEST = 26
"""Events in the orders that are counted."""


def digests_of(tokens: list[int]) -> list[bytes]:
    found, parent = list[bytes](), root_digest(None)
    for at in range(0, len(tokens) // SIZE * SIZE, SIZE):
        parent = block_hash(parent, tokens[at : at + SIZE])
        found.append(parent)
    return found


DIGESTS = digests_of(TOKENS)
OTHERS = [*range(100, 100 + SIZE)]
"""A prompt of a page that is twice used."""
NAMES = {digest: at for at, digest in enumerate(DIGESTS + digests_of(OTHERS))}


class Waits(BaseException):
    """A thread needs an answer that has not come."""


class Job:
    """What a thread does. It is done again from its beginning when an answer has come, and gets no further than there:
    it asks nothing twice, and writes the same."""

    def __init__(self, kind: Work, part: Sequence[Any], work: Callable[[Any], list[Any]], then: Any) -> None:
        self.kind, self.part, self.work, self.then = kind, part, work, then
        self.heard: list[list[Any] | None] = []
        """Answers, as frames; None: silence."""
        self.sent = 0
        self.result: list[Any] | None = None


class Jobs(Workers):
    def __init__(self) -> None:
        self.all: list[Job] = []
        self.running: Job | None = None

    @property
    def busy(self) -> Counter[Work]:  # type: ignore[override]
        return Counter(job.kind for job in self.all)

    def start(self, kind: Work, parts: list[Sequence[Any]], work: Callable[[Any], list[Any]], then: Any) -> None:
        (part,) = parts
        self.all.append(job := Job(kind, part, work, then))
        if kind == "ask":
            self.go_on(job)

    def go_on(self, job: Job, *, fails: bool = False) -> None:
        before, self.running = self.running, job
        try:
            job.result = [None] * len(job.part) if fails else job.work(job.part)
        except Waits:
            pass
        finally:
            self.running = before

    def take(self, wait_s: float = 0.0) -> bool:
        done = [job for job in self.all if job.result is not None]
        for job in done:
            self.all.remove(job)
            assert job.result is not None
            job.then(job.result + [None] * (len(job.part) - len(job.result)), 0.0)
        return bool(done)


class Device:
    def __init__(self) -> None:
        self.bytes = np.zeros((PAGES, NBYTES), dtype=np.uint8)

    def copy_out(self, pages: Sequence[int], to: Sequence[npt.NDArray[np.uint8]]) -> None:
        for one, there in zip(pages, chain.from_iterable(to), strict=True):
            np.copyto(there, self.bytes[one])

    def copy_in(self, pages: Sequence[int], of: Sequence[npt.NDArray[np.uint8]]) -> None:
        for one, there in zip(pages, chain.from_iterable(of), strict=True):
            np.copyto(self.bytes[one], there)


class Side:
    """An engine's cache."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.cache = CacheManager(CONFIG, PAGES, TableManager(1, 3 * SIZE, SIZE))
        self.tree, self.pool = self.cache.tree, self.cache.pool
        self.jobs, self.device, slab = Jobs(), Device(), Slab(SLOTS, NBYTES, torch.device("cpu"))
        self.host = HostTier(SLOTS)
        store = PageStore(FORM, self.host, slab, None, self.jobs, self.tree.events)
        rates, device = LoadRates(lambda: 0.0, SIZE), cast(KVPool, self.device)
        self.tiers = Tiers(self.tree, self.pool, store, self.jobs, rates, kv_pool=lambda: device, clock=clock)
        self.cache.tiers = self.tiers
        limits: Any = SimpleNamespace(chunked_prefill_size=1000, longest_span=0, max_running_requests=1)
        self.prefill = PrefillManager(CONFIG, limits, self.cache, clock)

    def compute(self, tokens: list[int]) -> None:
        digests = digests_of(tokens)
        self.forget(len(digests) - self.pool.num_free)
        pages = self.pool.alloc(len(digests))
        existing, node = self.tree.insert(key_of(tokens), pages, prompt_tokens=len(tokens))
        for at in range(existing, len(digests)):
            self.device.bytes[pages[at]] = list(digests[at][:NBYTES])
        self.pool.free(pages[:existing])
        assert node is not None
        if tokens == OTHERS:
            self.tiers.inserted(node, 0, len(digests))

    def forget(self, count: int) -> None:
        if count > 0:
            freed = self.tree.evict(count)
            self.pool.free(freed)
            self.device.bytes[freed] = 0xEE

    def check(self) -> None:
        self.host.check_integrity()
        self.tree.check_integrity()
        assert self.cache.is_balanced()
        for job in self.jobs.all:
            if job.kind == "copy" and len(job.part) and isinstance(job.part[0], tuple):
                for entry in job.part:
                    numbers = [one for one in entry if isinstance(one, int)]  # of `put`: page, slot; of `get`: page
                    assert not self.pool._is_free[numbers[0]], "a page that is copied is free"
            if job.kind == "ask" and isinstance(job.part[0], tuple):
                for digest, slot in job.part:
                    held = self.host._entries[digest]
                    assert (held.slot, held.checksum) == (slot, None), "a slot that is written is free"

    def check_empty(self) -> None:
        tiers = self.tiers
        assert not tiers.store.failures["bad_page"], "a slot was written while it was read"
        assert (self.jobs.all, tiers._fetches, tiers._questions, tiers._in_line) == ([], {}, {}, {})
        assert (tiers.lending._waiting, tiers.loads.held_pages, self.tree.locked_pages) == ([], 0, 0)
        self.tree.reset()
        self.host.clear()

    def key(self) -> Any:
        nodes = [
            (*(NAMES[one] for one in node.digests), *node.pages.tolist(), node.place) for node, _ in self.tree._walk()
        ]
        entries = [(NAMES[one], of.slot, of.checksum is None, of.readers) for one, of in self.host._entries.items()]
        jobs = [(job.kind, len(job.part), job.sent, job.result is None, str(job.heard)) for job in self.jobs.all]
        lent = [(type(one).__name__, NAMES[one.digests[0]], since) for one, _, since in self.tiers.lending._waiting]
        fetches = [(*map(NAMES.get, one.digests), one.over, one.page_s) for one in self.tiers._fetches]
        order = [NAMES[one] for one in self.host._evictable]
        return nodes, entries, order, jobs, lent, fetches, self.tiers.lending._asked.qsize(), self.tree.locked_pages


class Line:
    """The socket of an asker's thread."""

    def __init__(self, world: World, job: Job | None) -> None:
        assert job is not None
        self.world, self.job, self.asked, self.read = world, job, 0, 0
        self.setsockopt = self.connect = lambda *_: None
        self.close = lambda: None

    def send_multipart(self, frames: list[bytes]) -> None:
        self.asked += 1
        if self.asked > self.job.sent:
            self.job.sent += 1
            self.world.network.append((self.job, frames))

    def poll(self, _ms: int) -> bool:
        if self.read == len(self.job.heard):
            raise Waits
        return self.job.heard[self.read] is not None

    def recv_multipart(self, **_: bool) -> list[Any]:
        frames = self.job.heard[self.read]
        self.read += 1
        return [SimpleNamespace(buffer=frame) for frame in frames or ()]


Event = tuple[str, int]


class World:
    """A lender that computes the prompt, and an asker with a request that waits for it."""

    def __init__(self) -> None:
        self.now, self.computed, self.lives, self.asks = 0.0, 0, True, True
        self.trouble: list[str] = []
        self.network: list[tuple[Job, list[Any]]] = []
        """Messages on their way: from a thread of the asker, or to it."""
        self.lender, self.asker = Side(lambda: self.now), Side(lambda: self.now)
        context: Any = SimpleNamespace(socket=lambda _: Line(self, self.asker.jobs.running))
        self.asker.tiers.store.remote = self.peers = RemotePages(context, None)
        message = GenerateReq("r", TOKENS, SamplingParams(), pages_from="127.0.0.1:1;within=2")
        self.req = Req.of(message, seed=0, eos_ids=(), max_new_tokens=1, arrival=1)
        self.asker.prefill.queue(self.req)

    # ---- what may happen ----------------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        if self.lives:
            yield "lender steps", 0
            if self.computed < len(DIGESTS):
                yield "compute", 0
        sides = [
            (name, side)
            for name, side, on in (("lender", self.lender, self.lives), ("asker", self.asker, self.asks))
            if on
        ]
        for name, side in sides:
            copies = [at for at, job in enumerate(side.jobs.all) if job.kind == "copy" and job.result is None]
            yield from ((f"{name} copies", at) for at in copies)
        if self.asks and self.req.finish is None:
            yield "asker steps", 0
        elif self.asks:
            yield "asker takes", 0
        for at in range(len(self.network)):
            yield "deliver", at
        waiting = [at for at, job in enumerate(self.asker.jobs.all) if job.kind == "ask" and job.result is None]
        for at in waiting if self.asks else ():
            if not self.lives:
                yield "silence", at
        if len(self.trouble) < MOST_TROUBLE:
            yield from ((name, 0) for name in self.troubles(sides, waiting) if name not in self.trouble)

    def troubles(self, sides: list[tuple[str, Side]], waiting: list[int]) -> Iterator[str]:
        for name, side in sides:
            if side.tree.evictable_pages:
                yield f"{name} evicts"
            if side.pool.num_free + side.tree.evictable_pages:
                yield f"{name} stores others"
            if not side.jobs.all and (side is self.lender or self.req.finish is not None):
                yield f"{name} flushes"
            if any(job.kind == "copy" and job.result is None for job in side.jobs.all):
                yield f"{name} fails to copy"
        if self.lives:
            yield "lender dies"
        if self.asks:
            yield "asker dies"
            if self.req.finish is None:
                yield from ("abort", "time passes")
            if self.asker.pool.num_free + self.asker.tree.evictable_pages >= len(DIGESTS):
                yield "another computes it"
            if waiting:
                yield from ("late sign of life", "timeout")
            if any(fetch.page_s for fetch in self.asker.tiers._fetches):
                yield "computing wins"
        if self.network:
            yield "duplicate"

    def do(self, event: Event) -> None:
        name, at = event
        lender, asker = self.lender, self.asker
        side = lender if name.startswith("lender") else asker
        if name in TROUBLES:
            self.trouble.append(name)
        match name.removeprefix("lender ").removeprefix("asker "):
            case "steps" if side is lender:
                lender.tiers.take()
            case "takes":
                asker.tiers.take()
            case "steps":
                self.step()
            case "compute":
                self.computed += 1
                lender.compute(TOKENS[: self.computed * SIZE])
            case "copies":
                side.jobs.go_on(side.jobs.all[at])
            case "fails to copy":
                first = next(job for job in side.jobs.all if job.kind == "copy" and job.result is None)
                side.jobs.go_on(first, fails=True)
            case "deliver":
                self.deliver(*self.network.pop(at))
            case "duplicate":
                self.deliver(*self.network[0])
            case "silence" | "timeout" | "late sign of life":
                waiting = [job for job in asker.jobs.all if job.kind == "ask" and job.result is None]
                job = asker.jobs.all[at] if name == "silence" else waiting[0]
                job.heard.append(encode_answer(Later()) if name == "late sign of life" else None)
                asker.jobs.go_on(job)
            case "evicts":
                side.forget(1)
            case "flushes":
                side.pool.free(side.tree.reset())
                side.tiers.clear()
                if side is lender:
                    self.computed = len(DIGESTS)  # the prompt does not come again
            case "dies":
                self.lives, self.asks = self.lives and side is not lender, self.asks and side is not asker
                self.network = []
            case "abort":
                self.req.finish = FinishReason("abort")
                asker.prefill.leave(self.req)
            case "another computes it":
                asker.compute(TOKENS)
            case "stores others":
                side.compute(OTHERS)
            case "computing wins":
                for fetch in asker.tiers._fetches:
                    fetch.page_s = 0.0
            case "time passes":
                self.now += STALLED_S

    def deliver(self, job: Job, frames: list[Any]) -> None:
        if (request := parse_request(frames)) is not None:
            if self.lives:
                self.lender.tiers.lending.ask(
                    request, lambda answer, data: self.network.append((job, encode_answer(answer, bytes(data))))
                )
        elif job in self.asker.jobs.all and job.result is None and self.asks:
            job.heard.append([bytes(frame) for frame in frames])
            self.asker.jobs.go_on(job)

    def step(self) -> None:
        """Take copies, and compute the request if it need not wait."""
        asker, req, table = self.asker, self.req, self.asker.cache._table
        asker.tiers.take()
        if asker.prefill.next_batch([], table.num_free, 0.5) is None:
            return
        pages = table.pages[req.row, : req.num_pages]
        assert not asker.pool._is_free[pages].any()
        for at in range(req.cached_tokens // SIZE):
            assert bytes(asker.device.bytes[pages[at]]) == DIGESTS[at][:NBYTES], "a page of other tokens was used"
        for at in range(req.cached_tokens // SIZE, len(DIGESTS)):
            asker.device.bytes[pages[at]] = list(DIGESTS[at][:NBYTES])
        req.kv_len = len(TOKENS)
        req.finish = FinishReason("length")
        asker.prefill.leave(req)
        asker.cache.end_filling(req)
        asker.cache.release(req, insert=True)

    # ---- the explorer's side ------------------------------------------------------------------------------

    def key(self) -> int:
        peer, all_jobs = self.req.remote, self.asker.jobs.all
        messages = [(all_jobs.index(job) if job in all_jobs else -1, str(frames)) for job, frames in self.network]
        return hash(
            repr((
                self.now, self.computed, self.lives, self.asks, sorted(self.trouble), messages,
                self.lender.key(), self.asker.key(), bool(self.peers._failed_at),
                self.req.finish, self.req.fetched, self.req.loaded,
                peer and (peer.is_asked, len(peer.held), peer.until),
            ))
        )  # fmt: skip

    def check(self) -> None:
        self.lender.check()
        self.asker.check()

    def drain(self) -> None:
        """Let everything end, while the lender computes nothing more."""
        self.trouble, self.computed = [*TROUBLES], len(DIGESTS)
        for _ in range(40):
            for side in ("lender", "asker"):
                if self.lives if side == "lender" else self.asks:
                    ended = side == "asker" and self.req.finish is not None
                    self.do((f"{side} {'takes' if ended else 'steps'}", 0))
            while moves := [one for one in self.events() if one[0] in ("deliver", "silence") or "copies" in one[0]]:
                self.do(moves[0])
            busy = self.asks and (self.req.finish is None or self.asker.jobs.all)
            if not busy and not self.network and not (self.lender.jobs.all or self.lender.tiers.lending._waiting):
                break
            self.now += LATE_S
        self.check()
        assert not self.asks or self.req.finish is not None, (
            "a request was lost that one engine alone would have served"
        )
        if self.lives:
            self.lender.check_empty()
        if self.asks:
            self.asker.check_empty()


TROUBLES = {
    *(
        f"{side} {what}"
        for side in ("lender", "asker")
        for what in ("evicts", "flushes", "fails to copy", "stores others", "dies")
    ),
    *("abort", "another computes it", "computing wins", "time passes", "late sign of life", "timeout", "duplicate"),
}


def replay(path: Sequence[Event]) -> World:
    world = World()
    for event in path:
        world.do(event)
    return world


def test_no_interleaving_of_two_engines_loses_a_page_or_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_CHUNK_PAGES", 1)
    monkeypatch.setattr(remote, "ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(store, "RACE_S", -1.0)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    world = World()
    first, edges = world.key(), dict[int, set[int]]()
    paths = deque([(first, (), list(world.events()))])
    while paths:
        state, path, events = paths.popleft()
        edges.setdefault(state, set())
        for event in events:
            world = replay(path)
            world.do(event)
            after = world.key()
            if after != state:
                edges[state].add(after)
            if after not in edges:
                edges[after] = set()
                world.check()
                paths.append((after, (*path, event), list(world.events())))
                world.drain()
    orders, ends = 0, Counter({first: 1})
    for _ in range(LONGEST):
        now = Counter[int]()
        for state, count in ends.items():
            for after in edges[state]:
                now[after] += count
        ends = now
        orders += now.total()
    assert orders >= 100_000
