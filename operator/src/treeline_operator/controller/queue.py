"""A keyed queue of reconciliations that coalesces, delays, backs off and never runs a key twice at once."""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from treeline_operator.world import Key

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays between failed attempts: exponential from `base_s` to `cap_s`, each shortened by up to a half."""

    base_s: float = 0.2
    cap_s: float = 60.0

    def delay(self, failures: int, chance: float) -> float:
        """The delay after the `failures`-th failure in a row; `chance` in 0..1 spreads equal cases."""
        full = min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 30))
        return float(full * (1.0 - 0.5 * chance))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a reconciliation. `result` is a metric's label. With `retry` it runs again after the backoff (or
    `after_s`, if longer), else after `after_s`, if set."""

    result: str = "ok"
    retry: bool = False
    after_s: float | None = None


@dataclass(slots=True)
class _Run:
    queued: float
    dirty: bool = False
    after: float | None = None


@dataclass(slots=True)
class _Turns:
    """Ready keys, each with the time since when. Namespaces take turns, so that many keys of one delay no other's."""

    _by_namespace: dict[str, dict[Key, float]] = field(default_factory=dict)

    def put(self, key: Key, since: float) -> None:
        self._by_namespace.setdefault(key.namespace, {}).setdefault(key, since)

    def take(self) -> tuple[Key, float] | None:
        for namespace, keys in self._by_namespace.items():
            key = next(iter(keys))
            since = keys.pop(key)
            del self._by_namespace[namespace]
            if keys:
                self._by_namespace[namespace] = keys  # behind the others
            return key, since
        return None

    def drop(self, key: Key) -> float | None:
        keys = self._by_namespace.get(key.namespace, {})
        since = keys.pop(key, None)
        if not keys:
            self._by_namespace.pop(key.namespace, None)
        return since

    def items(self) -> Iterator[tuple[Key, float]]:
        for keys in self._by_namespace.values():
            yield from keys.items()

    def __contains__(self, key: Key) -> bool:
        return key in self._by_namespace.get(key.namespace, ())


@dataclass(slots=True)
class Schedule:
    """The queue without clock or tasks: every method takes the time.

    A key is in at most one of three places: ready, delayed (until a due time) or running. Ready keys run in order of
    arrival within their namespace; namespaces take turns, and new keys go first. A key added while it runs is queued
    again when it is done; nothing is lost.
    """

    backoff: Backoff = Backoff()
    chance: Callable[[], float] = random.random
    _new: _Turns = field(default_factory=_Turns)
    _ready: _Turns = field(default_factory=_Turns)
    _delayed: dict[Key, float] = field(default_factory=dict)
    _heap: list[tuple[float, Key]] = field(default_factory=list)
    _running: dict[Key, _Run] = field(default_factory=dict)
    _failures: dict[Key, int] = field(default_factory=dict)

    def add(self, key: Key, now: float, *, new: bool = False) -> None:
        """Queue a key for now, a `new` one before all others. This ends a delay of the key."""
        if run := self._running.get(key):
            run.dirty = True
            return
        self._delayed.pop(key, None)
        if new:
            since = self._ready.drop(key)
            self._new.put(key, now if since is None else since)
        elif key not in self._new:
            self._ready.put(key, now)

    def add_after(self, key: Key, delay_s: float, now: float) -> None:
        """Run in `delay_s`, or sooner if already scheduled sooner."""
        due = now + delay_s
        if run := self._running.get(key):
            run.after = due if run.after is None else min(run.after, due)
        elif key not in self._ready and key not in self._new and due < self._delayed.get(key, float("inf")):
            self._delay(key, due)

    def pop(self, now: float) -> Key | None:
        """The next key to run, which counts as running until `done`."""
        self._wake(now)
        if (taken := self._new.take() or self._ready.take()) is None:
            return None
        self._running[taken[0]] = _Run(taken[1])
        return taken[0]

    def done(self, key: Key, outcome: Outcome, now: float) -> float:
        """The key's run has ended; returns for how long it had waited and run."""
        run = self._running.pop(key)
        asked = now if run.dirty else run.after
        due = [] if asked is None else [asked]
        if outcome.retry:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay = max(self.backoff.delay(failures, self.chance()), outcome.after_s or 0.0)
            # A change meanwhile may have fixed the cause. Not at once: our own writes look the same.
            due = [now + delay, *(max(at, now + min(delay, 1.0)) for at in due)]
        else:
            self._failures.pop(key, None)
            if outcome.after_s is not None:
                due.append(now + outcome.after_s)
        if due and min(due) <= now:
            self._ready.put(key, now)
        elif due:
            self._delay(key, min(due))
        return now - run.queued

    def next_due(self) -> float | None:
        """The time when the next delay ends; None without delays."""
        while self._heap and self._delayed.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def depth(self) -> int:
        """The number of ready keys; delayed ones do not count."""
        return len(list(self._waiting()))

    def failures(self, key: Key) -> int:
        """Failures of the key in a row."""
        return self._failures.get(key, 0)

    def oldest(self, now: float) -> float:
        """Seconds since the key that has waited, or waited and run, for longest became ready."""
        since = [*(since for _, since in self._waiting()), *(run.queued for run in self._running.values())]
        return max(0.0, now - min(since)) if since else 0.0

    def known(self) -> Iterator[Key]:
        """Every key that is ready, delayed or running."""
        yield from (key for key, _ in self._waiting())
        yield from self._delayed
        yield from self._running

    def _waiting(self) -> Iterator[tuple[Key, float]]:
        yield from self._new.items()
        yield from self._ready.items()

    def _delay(self, key: Key, due: float) -> None:
        self._delayed[key] = due
        heapq.heappush(self._heap, (due, key))
        if len(self._heap) > 64 + 2 * len(self._delayed):  # entries of delays that were dropped
            self._heap = [(at, k) for k, at in self._delayed.items()]
            heapq.heapify(self._heap)

    def _wake(self, now: float) -> None:
        while (due := self.next_due()) is not None and due <= now:
            _, key = heapq.heappop(self._heap)
            del self._delayed[key]
            self._ready.put(key, due)


class Queue:
    """Runs `reconcile` for added keys, several at once, but one at a time per key.

    `finished` gets the outcome of each reconciliation, and its waiting and running times, on the event loop's clock. An
    exception out of `reconcile` is logged and retried; one of the types in `fatal` ends `run`.
    """

    def __init__(
        self,
        reconcile: Callable[[Key], Awaitable[Outcome]],
        *,
        finished: Callable[[Key, Outcome, float, float], None] = lambda *_: None,
        concurrency: int = 8,
        backoff: Backoff | None = None,
        chance: Callable[[], float] = random.random,
        fatal: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._reconcile = reconcile
        self._finished = finished
        self._concurrency = concurrency
        self._fatal = fatal
        self._schedule = Schedule(backoff or Backoff(), chance)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failed: BaseException | None = None
        self._stopping = False

    def add(self, key: Key, *, new: bool = False) -> None:
        """Reconcile the key as soon as a worker is free, a `new` one before all others."""
        self._schedule.add(key, _now(), new=new)
        self._changed.set()

    def add_after(self, key: Key, delay_s: float) -> None:
        """Reconcile the key in `delay_s` at the latest."""
        self._schedule.add_after(key, delay_s, _now())
        self._changed.set()

    def depth(self) -> int:
        """Keys that wait for a worker."""
        return self._schedule.depth()

    def oldest(self) -> float:
        """The age in seconds of the oldest key that waits or runs."""
        return self._schedule.oldest(_now())

    def failures(self, key: Key) -> int:
        """The number of failures of the key in a row."""
        return self._schedule.failures(key)

    def idle(self) -> bool:
        """Whether no key is ready or running; delayed keys do not count."""
        return not self._tasks and not self._schedule.depth()

    async def run(self) -> None:
        """Until `stop`; raises what ended a run fatally."""
        while not self._stopping and self._failed is None:
            self._changed.clear()
            while len(self._tasks) < self._concurrency and (key := self._schedule.pop(_now())):
                task = asyncio.create_task(self._one(key), name=f"reconcile {key.kind} {key.namespace}/{key.name}")
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            due = self._schedule.next_due() if len(self._tasks) < self._concurrency else None
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._changed.wait()
        if self._failed is not None:
            raise self._failed

    async def stop(self, grace_s: float) -> int:
        """Start nothing more, let what runs end for `grace_s`, then cancel it; returns how many were cancelled."""
        self._stopping = True
        self._changed.set()
        if not self._tasks:
            return 0
        _, pending = await asyncio.wait(set(self._tasks), timeout=grace_s)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        return len(pending)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()

    async def _one(self, key: Key) -> None:
        started = _now()
        outcome = Outcome("cancelled", retry=True)
        try:
            outcome = await self._reconcile(key)
        except self._fatal as exc:
            outcome = Outcome("fatal", retry=True)
            self._failed = exc
        except Exception:
            log.exception("reconciliation failed unexpectedly", extra={"key": key})
            outcome = Outcome("bug", retry=True)
        finally:
            now = _now()
            total = self._schedule.done(key, outcome, now)
            self._finished(key, outcome, total - (now - started), now - started)


def _now() -> float:
    return asyncio.get_running_loop().time()
