"""A cache of compiled grammars by namespace and content; each is compiled once, in a confined process, in the
background.

Clients take turns. A grammar that outlasts a first try continues only in a worker for long ones; there is one fewer of
these than of workers, so others never wait longer than a first try. Until then it waits before the others of its
client. Seconds of long compilations are counted, and a client that used too many is refused until some have come back.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from treeline_runtime.confined.child import ProcessLimits
from treeline_runtime.confined.pool import ConfinedPool
from treeline_runtime.confined.process import ConfinedProcess, Killed, Vanished
from treeline_runtime.grammar.backend import Compiled, GrammarError
from treeline_runtime.grammar.backends import Backends, load_libraries
from treeline_runtime.grammar.constraint import GrammarConstraint, GrammarFiller
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.grammar.worker import Answer
from treeline_runtime.messages import Grammar
from treeline_runtime.turns import ClientSeconds, Turns

logger = logging.getLogger(__name__)

_WARMING = (
    Grammar("choice", '["a"]'),
    Grammar("structural_tag", '{"type":"structural_tag","format":{"type":"const_string","value":"a"}}'),
)
"""One process per library."""
_ENTRY_BYTES = 3072
"""Memory of a cache entry besides source and compiled form, also for refused grammars."""
_READING = 12
"""Memory while reading a compiled grammar, as a multiple: 13 measured for xgrammar's JSON."""
_TRIM_BYTES = 32 << 20
"""Free heap that is kept before it is returned, which takes some 20 ms and blocks other threads. Some hundred grammars
leave 400 MB in glibc's thread arenas."""
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)

Key = tuple[str | None, Grammar]
"""A namespace and a grammar. One namespace's grammars do not speed up another's."""


class GrammarBusyError(Exception):
    """Too many grammars wait for compilation; the text is for the client."""


class GrammarBudgetError(GrammarBusyError):
    """The client has used up its seconds; the text is for it."""


class CompileLimits(NamedTuple):
    """`seconds` and `memory_bytes`: of one compilation; `waiting`: the most waiting grammars."""

    seconds: float = 10.0
    first_try_seconds: float = 0.5
    client_seconds: float = 30.0
    """Seconds of long compilations after which a client is refused,"""
    client_seconds_back: float = 0.25
    """and how many of them come back each second."""
    memory_bytes: int = 2 << 30
    workers: int = 2
    waiting: int = 512
    cache_bytes: int = 512 << 20
    retry_seconds: float = 60.0
    """Seconds for which a grammar that exceeded the limits is refused."""


def _spent(wait_s: int) -> GrammarBudgetError:
    return GrammarBudgetError(
        f"your grammars have taken too long to compile: try again in {wait_s} s, or use simpler ones; those that are "
        "compiled already can be used meanwhile"
    )


class GrammarCompiler:
    """Owns the cache and the processes. One thread calls it; others call `on_done`."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        *,
        on_done: Callable[[], None],
        prepare: Callable[[Vocabulary], object] = lambda _: None,
        limits: CompileLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """vocabulary, prepare: called once, by another thread, at the first grammar or by `warm`; `prepare` does what
        else the first grammar needs. on_done: called when a grammar may be ready."""
        self.limits = limits or CompileLimits()
        self._vocabulary = vocabulary
        self._prepare = prepare
        self._on_done = on_done
        self._clock = clock
        self._known: OrderedDict[Key, Future[Compiled]] = OrderedDict()
        """The most recently requested is last."""
        self._sizes: dict[Key, int] = {}
        self._num_bytes = 0
        """The sum of `_sizes`, kept because there may be a hundred thousand entries."""
        self._tried: dict[Key, tuple[float, str]] = {}
        """Grammars that exceeded the limits: when, and the reason."""
        self._done: deque[tuple[Key, Future[Compiled]]] = deque()
        self._workers = ConfinedPool(partial(_Worker, self.limits))
        self._threads: ThreadPoolExecutor | None = None
        self._queued: dict[Key, _Job] = {}
        self._turns: Turns[_Job] = Turns(self.limits.waiting)
        """The same, in the order in which threads take them."""
        self._slow: Counter[str | None] = Counter()
        """Number of each client's queued grammars that have outlasted their first try."""
        self._num_long = 0
        """Grammars that are being compiled and may take all their time."""
        self._most_long = max(self.limits.workers - 1, 1)
        self._used = ClientSeconds(self.limits.client_seconds, self.limits.client_seconds_back, clock)
        self._lock = threading.Lock()  # of these
        self._loading = threading.Lock()
        self._loaded: _Loaded | None = None
        self._freed_bytes = 0
        """Bytes freed since the heap was trimmed."""

    def get(self, grammar: Grammar, namespace: str | None = None, client: str | None = None) -> Future[Compiled]:
        """The compiled grammar, GrammarError, or GrammarBusyError. `after` is ignored."""
        key = _key(grammar, namespace)
        self._settle()
        if key in self._tried:
            when, reason = self._tried[key]
            if self._clock() - when < self.limits.retry_seconds:
                return _failed(GrammarError(reason))
            del self._tried[key]
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        job = _Job(key, client)
        with self._lock:
            if wait_s := self._used.wait_s(client):
                return _failed(_spent(wait_s))
            self._known[key] = job.future
            self._queued[key] = job
            dropped = self._turns.put(client, job)
            if dropped is not None:
                self._leave_queue(dropped)
        if dropped is not None:
            self._finish(dropped, GrammarBusyError("too many grammars are being compiled; try again later"))
        self._pool().submit(self._next)
        return job.future

    def forget(self, grammar: Grammar, namespace: str | None = None) -> None:
        """No request needs it any more; unless its compilation has begun, it is dropped."""
        key = _key(grammar, namespace)
        with self._lock:
            job = self._queued.get(key)
            if job is None:
                return
            self._turns.remove(job.client, job)
            self._leave_queue(job)
        job.future.cancel()
        del self._known[key]

    def warm(self) -> Future[None]:
        """Prepares in the background what the first grammar would wait for: with 128 thousand tokens some seconds, in
        which libraries block other threads for 0.3 s each."""
        return self._pool().submit(self._warm)

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.limits.workers, thread_name_prefix="treeline grammars")
        return self._threads

    def constraint(self, compiled: Compiled, *, stop_ids: Collection[int], after: str = "") -> GrammarConstraint:
        """A request's constraint. `stop_ids` end its output; those that are ordinary tokens are text to the grammar."""
        assert self._loaded is not None
        vocabulary = self._loaded.vocabulary
        ends = sorted(id for id in stop_ids if not vocabulary.texts[id])
        return GrammarConstraint(compiled, self._loaded.filler, texts=self._loaded.marked, stop_ids=ends, after=after)

    def outgrown(self, grammar: Grammar, compiled: Compiled, reason: str, namespace: str | None = None) -> None:
        """Refuses a grammar for a while, because a step took too much work with it. reason: for the client."""
        key = _key(grammar, namespace)
        self._settle()
        known = self._known.get(key)
        if key not in self._sizes or known is None or known.exception() or known.result() is not compiled:
            return  # another output has reported it
        self._forget(key)
        self._refuse_for_a_while(key, reason)

    def close(self) -> None:
        """Ends the processes. The compiler cannot be used afterwards."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [*self._queued.values()]
            for job in left:
                self._turns.remove(job.client, job)
            self._queued.clear()
        for job in left:
            job.future.cancel()
        self._workers.close()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def _settle(self) -> None:
        """Records the sizes of finished grammars and evicts the least recently used."""
        while self._done:
            key, future = self._done.popleft()
            error = future.exception()
            if error is not None and not isinstance(error, GrammarError):
                del self._known[key]  # our fault, or the machine's: the next request tries again
            elif isinstance(error, _TooMuchError):
                del self._known[key]
                self._refuse_for_a_while(key, str(error))
            else:
                size = future.result().num_bytes if error is None else 0
                self._sizes[key] = size + len(key[1].source) + _ENTRY_BYTES
                self._num_bytes += self._sizes[key]
        for key in self._unwanted():
            self._forget(key)

    def _forget(self, key: Key) -> None:
        size = self._sizes.pop(key)
        self._num_bytes -= size
        del self._known[key]
        if self._is_much(size) and self._threads is not None:
            self._threads.submit(_malloc_trim, 0)

    def _is_much(self, num_bytes: int) -> bool:
        """Whether enough was freed to return it to the system."""
        with self._lock:
            self._freed_bytes += num_bytes
            is_much = self._freed_bytes >= _TRIM_BYTES
            if is_much:
                self._freed_bytes = 0
            return is_much

    def _refuse_for_a_while(self, key: Key, reason: str) -> None:
        while len(self._tried) >= self.limits.waiting:
            del self._tried[next(iter(self._tried))]
        self._tried[key] = self._clock(), reason

    def _unwanted(self) -> list[Key]:
        found, left = list[Key](), self._num_bytes
        for key in self._known:
            if left <= self.limits.cache_bytes:
                break
            if key in self._sizes:
                left -= self._sizes[key]
                found.append(key)
        return found

    # ---- in threads of the pool -----------------------------------------------------------------------------

    def _next(self) -> None:
        """Starts compiling the next grammar that may be compiled now."""
        with self._lock:
            has_time = self._num_long < self._most_long
            job = self._turns.take(lambda job: has_time or not self._slow[job.client])
            if job is None:
                return
            self._leave_queue(job)
            job.is_long = job.is_slow
            self._num_long += job.is_slow
        began = self._clock()
        try:
            self._finish(job, self._compile(job))
        except _OutOfTurnError:
            self._put_back(job)
        except BaseException as error:
            self._finish(job, error)
        if job.is_long:
            self._charge(job.client, self._clock() - began)
        with contextlib.suppress(RuntimeError):  # it is closed
            for _ in range(self.limits.workers):  # what others might not take before may be free for them now
                self._pool().submit(self._next)

    def _go_on(self, job: _Job) -> None:
        """Its first try is over. Raises _OutOfTurnError if it has to wait."""
        with self._lock:
            if job.is_long:
                return
            job.is_slow = True
            if self._num_long >= self._most_long:
                raise _OutOfTurnError
            self._num_long += 1
            job.is_long = True

    def _put_back(self, job: _Job) -> None:
        with self._lock:
            self._queued[job.key] = job
            self._slow[job.client] += 1
            self._turns.put_back(job.client, job)
        with contextlib.suppress(Killed, OSError):  # another process in place of the one that was ended
            self._ask(_WARMING[0], self._load())

    def _leave_queue(self, job: _Job) -> None:
        """Removes it from `_turns`. Needs the lock."""
        del self._queued[job.key]
        if job.is_slow:
            self._slow[job.client] -= 1

    def _charge(self, client: str | None, seconds: float) -> None:
        """A long compilation ended. If its client has used up its seconds, its waiting ones are refused."""
        with self._lock:
            self._num_long -= 1
            self._used.charge(client, seconds)
            wait_s = self._used.wait_s(client)
            refused = self._turns.drop(client) if wait_s else []
            for job in refused:
                self._leave_queue(job)
        for job in refused:
            self._finish(job, _spent(wait_s))

    def _finish(self, job: _Job, result: Compiled | BaseException) -> None:
        if isinstance(result, BaseException):
            result.__traceback__ = None  # it would keep all that the frames it came through had
            job.future.set_exception(result)
        else:
            job.future.set_result(result)
        self._done.append((job.key, job.future))
        self._on_done()

    def _compile(self, job: _Job) -> Compiled:
        started = time.perf_counter()
        loaded = self._load()
        try:
            answer = self._ask(job.key[1], loaded, partial(self._go_on, job))
        except Killed as error:
            logger.warning("compiling a grammar (%s) was stopped: it passed its limits (%s)", job.key[1].kind, error)
            raise _TooMuchError(
                f"the grammar needs more than {self.limits.seconds:g} s or {self.limits.memory_bytes >> 20} MiB to be "
                "compiled: make it smaller"
            ) from None
        kind, rest = answer[0], bytes(memoryview(answer)[1:])
        if kind == Answer.REFUSED:
            raise GrammarError(rest.decode(errors="replace"))
        compiled = loaded.backend.load(rest)
        del answer, rest
        if self._is_much(_READING * compiled.num_bytes):
            _malloc_trim(0)
        logger.info("compiled a grammar (%s) in %.0f ms", job.key[1].kind, 1000 * (time.perf_counter() - started))
        return compiled

    def _ask(self, grammar: Grammar, loaded: _Loaded, on_late: Callable[[], None] | None = None) -> bytearray:
        """Asks a process, and another if the first was killed from outside. on_late: see `ConfinedProcess`."""
        request = msgspec.msgpack.encode(grammar)
        with contextlib.suppress(Vanished), self._workers.lend() as worker:
            return worker.compile(request, loaded.encoded, on_late)
        with self._workers.lend() as worker:
            return worker.compile(request, loaded.encoded, on_late)

    def _warm(self) -> None:
        started = time.perf_counter()
        try:
            loaded = self._load()
            for grammar in _WARMING:
                loaded.backend.load(bytes(memoryview(self._ask(grammar, loaded))[1:]))
        except (GrammarError, Killed, OSError) as error:
            logger.info("grammars are not made ready: %s", error)
            return
        logger.info("grammars are ready after %.1f s", time.perf_counter() - started)

    def _load(self) -> _Loaded:
        with self._loading:
            if self._loaded is None:
                vocabulary = self._vocabulary()
                self._prepare(vocabulary)
                load_libraries()
                backend = Backends(vocabulary)
                self._loaded = _Loaded(
                    vocabulary,
                    vocabulary.with_marks(),
                    msgspec.msgpack.encode(vocabulary),
                    backend,
                    GrammarFiller(backend),
                )
            return self._loaded


class _Loaded(NamedTuple):
    vocabulary: Vocabulary
    marked: list[bytes]
    """All tokens' texts, special ones included."""
    encoded: bytes
    """The vocabulary in the form that the processes receive."""
    backend: Backends
    filler: GrammarFiller


class _TooMuchError(GrammarError):
    pass


@dataclass(eq=False)
class _Job:
    """A grammar that waits for its compilation or compiles."""

    key: Key
    client: str | None
    future: Future[Compiled] = field(default_factory=lambda: Future[Compiled]())
    is_slow: bool = False
    """It has outlasted its first try."""
    is_long: bool = False
    """It compiles and may use all its time."""


class _OutOfTurnError(Exception):
    """All places for long compilations are taken."""


def _key(grammar: Grammar, namespace: str | None) -> Key:
    return namespace, Grammar(grammar.kind, grammar.source) if grammar.after else grammar


def _failed(error: Exception) -> Future[Compiled]:
    future = Future[Compiled]()
    future.set_exception(error)
    return future


class _Worker(ConfinedProcess):
    """Compiles with the vocabulary sent before its first grammar. Raises OSError if it cannot be started."""

    def __init__(self, limits: CompileLimits) -> None:
        self._is_ready = False
        self._late_s = limits.first_try_seconds
        # the compiler's threads, of which one starts it, live as long as the compiler
        confined = ProcessLimits(limits.seconds, limits.memory_bytes, threads=True, ends_with_thread=True)
        super().__init__("treeline_runtime.grammar.worker", confined)

    def compile(self, grammar: bytes, vocabulary: bytes, on_late: Callable[[], None] | None) -> bytearray:
        """Raises `Killed` if no answer comes in time."""
        if not self._is_ready:
            self.ask(vocabulary)
            for warming in _WARMING:  # libraries make tables then, which is no part of anybody's first try
                self.ask(msgspec.msgpack.encode(warming))
            self._is_ready = True
        answer = self.ask(grammar, late_s=self._late_s, on_late=on_late)
        if not answer:
            raise Killed("it answered nonsense")
        return answer
