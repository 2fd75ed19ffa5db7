"""Compiled grammars by content: each is compiled once, in a confined process, while whoever asks does other things."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import msgspec

from treeline_runtime.confined.child import ProcessLimits
from treeline_runtime.confined.pool import ConfinedPool
from treeline_runtime.confined.process import ConfinedProcess, Killed, Vanished
from treeline_runtime.grammar.backend import Compiled, GrammarBackend, GrammarError
from treeline_runtime.grammar.backends import load_backend
from treeline_runtime.grammar.constraint import GrammarConstraint, GrammarFiller
from treeline_runtime.grammar.trim import READING, Trimmer
from treeline_runtime.grammar.vocabulary import Vocabulary
from treeline_runtime.grammar.worker import Answer, Order
from treeline_runtime.messages import Grammar

logger = logging.getLogger(__name__)

_NICENESS = 10
"""Whoever computes tokens goes first."""
_WARMING = (
    Grammar("choice", '["a"]'),
    Grammar("structural_tag", '{"type":"structural_tag","format":{"type":"const_string","value":"a"}}'),
)
"""Of each library that a backend may choose, one."""
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
        prepare: Callable[[Vocabulary], object] = lambda _: None,
        limits: CompileLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """vocabulary: called once, by another thread, when the first grammar comes or before (`warm`). on_done: `get`
        may have news. prepare: what else must be there before the first grammar is; called once, by another thread."""
        self.limits = limits or CompileLimits()
        self._name = backend
        self._vocabulary = vocabulary
        self._prepare = prepare
        self._on_done = on_done
        self._clock = clock
        self._known: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        """Those that are wanted most recently last."""
        self._sizes: dict[Grammar, int] = {}
        """Of those that are done."""
        self._num_bytes = 0
        """Of them all: what is kept can be a hundred thousand refusals."""
        self._tried: dict[Grammar, tuple[float, str]] = {}
        """When those did that passed the limits, and how."""
        self._outgrown: dict[Grammar, str] = {}
        """Those of which an output came to a step that took too much work, and what was said of it."""
        self._done: deque[tuple[Grammar, Future[Compiled]]] = deque()
        self._workers = ConfinedPool(partial(_Worker, backend, self.limits))
        self._threads: ThreadPoolExecutor | None = None
        self._queue: OrderedDict[Grammar, tuple[Future[Compiled], str]] = OrderedDict()
        """Those that no thread has taken yet, and how an output outgrew them."""
        self._lock = threading.Lock()
        """Of the queue."""
        self._loading = threading.Lock()
        self._loaded: _Loaded | None = None
        self._is_prepared = False
        self._trimmer = Trimmer()

    def get(self, grammar: Grammar) -> Future[Compiled]:
        """What the grammar compiles to, or GrammarError, or GrammarBusyError. `after` does not matter."""
        if grammar.after:
            grammar = Grammar(grammar.kind, grammar.source)
        self._settle()
        if grammar in self._tried:
            when, reason = self._tried[grammar]
            if self._clock() - when < self.limits.retry_seconds:
                return _failed(GrammarError(reason))
            del self._tried[grammar]
        known = self._known.get(grammar)
        if known is not None:
            self._known.move_to_end(grammar)
            return known
        if len(self._known) - len(self._sizes) >= self.limits.waiting:
            return _failed(GrammarBusyError("too many grammars are being compiled; try again later"))
        future = self._known[grammar] = Future[Compiled]()
        with self._lock:
            self._queue[grammar] = future, self._outgrown.get(grammar, "")
        self._pool().submit(self._next)
        return future

    def forget(self, grammar: Grammar) -> None:
        """Nobody waits for it any more: where it is not being compiled, it will not be."""
        grammar = Grammar(grammar.kind, grammar.source)
        with self._lock:
            queued = self._queue.pop(grammar, None)
        if queued is not None:
            queued[0].cancel()
            del self._known[grammar]

    def warm(self, may_hold: Callable[[], bool]) -> Future[None]:
        """Do in the background what the first grammar would wait for.

        may_hold: whether libraries may now make what they keep of a vocabulary, during which no other thread of this
        process runs: 0.3 s each with 128 thousand tokens. What it forbids is left to the first grammar. Another thread
        calls it.
        """
        return self._pool().submit(self._warm, may_hold)

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.limits.workers, thread_name_prefix="treeline grammars")
        return self._threads

    def constraint(
        self, compiled: Compiled, *, stop_ids: Collection[int], after: str = "", min_tokens: int = 0
    ) -> GrammarConstraint:
        """Of a request whose output ends with one of `stop_ids`; of these, ordinary tokens are text to the grammar."""
        assert self._loaded is not None
        vocabulary = self._loaded.vocabulary
        ends = sorted(id for id in stop_ids if not vocabulary.texts[id])
        return GrammarConstraint(
            compiled,
            self._loaded.filler,
            texts=self._loaded.marked,
            stop_ids=ends,
            after=after,
            min_tokens=min_tokens,
        )

    def outgrown(self, grammar: Grammar, compiled: Compiled, reason: str) -> None:
        """A step of an output took too much work for what the grammar was compiled to. The next time it is compiled
        otherwise, by another backend; where there is none, or its steps are too much as well, it is refused for a
        while.

        reason: for the client.
        """
        if grammar.after:
            grammar = Grammar(grammar.kind, grammar.source)
        self._settle()
        known = self._known.get(grammar)
        if grammar not in self._sizes or known is None or known.exception() or known.result() is not compiled:
            return  # another output has said so
        self._forget(grammar)
        if self._outgrown.pop(grammar, ""):
            self._refuse_for_a_while(grammar, reason)
        else:
            _put(self._outgrown, grammar, reason, self.limits.waiting)

    def close(self) -> None:
        """End the processes, whatever they do. Nothing may be asked for afterwards."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [*self._queue.values()]
            self._queue.clear()
        for future, _ in left:
            future.cancel()
        self._workers.close()

    @property
    def num_bytes(self) -> int:
        """What is kept, about."""
        return self._num_bytes

    def _settle(self) -> None:
        """Take the sizes of what has become ready, and forget what was not wanted for longest."""
        while self._done:
            grammar, future = self._done.popleft()
            error = future.exception()
            if error is not None and not isinstance(error, GrammarError):
                del self._known[grammar]  # a fault of ours, or of the machine: the next one tries again
            elif isinstance(error, _TooMuchError):
                del self._known[grammar]
                self._outgrown.pop(grammar, None)
                self._refuse_for_a_while(grammar, str(error))
            else:
                size = 0
                if error is None:
                    size = future.result().num_bytes
                else:
                    error.__traceback__ = None  # it would keep all that the frames it came through had
                self._sizes[grammar] = size + len(grammar.source) + _ENTRY_BYTES
                self._num_bytes += self._sizes[grammar]
        for grammar in self._unwanted():
            self._forget(grammar)

    def _forget(self, grammar: Grammar) -> None:
        size = self._sizes.pop(grammar)
        self._num_bytes -= size
        del self._known[grammar]
        if self._trimmer.let_go(size) and self._threads is not None:
            self._threads.submit(self._trimmer.trim)

    def _refuse_for_a_while(self, grammar: Grammar, reason: str) -> None:
        _put(self._tried, grammar, (self._clock(), reason), self.limits.waiting)

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

    def _next(self) -> None:
        """Compile who has waited for longest; there may be nobody left."""
        with self._lock:
            if not self._queue:
                return
            grammar, (future, outgrown) = self._queue.popitem(last=False)
        try:
            future.set_result(self._compile(grammar, outgrown))
        except BaseException as error:
            future.set_exception(error)
        self._done.append((grammar, future))
        del future  # a fault's traceback would have it, and so the fault itself
        self._on_done()

    def _compile(self, grammar: Grammar, outgrown: str) -> Compiled:
        started = time.perf_counter()
        loaded = self._load()
        try:
            answer = self._ask(Order(grammar, bool(outgrown)), loaded)
        except Killed as error:
            logger.warning("compiling a grammar (%s) was stopped: it passed its limits (%s)", grammar.kind, error)
            raise self._too_much() from None
        kind, rest = answer[0], bytes(memoryview(answer)[1:])
        if kind == Answer.REFUSED and outgrown:
            raise _TooMuchError(outgrown)
        if kind == Answer.REFUSED:
            raise GrammarError(rest.decode(errors="replace"))
        self._prepared(loaded)
        compiled = loaded.backend.load(rest)
        del answer, rest
        if self._trimmer.let_go(READING * compiled.num_bytes):
            self._trimmer.trim()
        logger.info("compiled a grammar (%s) in %.0f ms", grammar.kind, 1000 * (time.perf_counter() - started))
        return compiled

    def _ask(self, order: Order, loaded: _Loaded) -> bytearray:
        """What a process answers, another one where somebody has killed the first."""
        request = msgspec.msgpack.encode(order)
        with contextlib.suppress(Vanished), self._workers.lend() as worker:
            return worker.compile(request, loaded.encoded)
        with self._workers.lend() as worker:
            return worker.compile(request, loaded.encoded)

    def _warm(self, may_hold: Callable[[], bool]) -> None:
        started = time.perf_counter()
        try:
            loaded = self._load()
            answers = [self._ask(Order(grammar), loaded) for grammar in _WARMING]
        except (GrammarError, Killed, OSError) as error:
            logger.info("grammars are not made ready: %s", error)
            return
        held = may_hold()
        if held:
            self._prepared(loaded)
        for answer in answers:
            held = held and may_hold()
            if held and answer[0] == Answer.COMPILED:
                loaded.backend.load(bytes(memoryview(answer)[1:]))
        left = "" if held else "; while requests run, the rest waits for the first grammar"
        logger.info("grammars are ready after %.1f s%s", time.perf_counter() - started, left)

    def _prepared(self, loaded: _Loaded) -> None:
        with self._loading:
            if not self._is_prepared:
                self._prepare(loaded.vocabulary)
                self._is_prepared = True

    def _too_much(self) -> GrammarError:
        return _TooMuchError(
            f"the grammar needs more than {self.limits.seconds:g} s or {self.limits.memory_bytes >> 20} MiB to be "
            "compiled: make it smaller"
        )

    def _load(self) -> _Loaded:
        with self._loading:
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


def _put(kept: dict[Grammar, Any], grammar: Grammar, value: Any, most: int) -> None:
    """What was put longest ago makes room."""
    while len(kept) >= most:
        del kept[next(iter(kept))]
    kept[grammar] = value


def _failed(error: Exception) -> Future[Compiled]:
    future = Future[Compiled]()
    future.set_exception(error)
    return future


class _Worker(ConfinedProcess):
    """Compiles by one backend, with the vocabulary that it is told before its first grammar. Raises OSError when it
    cannot be started."""

    def __init__(self, backend: str, limits: CompileLimits) -> None:
        self._has_vocabulary = False
        # the compiler's threads, of which one starts it, live as long as the compiler
        confined = ProcessLimits(limits.seconds, limits.memory_bytes, threads=True, ends_with_thread=True)
        super().__init__("treeline_runtime.grammar.worker", confined, backend, niceness=_NICENESS)

    def compile(self, grammar: bytes, vocabulary: bytes) -> bytearray:
        """Raises `Killed` when no answer comes in time."""
        if not self._has_vocabulary:
            self.ask(vocabulary)
            self._has_vocabulary = True
        answer = self.ask(grammar)
        if not answer:
            raise Killed("it answered nonsense")
        return answer
