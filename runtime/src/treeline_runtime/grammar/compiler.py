"""Compiled grammars by content: each is compiled once, in a confined process, while whoever asks does other things."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from treeline_runtime.confined.child import ProcessLimits
from treeline_runtime.confined.process import ConfinedProcess, Killed, Vanished
from treeline_runtime.grammar.backend import Compiled, GrammarBackend, GrammarError
from treeline_runtime.grammar.backends import load_backend
from treeline_runtime.grammar.constraint import GrammarConstraint, GrammarFiller
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.grammar.worker import Answer
from treeline_runtime.messages import Grammar

logger = logging.getLogger(__name__)

_NICENESS = 10
"""Whoever computes tokens goes first."""
_ENTRY_BYTES = 3072
"""What a grammar takes of the cache besides its source and what it was compiled to, also where it was refused."""


class GrammarBusyError(Exception):
    """Too many grammars are being compiled; the text is for the client."""


class CompileLimits(NamedTuple):
    """`seconds` and `memory_bytes` are of one compilation; `waiting` grammars wait, or are compiled, at most."""

    seconds: float = 10.0
    memory_bytes: int = 2 << 30
    workers: int = 2
    waiting: int = 512
    cache_bytes: int = 512 << 20
    retry_seconds: float = 60.0
    """How long a grammar that passed the limits is not tried again."""


class GrammarCompiler:
    """Owns the cache and the processes. One thread calls it; `on_done` is called by others."""

    def __init__(
        self,
        backend: str,
        vocabulary: Callable[[], Vocabulary],
        *,
        on_done: Callable[[], None],
        limits: CompileLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """vocabulary: called once, by another thread, when the first grammar comes. on_done: `get` may have news."""
        self.limits = limits or CompileLimits()
        self._name = backend
        self._vocabulary = vocabulary
        self._on_done = on_done
        self._clock = clock
        self._known: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        """Those that are wanted most recently last."""
        self._sizes: dict[Grammar, int] = {}
        """Of those that are done."""
        self._num_bytes = 0
        """Of them all: what is kept can be a hundred thousand refusals."""
        self._tried: dict[Grammar, float] = {}
        """When those that passed the limits did."""
        self._done: deque[tuple[Grammar, Future[Compiled]]] = deque()
        self._workers = _Workers(backend, self.limits)
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._loaded: _Loaded | None = None

    def get(self, grammar: Grammar) -> Future[Compiled]:
        """What the grammar compiles to, or GrammarError, or GrammarBusyError. `after` does not matter."""
        if grammar.after:
            grammar = Grammar(grammar.kind, grammar.source)
        self._settle()
        if self._clock() - self._tried.get(grammar, float("-inf")) >= self.limits.retry_seconds:
            self._tried.pop(grammar, None)
        else:
            return _failed(self._too_much())
        known = self._known.get(grammar)
        if known is not None:
            self._known.move_to_end(grammar)
            return known
        if len(self._known) - len(self._sizes) >= self.limits.waiting:
            return _failed(GrammarBusyError("too many grammars are being compiled; try again later"))
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.limits.workers, thread_name_prefix="treeline grammars")
        future = self._known[grammar] = self._threads.submit(self._compile, grammar)
        future.add_done_callback(lambda done: self._tell(grammar, done))
        return future

    def constraint(
        self, compiled: Compiled, *, stop_ids: Collection[int], after: str = "", min_tokens: int = 0
    ) -> GrammarConstraint:
        """Of a request whose output ends with one of `stop_ids`; of these, ordinary tokens are text to the grammar."""
        assert self._loaded is not None
        vocabulary = self._loaded.vocabulary
        ends = sorted(id for id in stop_ids if not vocabulary.texts[id])
        return GrammarConstraint(
            compiled.matcher(ends),
            self._loaded.filler,
            texts=self._loaded.marked,
            stop_ids=ends,
            after=after,
            min_tokens=min_tokens,
        )

    def close(self) -> None:
        """End the processes, whatever they do. Nothing may be asked for afterwards."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._workers.close()

    @property
    def num_bytes(self) -> int:
        """What is kept, about."""
        return self._num_bytes

    def _tell(self, grammar: Grammar, done: Future[Compiled]) -> None:
        self._done.append((grammar, done))
        self._on_done()

    def _settle(self) -> None:
        """Take the sizes of what has become ready, and forget what was not wanted for longest."""
        while self._done:
            grammar, future = self._done.popleft()
            error = None if future.cancelled() else future.exception()
            if future.cancelled() or (error is not None and not isinstance(error, GrammarError)):
                del self._known[grammar]  # a fault of ours, or of the machine: the next one tries again
            elif isinstance(error, _TooMuchError):
                del self._known[grammar]
                while len(self._tried) >= self.limits.waiting:
                    del self._tried[next(iter(self._tried))]
                self._tried[grammar] = self._clock()
            else:
                size = 0
                if error is None:
                    size = future.result().num_bytes
                else:
                    error.__traceback__ = None  # it would keep all that the frames it came through had
                self._sizes[grammar] = size + len(grammar.source) + _ENTRY_BYTES
                self._num_bytes += self._sizes[grammar]
        for grammar in self._unwanted():
            self._num_bytes -= self._sizes.pop(grammar)
            del self._known[grammar]

    def _unwanted(self) -> list[Grammar]:
        """What the bound leaves no room for."""
        found, left = list[Grammar](), self._num_bytes
        for grammar in self._known:
            if left <= self.limits.cache_bytes:
                break
            if grammar in self._sizes:
                left -= self._sizes[grammar]
                found.append(grammar)
        return found

    # ---- in threads of the pool -----------------------------------------------------------------------------

    def _compile(self, grammar: Grammar) -> Compiled:
        started = time.perf_counter()
        loaded = self._load()
        try:
            answer = self._workers.ask(msgspec.msgpack.encode(grammar), loaded.encoded)
        except Killed as error:
            logger.warning("compiling a grammar (%s) was stopped: it passed its limits (%s)", grammar.kind, error)
            raise self._too_much() from None
        kind, rest = answer[0], bytes(memoryview(answer)[1:])
        if kind == Answer.REFUSED:
            raise GrammarError(rest.decode(errors="replace"))
        compiled = loaded.backend.load(rest)
        logger.info("compiled a grammar (%s) in %.0f ms", grammar.kind, 1000 * (time.perf_counter() - started))
        return compiled

    def _too_much(self) -> GrammarError:
        return _TooMuchError(
            f"the grammar needs more than {self.limits.seconds:g} s or {self.limits.memory_bytes >> 20} MiB to be "
            "compiled: make it smaller"
        )

    def _load(self) -> _Loaded:
        with self._lock:
            if self._loaded is None:
                vocabulary = self._vocabulary()
                backend = load_backend(self._name)(vocabulary)
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
    """The texts of all tokens, special ones too."""
    encoded: bytes
    """As the processes take it."""
    backend: GrammarBackend
    filler: GrammarFiller


class _TooMuchError(GrammarError):
    pass


def _failed(error: Exception) -> Future[Compiled]:
    future = Future[Compiled]()
    future.set_exception(error)
    return future


class _Workers:
    """The processes. Threads may share them; each is asked by one at a time."""

    def __init__(self, backend: str, limits: CompileLimits) -> None:
        self._backend = backend
        self._limits = ProcessLimits(limits.seconds, limits.memory_bytes, threads=True)
        self._idle: list[ConfinedProcess] = []
        self._busy: set[ConfinedProcess] = set()
        self._closed = False
        self._lock = threading.Lock()

    def ask(self, request: bytes, vocabulary: bytes) -> bytearray:
        """Raises Killed where a limit was passed; OSError where no process can be started."""
        with contextlib.suppress(Vanished):
            return self._ask(request, vocabulary)
        return self._ask(request, vocabulary)

    def _ask(self, request: bytes, vocabulary: bytes) -> bytearray:
        process = self._take(vocabulary)
        try:
            answer = process.ask(request)
            if not answer:
                raise Killed("it answered nonsense")
        except BaseException:
            self._drop(process)
            raise
        with self._lock:
            self._busy.discard(process)
            if not self._closed:
                self._idle.append(process)
                return answer
        process.end()
        return answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, busy = [*self._idle], [*self._busy]
            self._idle.clear()
        for process in idle:
            process.end()
        for process in busy:
            process.kill()  # whoever waits for it sees it end, and ends the rest

    def _take(self, vocabulary: bytes) -> ConfinedProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.alive():
                    self._busy.add(process)
                    return process
                process.end()
        process = ConfinedProcess("treeline_runtime.grammar.worker", self._limits, self._backend, niceness=_NICENESS)
        with self._lock:
            self._busy.add(process)
            closed = self._closed
        try:
            if closed:
                raise OSError("the engine is closing")
            process.ask(vocabulary)
        except BaseException:
            self._drop(process)
            raise
        return process

    def _drop(self, process: ConfinedProcess) -> None:
        with self._lock:
            self._busy.discard(process)
        process.end()
